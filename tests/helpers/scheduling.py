"""The scheduler with a pretended engine: every rule is checked in every step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from nanoinfer.config import EngineLimits, ModelConfig, SchedulerConfig
from nanoinfer.engines.base import Engine, Handle
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText
from nanoinfer.scheduling.work import ScheduledSequence, sampling_sequences
from nanoinfer.tokenizers.tokenizer import CharTokenizer

IDS = itertools.count()


def make_request(
    num_prompt: int, params: SamplingParams, block_size: int, end: tuple[int, ...] = (), chars: str = ""
) -> Request:
    """A request of `num_prompt` distinct tokens, with its n sequences; with `chars`, token i is the i-th of them."""
    request = Request(next(IDS), None, list(range(100, 100 + num_prompt)), params, seed=0, end_token_ids=end)
    for i in range(params.n):
        text = OutputText(CharTokenizer(chars).stream() if chars else None, params.stop)
        request.sequences.append(Sequence(request, i, text, block_size, list(request.prompt_token_ids)))
    return request


def token_of(sequence: Sequence) -> int:
    """What the pretended model says next: a function of sample and position."""
    return (sequence.sample_index * 5 + sequence.num_output_tokens * 7) % 11


def wanted(sequence: Sequence, block_size: int) -> int:
    """The first token of the window, from the definition: forget `stride` tokens at a time until the rest fits."""
    p = sequence.params
    if p.overflow == "stop":
        return 0
    stride = p.slide_stride or max(1, block_size // 2)
    return next(m for m in itertools.count(0, stride) if len(sequence.token_ids) - m <= block_size)


class Pretended(Engine):
    """An engine that holds tokens and computes nothing. A block is one token, and forks share none."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(ModelConfig(), limits)
        self.held: dict[Handle, list[int]] = {}

    def append(self, handle: Handle, token_ids: list[int]) -> None:
        assert self.blocks_needed(handle, len(token_ids)) <= self.num_free_blocks
        self.held[handle] += token_ids
        self._lengths[handle] += len(token_ids)

    def _open(self, handle: Handle) -> None:
        self.held[handle] = []

    def _truncate(self, handle: Handle, length: int) -> None:
        del self.held[handle][length:]

    def _fork(self, parent: Handle, child: Handle) -> None:
        self.held[child] = list(self.held[parent])

    def _close(self, handle: Handle) -> None:
        del self.held[handle]


@dataclass
class World:
    """A scheduler with a pretended engine: what each sequence holds, checked against what it must hold."""

    limits: EngineLimits
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    admitted: list[Request] = field(default_factory=list)
    steps: int = 0
    num_processed: int = 0
    decode_sec: float = 0.0
    token_sec: float = 0.0
    """Times that the scheduler is told: of a step without prompts, and of a token of a prompt in a step."""

    def __post_init__(self) -> None:
        self.limit_before = 0
        self.engine = Pretended(self.limits)
        self.scheduler = Scheduler(self.engine, self.config)

    @property
    def plain(self) -> bool:
        """Whether nothing is shared and nothing is preempted, so that the simple rules hold."""
        limits = self.limits
        roomy = limits.max_num_cached_tokens >= limits.max_num_seqs * limits.block_size
        return roomy and not self.config.enable_prefix_caching and not self.scheduler.stats.num_preempted

    def step(self) -> list[ScheduledSequence]:
        """Schedule, run, postprocess, checking every rule on the way."""
        before = {s: self.unseen(s) for s in self.scheduler.running}
        self.limit_before = self.scheduler.prefill_limit.apply(1 << 30)
        work = self.scheduler.schedule()
        self.steps += 1
        assert self.scheduler.take_preempted() is not None
        for s in self.scheduler.running:
            if s.request not in self.admitted:
                self.admitted.append(s.request)
        self.check_work(work, before)
        for w in work:
            self.run(w)
        forks = [(w.sequence.handle, fork) for w in work for fork in w.forks]
        for handle, fork in forks:
            assert fork.handle is None
            fork.handle = self.engine.fork(Handle(handle))
        draws = sampling_sequences(work)
        self.scheduler.postprocess(work, [[token_of(s)] for s in draws])
        if any(len(w.token_ids) > 1 for w in work):
            num_prefill = sum(len(w.token_ids) for w in work if len(w.token_ids) > 1)
            self.scheduler.prefill_limit.note(num_prefill, self.decode_sec + num_prefill * self.token_sec)
        check_integrity(self.scheduler)
        assert forks or self.engine.num_free_blocks >= 0  # forks take room when they are extended
        return work

    def unseen(self, s: Sequence) -> int:
        """The tokens of a sequence's window that the engine does not have."""
        start = wanted(s, self.limits.block_size)
        held = 0 if s.handle is None or s.start != start else self.engine.length(Handle(s.handle))
        return len(s.token_ids) - start - held

    def check_work(self, work: list[ScheduledSequence], before: dict[Sequence, int]) -> None:
        assert len({w.sequence for w in work}) == len(work) >= 1  # each at most once, and there is always something
        assert all(w.token_ids for w in work)
        if not self.plain:
            return
        M = self.config.max_num_batched_tokens
        pending = {
            s: before.get(s, self.unseen(s))
            for s in self.scheduler.running
            if s.handle is not None or s.sample_index == 0
        }
        fed = {w.sequence: len(w.token_ids) for w in work}
        singles = [s for s, count in pending.items() if count == 1]
        assert all(fed.get(s) == 1 for s in singles)  # every one that needs one token, in every step
        budget = max(M - len(singles), M // 4, 1)
        if any(s.request.queue is not None for s in singles):
            budget = min(budget, self.limit_before)
        assert sum(fed.values()) - len(singles) == min(budget, sum(pending.values()) - len(singles))
        assert all(w.samples == (fed[w.sequence] == pending[w.sequence]) for w in work)

    def run(self, w: ScheduledSequence) -> None:
        s = w.sequence
        assert s.handle is not None
        start = wanted(s, self.limits.block_size)
        self.engine.append(Handle(s.handle), w.token_ids)
        self.num_processed += len(w.token_ids)
        held, window = self.engine.held[Handle(s.handle)], s.token_ids[start:]
        assert len(held) <= self.limits.block_size
        assert held == (window if w.samples else window[: len(held)])

    def run_all(self) -> None:
        while self.scheduler.unfinished:
            self.step()


def summary(work: list[ScheduledSequence]) -> list[tuple[int, int, bool]]:
    """(prompt length, tokens fed, draws) in order."""
    return [(len(w.sequence.prompt_token_ids), len(w.token_ids), w.samples) for w in work]


def check_integrity(scheduler: Scheduler) -> None:
    """Assert the invariants that hold between steps."""
    running = scheduler.running
    assert len(running) <= scheduler.limits.max_num_seqs
    assert scheduler.handles <= set(scheduler._engine.handles)
    for s in running:
        assert s.finish_reason is None
        assert s.admitted
        assert 0 <= s.num_cached <= min(scheduler.limits.block_size, s.num_tokens - s.start)
    assert all(s.handle is None for s in scheduler._waiting)
