"""The scheduler: which sequences run in the next step, and how many tokens of each.

    waiting requests --admit--> running sequences --finish--> removed
                                 |  each step: the tokens that are not in the KV cache yet
                                 |  (a prompt, a chunk of one, one token, or a window that slid)

Rules:
- Requests are admitted first come, first served. A request is admitted if there is capacity for its n sequences and for
  the tokens that they may grow to, so that a running request never has to be preempted.
- Every decoding sequence runs in every step. The rest of `max_num_batched_tokens`, but at least a quarter of it, is
  spent on prefills (prompts, windows that slid) in chunks, the sequence whose last token is oldest first. So every
  sequence progresses, and a long prompt does not stall the others.
- A sequence samples a token in the step that processes its last uncached token.

The scheduler uses neither PyTorch nor an engine; tests run it with plain numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.scheduling.kept import KeptSequences
from nanoinfer.scheduling.sequence import Request, Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's part of one step."""

    sequence: Sequence
    token_ids: list[int]
    """Tokens to process."""
    truncate: int | None
    """Length to truncate the sequence to first: 0 if its window has slid; the tokens that it shares with the kept
    sequence that it continues; None: not at all."""
    draws: bool
    """Whether to sample a token: no uncached tokens are left after these."""
    forks: list[Sequence] = field(default_factory=list)
    """Siblings to fork from this sequence, which sample from the same logits."""
    pending: bool = False
    """Whether one more token follows token_ids: the in-flight token that the previous step sampled."""


