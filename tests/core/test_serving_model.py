"""Scheduler, prefix cache, block pool, beams, speculation and scores together, in random order, against a naive model.

A pretended engine has the real pool of blocks, and its logits are a function of all tokens that a sequence finds in
its blocks: a wrong share, a wrong truncation or a lost copy changes them. Every request must get what it gets alone.
NANOINFER_TEST_STEPS is the number of calls (default: 2,000); `make test-long` makes 100,000.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.scheduling import check_integrity
from nanoinfer.config import EngineLimits, ModelConfig, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.pool import BlockPool
from nanoinfer.sampling.sampler import sample
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import PromptReads, Request, window_start
from nanoinfer.scheduling.work import ScheduledSequence
from nanoinfer.speculative.base import Proposal
from nanoinfer.speculative.prompt_lookup import PromptLookup
from nanoinfer.speculative.speculator import Speculator, StepProposals, drop_without_blocks
from nanoinfer.utils.arrays import Array, to_numpy

STEPS = int(os.environ.get("NANOINFER_TEST_STEPS", "2000"))
STEPS_OF_EXAMPLE = 100
V, BLOCK_SIZE = 5, 40
MODEL = ModelConfig(vocab_size=V, block_size=BLOCK_SIZE, n_layer=1, n_head=1, n_embd=8)
ROWS = np.random.default_rng(0).normal(0, 2, (64, V)).astype(np.float32)
SMALL = EngineLimits(5, BLOCK_SIZE, 7 * KV_BLOCK, 6)
LARGE = EngineLimits(5, BLOCK_SIZE, 100 * KV_BLOCK)


def logits_after(tokens: list[int]) -> np.ndarray:
    """The pretended model: a function of all tokens, (V,)."""
    state = 1
    for token in tokens:
        state = (state * 31 + token * 17 + 7) % 100_003
    return ROWS[state % len(ROWS)]


class Broken(Exception):
    """The engine's fault."""


