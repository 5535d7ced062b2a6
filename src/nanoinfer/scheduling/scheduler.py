"""The scheduler: which sequences run in the next step, and by how many tokens.

One step of the system is three lines: schedule, run, postprocess.

    waiting requests --admit--> running sequences --finish--> gone
                                 |  each step: the tokens that the engine has not seen yet
                                 |  (a prompt, a chunk of one, one token, or a window that slid)

Rules:
- Admission is first come, first served. A request is admitted when its n sequences fit and the tokens that
  they may grow to fit, so that what has been admitted never has to be thrown out again.
- Every sequence that needs one token gets it in every step. What is left of `max_num_batched_tokens`, and a
  quarter of it at least, goes to the longer ones (prompts, windows that slid), in chunks, the one that has
  waited longest for a token first. So no sequence waits for ever, and no prompt stalls the others for long.
- A sequence draws a token in the step that feeds its last unseen token.

No tensors and no engine here: tests run it with plain numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.scheduling.sequence import Request, Sequence


@dataclass(frozen=True)
class Work:
    """What one step does with one sequence."""

    sequence: Sequence
    token_ids: list[int]
    """Tokens to feed."""
    restart: bool
    """Whether the engine must forget the sequence first: its window has slid."""
    draws: bool
    """Whether a token is drawn: these are the last tokens that the engine has not seen."""
    forks: list[Sequence] = field(default_factory=list)
    """Siblings that start from this sequence's past, and draw from the same logits."""
    pending: bool = False
    """Whether one more token is fed: the one drawn last, which has not been read yet."""