class Scheduler:
    """Decides the work of each step. Call `add`, then `schedule` and `postprocess` while `unfinished`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._capacity = config.max_num_cached_tokens or config.max_num_seqs * config.block_size
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []
        self._step = 0
        self.kept = KeptSequences()

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> list[Sequence]:
        """The admitted sequences that are not finished."""
        return list(self._running)

    @property
    def handles(self) -> set[int]:
        """Handles of the engine's sequences that running and kept sequences have."""
        return {s.handle for s in self._running if s.handle is not None} | set(self.kept.handles)

    def add(self, request: Request) -> None:
        """Queue a request that passed `check`."""
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise NanoinferError if a request can never be admitted, or if its prompt exceeds the context length."""
        params, config, (name, width) = request.params, self.config, request.width
        if width > config.max_num_seqs:
            raise NanoinferError(
                f"{name}={width} is more than max_num_seqs={config.max_num_seqs}: raise it, or lower {name}"
            )
        if params.slide_stride is not None and params.slide_stride > config.block_size:
            raise NanoinferError(
                f"slide_stride={params.slide_stride} is more than the context length {config.block_size}: lower it"
            )
        num_prompt = len(request.prompt_token_ids)
        if num_prompt < 1:
            raise NanoinferError("the prompt has no tokens: pass at least one")
        if num_prompt > config.block_size and params.overflow != "slide":
            raise NanoinferError(
                f"the prompt has {num_prompt} tokens, the context length is {config.block_size}: shorten it, or"
                " use overflow='slide' (--overflow slide), which keeps the last tokens"
            )
        if (need := self._tokens_needed(request)) > self._capacity:
            raise NanoinferError(
                f"the request may grow to {need} cached tokens ({name}={width}), the KV cache holds {self._capacity}:"
                f" raise kv_cache_memory, or lower {name} or max_tokens"
            )

    def _tokens_needed(self, request: Request) -> int:
        """Return the number of cached tokens that a request's sequences may grow to."""
        longest = len(request.prompt_token_ids) + request.sequences[0].max_tokens
        return request.params.num_sequences * min(longest, self.config.block_size)

    def schedule(self) -> list[ScheduledSequence]:
        """Admit waiting requests and return the work of the next step.

        It is empty only if no request is unfinished, or if all running sequences end with their in-flight tokens.
        """
        self._admit()
        self._step += 1
        ready = (s for s in self._running if not self._awaits_fork(s) and not s.ends_when_read)
        todo = [(s, self._num_uncached(s)) for s in ready]
        work = [self._work(s, 1, draws=True) for s, uncached in todo if uncached == 1]
        budget = max(self.config.max_num_batched_tokens - len(work), self.config.max_num_batched_tokens // 4, 1)
        longer = [item for item in todo if item[1] > 1]
        for sequence, uncached in sorted(
            longer, key=lambda item: item[0].last_draw_step
        ):  # stable: ties keep order of arrival
            if (count := min(uncached, budget)) < 1:
                break
            budget -= count
            work.append(self._work(sequence, count, draws=count == uncached))
        return work

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if not self.has_room(self._tokens_needed(request), len(request.sequences)):
                return
            self._running += request.sequences  # before the pop: an interrupt must not lose the request
            self._waiting.popleft()
            for sequence in request.sequences:
                sequence.last_draw_step = self._step
            self.kept.resume(request.sequences[0])

    def has_room(self, num_tokens: int, num_seqs: int = 1) -> bool:
        """Return whether there is capacity for `num_seqs` more sequences that may grow to `num_tokens` tokens.

        Kept sequences do not count: `evict` removes them.
        """
        if len(self._running) + num_seqs > self.config.max_num_seqs:
            return False
        return self._num_reserved() + num_tokens <= self._capacity

    def _num_reserved(self) -> int:
        """Return the number of cached tokens that the running sequences may grow to."""
        return sum(self._tokens_needed(r) for r in {s.request for s in self._running})

    def evict(self, num_tokens: int = 0, num_seqs: int = 0) -> list[int]:
        """Remove kept sequences until there is room for the running ones and for `num_seqs` more; return the handles.

        Args:
            num_tokens: tokens that the further sequences may grow to.
            num_seqs: number of further sequences.
        """
        handles = []
        while self.kept and (
            len(self._running) + num_seqs + len(self.kept) > self.config.max_num_seqs
            or self._num_reserved() + num_tokens + self.kept.num_tokens > self._capacity
        ):
            handles.append(self.kept.pop())
        return handles

    @staticmethod
    def _awaits_fork(sequence: Sequence) -> bool:
        """Return whether a sequence waits for its first sibling to process the prompt."""
        return sequence.sample_index > 0 and sequence.handle is None

    @staticmethod
    def _num_uncached(sequence: Sequence) -> int:
        """Return the number of tokens in a sequence's window that are not in the KV cache."""
        start = sequence.wanted_start
        cached = sequence.num_cached if start == sequence.start else 0
        return sequence.num_tokens - start - cached

    def _work(self, sequence: Sequence, count: int, *, draws: bool) -> ScheduledSequence:
        """Return the work that processes `count` tokens of a sequence, and count them as cached."""
        start = sequence.wanted_start
        truncate, sequence.num_shared = sequence.num_shared, None
        if start != sequence.start:
            sequence.start, sequence.num_cached, truncate = start, 0, 0
        first = start + sequence.num_cached
        sequence.num_cached += count
        forks = []
        if draws:
            sequence.last_draw_step = self._step
            forks = [s for s in sequence.request.sequences if self._awaits_fork(s) and s.finish_reason is None]
            for fork in forks:
                fork.start, fork.num_cached, fork.last_draw_step = start, sequence.num_cached, self._step
        token_ids = sequence.token_ids[first : first + count]
        return ScheduledSequence(sequence, token_ids, truncate, draws, forks, pending=len(token_ids) < count)

    @staticmethod
    def mark_in_flight(work: list[ScheduledSequence]) -> None:
        """Count the sampled tokens of this work as in flight, until they are read and passed to `postprocess`."""
        for sequence in drawing(work):
            sequence.num_inflight_tokens += 1

    def postprocess(self, work: list[ScheduledSequence], tokens: list[list[int]]) -> list[Sequence]:
        """Append the sampled tokens to their sequences and return the sequences that have finished.

        Args:
            work: from `schedule`.
            tokens: sampled tokens of each sequence in `drawing(work)`: one in plain decoding; several after
                speculation, of which all but the last are cached; none for a sequence that failed or finished.
                Tokens after the end of an output are discarded.
        """
        for sequence, drawn in zip(drawing(work), tokens, strict=True):
            if sequence.request.beams is not None:
                continue  # beams.py has appended its token
            sequence.num_inflight_tokens = max(0, sequence.num_inflight_tokens - 1)
            sequence.num_cached += len(drawn) - 1
            try:
                for token in drawn:
                    if sequence.finish_reason is None:
                        sequence.append(token)
            except NanoinferError as e:  # the tokenizer cannot decode the token
                sequence.abort(str(e))
        return self.remove_finished()

    def remove_finished(self) -> list[Sequence]:
        """Remove finished sequences from the running ones and return them."""
        ended = [s for s in self._running if s.finish_reason is not None]
        if ended:
            self._running = [s for s in self._running if s.finish_reason is None]
        return ended

    def abort(self, request: Request, error: str | None = None) -> list[Sequence]:
        """End a request, waiting or running; return the sequences that are no longer running."""
        for sequence in request.sequences:
            sequence.abort(error)
        if request in self._waiting:
            self._waiting.remove(request)
        return self.remove_finished()

    def abort_running(self, error: str | None = None) -> list[Sequence]:
        """End all admitted requests, also after an exception in the middle of a call; return their sequences.

        No sequence is kept.
        """
        self.kept.clear()
        ended = list(self._running)
        for sequence in ended:
            sequence.abort(error)
        self._waiting = deque(r for r in self._waiting if not r.finished)
        self._running = []
        return ended

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps. Used in tests."""
        assert len(self._running) + len(self.kept) <= self.config.max_num_seqs
        assert self._num_reserved() + self.kept.num_tokens <= self._capacity
        for s in self._running:
            assert s.finish_reason is None
            assert 0 <= s.num_cached <= min(self.config.block_size, s.num_tokens - s.start)


def drawing(work: list[ScheduledSequence]) -> list[Sequence]:
    """Return the sequences that sample a token, in the order of the logits' rows: each followed by its forks."""
    return [s for w in work if w.draws for s in (w.sequence, *w.forks)]