class Paged(Engine):
    """An engine whose KV cache holds token ids, in blocks of a BlockPool."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(MODEL, limits)
        self.pool = BlockPool(limits.max_num_cached_tokens // KV_BLOCK)
        self.memory: dict[int, list[int]] = {}
        self.breaks_after: int | None = None
        self.max_num_logits = 0

    def extend(self, batch: StepBatch) -> np.ndarray:
        self._check(batch)
        self.pool.check(sum(map(self.blocks_needed, batch.handles, batch.num_new)))
        self.max_num_logits = max(self.max_num_logits, sum(batch.num_logits))
        rows, at = [], 0
        for i, (handle, count, wanted) in enumerate(zip(batch.handles, batch.num_new, batch.num_logits, strict=True)):
            if i == self.breaks_after:
                self.breaks_after = None
                raise Broken("the engine broke")
            if (copy := self.pool.append(handle, count)) is not None:
                self.memory[copy[1]] = self.memory[copy[0]].copy()
            start = self._lengths[handle]
            for j in range(count):
                block = self.memory.setdefault(self.pool.table(handle)[(start + j) // KV_BLOCK], [-1] * KV_BLOCK)
                block[(start + j) % KV_BLOCK] = batch.token_ids[at + j]
            found = self.tokens(handle)
            rows += [logits_after(found[: start + count - wanted + j + 1]) for j in range(wanted)]
            at += count
        self._advance(batch)
        return np.stack(rows) if rows else np.empty((0, V), np.float32)

    def tokens(self, handle: Handle) -> list[int]:
        return [t for b in self.pool.table(handle) for t in self.memory[b]][: self.pool.length(handle)]

    @property
    def hidden(self) -> None:
        return None

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        return self.pool.blocks_needed(handle, num_new)

    def _open(self, handle: Handle) -> None:
        self.pool.open(handle)

    def _truncate(self, handle: Handle, length: int) -> None:
        self.pool.truncate(handle, length)

    def _fork(self, parent: Handle, child: Handle) -> None:
        self.pool.fork(parent, child)

    def _close(self, handle: Handle) -> None:
        self.pool.close(handle)

    def _reset(self) -> None:
        self.pool.clear()


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams | None
    """None: scores."""
    first: int = 0
    """The first token that is scored."""


def make(core: Core, asked: Asked, priority: int = 0, salt: str | None = None) -> tuple[Request, list[float]]:
    """Return a request, and the list that its scores are appended to."""
    found: list[float] = []
    ids, params = list(asked.prompt), asked.params
    if isinstance(params, BeamSearchParams):
        return core.make(None, ids, params.sampling_params, 0, (4,), salt, priority, params), found
    if params is not None:
        return core.make(None, ids, params, 5, (4,), salt, priority), found
    request = core.make(None, ids[:-1], SamplingParams(max_tokens=1), 0, (), salt, priority)

    def read(logits: Array, target_ids: list[int]) -> None:
        found.extend(float(row[t]) for row, t in zip(to_numpy(logits), target_ids, strict=True))

    request.prompt_reads = PromptReads(ids[1:], asked.first - 1, read)
    return request, found


Result = tuple[list[tuple[list[int], str | None]], list[float]]


def result(request: Request, found: list[float]) -> Result:
    return [(list(s.output_token_ids), s.finish_reason) for s in request.sequences], found


@functools.lru_cache(maxsize=4096)
def alone(asked: Asked) -> Result:
    """What a request gives: greedy tokens and scores by definition, the others alone on a roomy engine."""
    ids, params = list(asked.prompt), asked.params
    if params is None:
        scores = [float(logits_after(ids[:i])[ids[i]]) for i in range(asked.first, len(ids))]
        return [([], "stop")], scores
    if isinstance(params, SamplingParams) and params.temperature == 0 and params.n == 1:
        return [naive_greedy(ids, params)], []
    engine = Paged(LARGE)
    core = Core(engine, Scheduler(engine, SchedulerConfig(enable_prefix_caching=False)), sample, None, V)
    request, found = make(core, asked)
    core.submit([request])
    while core.unfinished:
        core.step()
    assert core.scheduler.stats.num_preempted == 0
    return result(request, found)


def naive_greedy(ids: list[int], params: SamplingParams) -> tuple[list[int], str]:
    tokens, made = list(ids), 0
    while True:
        slides = params.overflow == "slide"
        start = window_start(len(tokens), BLOCK_SIZE, BLOCK_SIZE // 2) if slides else 0
        token = int(logits_after(tokens[start:]).argmax())
        tokens.append(token)
        made += 1
        if token == 4 and not params.ignore_eos:
            return tokens[len(ids) :], "stop"
        if made == params.max_tokens or (not slides and len(tokens) > BLOCK_SIZE):
            return tokens[len(ids) :], "length"


COMMON = [int(t) for t in np.random.default_rng(1).integers(0, V, BLOCK_SIZE)]
PROMPTS = st.builds(
    lambda n, rest: (*COMMON[:n], *rest)[:36],
    st.sampled_from([0, 3, 16, 20, 33]),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
)
PARAMS = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 3]),
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    ignore_eos=st.booleans(),
    overflow=st.sampled_from(["stop", "stop", "slide"]),
)
BEAMS = st.builds(
    BeamSearchParams, beam_width=st.integers(1, 4), max_tokens=st.integers(1, 8), ignore_eos=st.booleans()
)
SEARCHED = st.builds(Asked, PROMPTS, BEAMS)
SCORED = st.builds(
    lambda prompt, last, first: Asked((*prompt, last), None, max(1, len(prompt) + 1 - first)),
    PROMPTS, st.integers(0, V - 1), st.sampled_from([1, 2, 5, 40]),
)  # fmt: skip
ASKED = st.one_of(st.builds(Asked, PROMPTS, PARAMS), st.builds(Asked, PROMPTS, PARAMS), SEARCHED, SCORED)


class Serving(RuleBasedStateMachine):
    """One core with a pool that is too small for what is asked of it."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.engine = Paged(SMALL)
        self.scheduler = Scheduler(self.engine, SchedulerConfig(24))
        self.core = Core(self.engine, self.scheduler, sample, None, V)
        self.open: dict[Request, tuple[Asked, list[float]]] = {}

    @rule(
        many=st.lists(ASKED, min_size=1, max_size=5),
        priority=st.sampled_from([0, 0, 1]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(self, many: list[Asked], priority: int, salt: str | None) -> None:
        for asked in many[: 12 - len(self.open)]:
            request, found = make(self.core, asked, priority, salt)
            self.core.submit([request])
            self.open[request] = asked, found

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.core.step()
            self.check_ended()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.open)))
        self.core.abort(request)
        assert request.finished
        self.check_ended()

    @rule(k=st.sampled_from([None, 1, 4]))
    def set_draft(self, k: int | None) -> None:
        self.core.speculator = None if k is None else Speculator(PromptLookup(), speculate_k=k)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()
        assert set(self.engine.handles) == {s.handle for s in self.scheduler.running if s.handle is not None}

    @precondition(lambda self: self.scheduler.running)
    @rule(after=st.integers(0, 2))
    def break_engine(self, after: int) -> None:
        self.engine.breaks_after = after
        try:
            self.core.step()
        except Broken:
            assert len(self.engine.handles) == 0
            assert self.engine.num_free_blocks == self.engine.pool.num_blocks
        self.engine.breaks_after = None
        self.check_ended()

    def check_ended(self) -> None:
        for request in [r for r in self.open if r.finished]:
            asked, found = self.open.pop(request)
            outputs, scores = result(request, found)
            expected, expected_scores = alone(asked)
            whole = [reason in ("stop", "length") for _, reason in outputs]
            if all(whole):
                assert outputs == expected
                assert scores == expected_scores
                kind = type(asked.params).__name__
                self.seen[f"{kind} after a preemption" if self.scheduler.stats.num_preempted else kind] += 1
            elif not isinstance(asked.params, BeamSearchParams):  # beams that end early are not those of the result
                assert scores == expected_scores[: len(scores)]
                for (tokens, _), (all_tokens, _), is_whole in zip(outputs, expected, whole, strict=True):
                    assert tokens == (all_tokens if is_whole else all_tokens[: len(tokens)])

    @invariant()
    def everything_that_is_open_is_owned(self) -> None:
        check_integrity(self.scheduler)
        assert set(self.engine.handles) == self.scheduler.handles
        assert len(self.engine.handles) <= SMALL.max_num_seqs + SMALL.max_idle_seqs

    @invariant()
    def what_is_published_is_true(self) -> None:
        """Metrics read it without waiting for a step."""
        num_running, found = len({s.request for s in self.scheduler.running}), self.core.published
        assert (found.num_running, found.num_free_blocks) == (num_running, self.engine.pool.num_free_blocks)
        assert replace(found, num_running=0) == self.scheduler.stats
        assert self.core.num_blocks == self.engine.pool.num_blocks

    @invariant()
    def every_sequence_finds_its_tokens(self) -> None:
        for s in self.scheduler.running:
            if s.handle is not None:
                expected = s.token_ids[s.start : s.start + s.num_cached]
                assert self.engine.tokens(Handle(s.handle)) == expected
        for entry in self.scheduler.cache._idle:
            assert self.engine.tokens(entry.handle) == entry.token_ids

    @invariant()
    def every_block_is_free_or_used(self) -> None:
        pool = self.engine.pool
        used = Counter(b for h in self.engine.handles for b in pool.table(h))
        assert [used[b] for b in range(pool.num_blocks)] == pool._references
        assert sorted([*used, *pool._free]) == list(range(pool.num_blocks))

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.core.unfinished:
                break
            self.core.step()
        assert not self.core.unfinished
        self.check_ended()
        assert not self.open
        self.core.reset_prefix_cache()
        assert self.engine.num_free_blocks == self.engine.pool.num_blocks
        self.seen["preemptions"] += self.scheduler.stats.num_preempted
        self.seen["shared tokens"] += self.scheduler.stats.num_shared_tokens