class Scheduler:
    """Decides what the engine does next. `add`, then `schedule` and `postprocess` until nothing is left."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._capacity = config.max_num_cached_tokens or config.max_num_seqs * config.block_size
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []
        self._step = 0

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> list[Sequence]:
        """The admitted sequences that have not ended."""
        return list(self._running)

    def add(self, request: Request) -> None:
        """Queue a request that `check` has passed."""
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise NanoinferError where a request could never be admitted, or its prompt does not fit the context."""
        params, config = request.params, self.config
        if params.n > config.max_num_seqs:
            raise NanoinferError(f"n={params.n} is more than max_num_seqs={config.max_num_seqs}: raise it, or lower n")
        if params.slide_stride is not None and params.slide_stride > config.block_size:
            raise NanoinferError(
                f"slide_stride={params.slide_stride} is more than the context length {config.block_size}"
            )
        num_prompt = len(request.prompt_token_ids)
        if num_prompt < 1:
            raise NanoinferError("the prompt has no tokens: a text needs at least one to start from")
        if num_prompt > config.block_size and params.overflow != "slide":
            raise NanoinferError(
                f"the prompt has {num_prompt} tokens, the context length is {config.block_size}: shorten it, or"
                " use overflow='slide' (--overflow slide), which keeps the last tokens"
            )
        if (need := self._tokens_needed(request)) > self._capacity:
            raise NanoinferError(
                f"the request may grow to {need} cached tokens (n={params.n}), the cache holds {self._capacity}:"
                " raise kv_cache_memory, or lower n or max_tokens"
            )

    def _tokens_needed(self, request: Request) -> int:
        """Return the cached tokens that a request's sequences may grow to."""
        longest = len(request.prompt_token_ids) + request.sequences[0].max_tokens
        return request.params.n * min(longest, self.config.block_size)

    def schedule(self) -> list[Work]:
        """Admit what fits and return the work of the next step.

        Empty only when nothing is unfinished, or all that is running will have ended when deferred tokens are read.
        """
        self._admit()
        self._step += 1
        ready = (s for s in self._running if not self._awaits_fork(s) and not s.ends_when_read)
        todo = [(s, self._num_unseen(s)) for s in ready]
        work = [self._work(s, 1, draws=True) for s, unseen in todo if unseen == 1]
        budget = max(self.config.max_num_batched_tokens - len(work), self.config.max_num_batched_tokens // 4, 1)
        longer = [item for item in todo if item[1] > 1]
        for sequence, unseen in sorted(longer, key=lambda item: item[0].last_draw_step):  # stable: in order of arrival
            if (count := min(unseen, budget)) < 1:
                break
            budget -= count
            work.append(self._work(sequence, count, draws=count == unseen))
        return work

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if not self.has_room(self._tokens_needed(request), len(request.sequences)):
                return
            self._running += request.sequences  # before it leaves the queue: an interrupt must not lose it
            self._waiting.popleft()
            for sequence in request.sequences:
                sequence.last_draw_step = self._step

    def has_room(self, num_tokens: int, num_seqs: int = 1) -> bool:
        """Return whether more sequences fit beside the running ones, and the tokens that they may grow to."""
        if len(self._running) + num_seqs > self.config.max_num_seqs:
            return False
        reserved = sum(self._tokens_needed(r) for r in {s.request for s in self._running})
        return reserved + num_tokens <= self._capacity

    @staticmethod
    def _awaits_fork(sequence: Sequence) -> bool:
        """Return whether a sequence waits for its first sibling to be fed the prompt."""
        return sequence.sample_index > 0 and sequence.handle is None

    @staticmethod
    def _num_unseen(sequence: Sequence) -> int:
        """Return how many tokens of its window the engine has not seen."""
        start = sequence.wanted_start
        cached = sequence.num_cached if start == sequence.start else 0
        return sequence.num_tokens - start - cached

    def _work(self, sequence: Sequence, count: int, *, draws: bool) -> Work:
        """Return the work that feeds `count` tokens to a sequence, and note that they are fed."""
        start = sequence.wanted_start
        restart = start != sequence.start
        if restart:
            sequence.start, sequence.num_cached = start, 0
        first = start + sequence.num_cached
        sequence.num_cached += count
        forks = []
        if draws:
            sequence.last_draw_step = self._step
            forks = [s for s in sequence.request.sequences if self._awaits_fork(s) and s.finish_reason is None]
            for fork in forks:
                fork.start, fork.num_cached, fork.last_draw_step = start, sequence.num_cached, self._step
        token_ids = sequence.token_ids[first : first + count]
        return Work(sequence, token_ids, restart, draws, forks, pending=len(token_ids) < count)

    @staticmethod
    def defer(work: list[Work]) -> None:
        """Note that the tokens of this work are drawn but will be read later: `postprocess` then gets them."""
        for sequence in drawing(work):
            sequence.num_inflight_tokens += 1

    def postprocess(self, work: list[Work], tokens: list[list[int]]) -> list[Sequence]:
        """Add the drawn tokens to their sequences and return the sequences that have ended.

        Args:
            work: from `schedule`.
            tokens: the tokens drawn for each sequence that drew (`drawing(work)` gives their order): one in
                plain decoding, several when speculation verified them: the engine holds all but the last of
                those; none for a sequence that has ended meanwhile. What follows an output's end is dropped.
        """
        for sequence, drawn in zip(drawing(work), tokens, strict=True):
            sequence.num_inflight_tokens = max(0, sequence.num_inflight_tokens - 1)
            sequence.num_cached += len(drawn) - 1
            try:
                for token in drawn:
                    if sequence.finish_reason is None:
                        sequence.append(token)
            except NanoinferError as e:  # the tokenizer has no text for the token
                sequence.abort(str(e))
        return self.remove_finished()

    def remove_finished(self) -> list[Sequence]:
        """Drop the sequences that have ended from the running ones, and return them."""
        ended = [s for s in self._running if s.finish_reason is not None]
        if ended:
            self._running = [s for s in self._running if s.finish_reason is None]
        return ended

    def abort(self, request: Request, error: str | None = None) -> list[Sequence]:
        """End a request wherever it is; return its sequences that were running."""
        for sequence in request.sequences:
            sequence.abort(error)
        if request in self._waiting:
            self._waiting.remove(request)
        return self.remove_finished()

    def abort_running(self, error: str | None = None) -> list[Sequence]:
        """End all admitted requests, whatever state an exception left the lists in; return their sequences."""
        ended = list(self._running)
        for sequence in ended:
            sequence.abort(error)
        self._waiting = deque(r for r in self._waiting if not r.finished)
        self._running = []
        return ended

    def check_integrity(self) -> None:
        """Assert what must hold between steps; used in tests."""
        assert len(self._running) <= self.config.max_num_seqs
        assert sum(self._tokens_needed(r) for r in {s.request for s in self._running}) <= self._capacity
        for s in self._running:
            assert s.finish_reason is None
            assert 0 <= s.num_cached <= min(self.config.block_size, s.num_tokens - s.start)


def drawing(work: list[Work]) -> list[Sequence]:
    """Return the sequences that draw a token, in the order of the logits' rows: each with its forks after it."""
    return [s for w in work if w.draws for s in (w.sequence, *w.forks)]