Serving.TestCase.settings = settings(
    max_examples=max(1, STEPS // STEPS_OF_EXAMPLE), stateful_step_count=STEPS_OF_EXAMPLE, deadline=None
)


class TestServing(Serving.TestCase):  # type: ignore[name-defined,misc]
    """Also that the run has reached what it is for."""

    def runTest(self) -> None:  # the name that unittest calls
        super().runTest()
        for kind in ("SamplingParams", "BeamSearchParams", "NoneType"):
            assert Serving.seen[f"{kind} after a preemption"] > 0
        assert Serving.seen["shared tokens"] > STEPS // 10


# What the machine found --------------------------------------------------------------------------------------


def run_all(core: Core, requests: list[Request]) -> None:
    core.submit(requests)
    for _ in range(600):
        core.step()
    assert not core.unfinished


def test_beams_that_do_not_fit_at_once_take_turns() -> None:
    """33 tokens each: 3 blocks, of which one is shared. 4 beams need 9, the pool has 4."""
    asked = Asked(tuple(COMMON[:25]), BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    engine = Paged(EngineLimits(5, BLOCK_SIZE, 4 * KV_BLOCK, 6))
    core = Core(engine, Scheduler(engine), sample, None, V)
    request, found = make(core, asked)
    run_all(core, [request])
    assert result(request, found) == alone(asked)
    assert core.scheduler.stats.num_preempted > 0


def test_a_preempted_beam_goes_on_before_new_requests() -> None:
    """The others of its search wait for it, and hold the places that a request with a smaller number waits for."""
    asked = [
        Asked((1, 2), SamplingParams(n=4, max_tokens=3, temperature=0)),
        Asked((3,), BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)),
    ]
    engine = Paged(SMALL)
    core = Core(engine, Scheduler(engine), sample, None, V)
    made = [make(core, a) for a in asked]
    core.submit([made[1][0]])
    core.step()
    core.step()
    core.scheduler._preempt(core.scheduler.running[-1])
    run_all(core, [made[0][0]])
    assert [result(*one) for one in made] == [alone(a) for a in asked]


@pytest.mark.parametrize("seed", [1, 23, 35, 42, 110])
def test_searches_that_wait_for_each_others_places_end(seed: int) -> None:
    """Searches of 2 to 4 beams over 5 places: beams that hold places and blocks wait for beams that have none."""
    rng = np.random.default_rng(seed)
    engine = Paged(EngineLimits(5, BLOCK_SIZE, int(rng.integers(5, 8)) * KV_BLOCK, 6))
    core = Core(engine, Scheduler(engine, SchedulerConfig(24)), sample, None, V)
    asked, made = [], []
    for _ in range(14):
        width, priority, shared = int(rng.integers(2, 5)), int(rng.integers(0, 2)), int(rng.integers(0, 33))
        prompt = (*COMMON[:shared], *rng.integers(0, 4, 3).tolist())
        asked.append(Asked(prompt, BeamSearchParams(width, max_tokens=8, ignore_eos=True)))
        made.append(make(core, asked[-1], priority))
        core.submit([made[-1][0]])
        for _ in range(int(rng.integers(0, 4))):
            core.step()
    run_all(core, [])
    assert [result(*one) for one in made] == [alone(a) for a in asked]


def test_a_proposal_takes_no_block_from_the_rest_of_the_step() -> None:
    """One free block: a proposal would take it, and so does a request without a draft in the same step."""
    engine = Paged(EngineLimits(2, BLOCK_SIZE, 3 * KV_BLOCK))
    core = Core(engine, Scheduler(engine), sample, None, V)
    work = []
    for length in (15, 16):
        request, _ = make(core, Asked(tuple(COMMON[:length]), SamplingParams()))
        (sequence,) = request.sequences
        handle = engine.open()
        engine.extend(StepBatch([handle], COMMON[:length], [length], [0]))
        sequence.handle = int(handle)
        work.append(ScheduledSequence(sequence, [1], True))
    proposals = StepProposals({work[0].sequence: Proposal([1, 2])})
    drop_without_blocks(engine, work[:1], proposals)
    assert list(proposals.proposals) == [work[0].sequence]
    drop_without_blocks(engine, work, proposals)
    assert proposals.proposals == {}
