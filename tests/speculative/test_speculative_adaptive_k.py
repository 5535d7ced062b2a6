"""How many tokens to propose, in simulated time: what a bad drafter costs, what a good one gains, when it is given up.

`simulate` is the loop of core.py and speculator.py without tensors: choose, draft, verify, learn. AdaptiveK is given
noisy times (10% a step); what is compared is the time without noise. All seeds are fixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from nanoinfer.config import MAX_K, EngineLimits, ModelConfig
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.scheduling.sequence import Sequence as Text
from nanoinfer.scheduling.text import OutputText
from nanoinfer.speculative import step_costs
from nanoinfer.speculative.adaptive_k import AdaptiveK, StepOutcome
from nanoinfer.speculative.base import DraftRequest
from nanoinfer.speculative.prompt_lookup import PromptLookup
from nanoinfer.speculative.step_costs import SIZES, StepCosts, StepTimes, measure_steps

Curve = Callable[[int], float]
STEP = 0.01  # seconds of a step of one token
NOISE = 0.1  # of the times that are measured

CURVES: dict[str, Curve] = {
    "flat": lambda n: STEP,
    "slow rise": lambda n: STEP * (1 + 0.02 * (n - 1)),
    "knee at 6": lambda n: STEP * max(1.0, n / 6),
    "knee at 100": lambda n: STEP * max(1.0, n / 100),
    "proportional": lambda n: STEP * n,
}


@cache
def draws(seed: int) -> list[float]:
    """Uniform numbers of one sequence, one for each position."""
    rng = random.Random(seed)
    return [rng.random() for _ in range(1200)]


@dataclass
class World:
    """What things cost, and how often a proposal is right."""

    curve: Curve
    draft_cost: float
    """Of one proposal for any number of sequences, over the step of one token."""
    acceptance: Callable[[int], float]
    """By position."""
    read_cost: float = 0.0
    """Of a token that the drafter reads, over the step of one token."""
    slower: Callable[[int], float] = lambda step: 1.0
    """How much longer everything takes than was measured at the start, at each step."""
    draft_slower: float = 1.0
    """How much longer the drafter takes than it says."""

    def draft_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        return STEP * (self.draft_cost * num_tokens + self.read_cost * max(0, num_behind - num_seqs)) + 1e-6

    def adaptive(self) -> AdaptiveK:
        rng = random.Random(5)
        sizes = (*SIZES, 512, 1024)
        measured = {n: self.curve(n) * math.exp(rng.gauss(0, NOISE / 3)) for n in sizes}
        return AdaptiveK(StepCosts(StepTimes(measured)), self.draft_sec)


@dataclass
class Life:
    """One sequence of a simulation."""

    seed: int
    length: int
    num_behind: int = 1
    done: int = 0
    num_proposed: int = 0


def simulate(world: World, lives: Sequence[Life], chooser: AdaptiveK | int) -> float:
    """Return the seconds until all sequences are done; an int is a fixed k."""
    total, step, noise = 0.0, 0, random.Random(lives[0].seed)
    while running := [life for life in lives if life.done < life.length]:
        step += 1
        rooms = [life.length - life.done - 1 for life in running]
        if isinstance(chooser, int):
            ks = [min(chooser, room) for room in rooms]
        elif chooser.waits():
            ks = [0] * len(running)
        else:
            ks = chooser.choose(rooms, [life.num_behind for life in running])
        asked = [(life, k) for life, k in zip(running, ks, strict=True) if k]
        drafted = (len(asked), max(ks), sum(life.num_behind for life, _ in asked)) if asked else None
        slower = world.slower(step)
        draft_sec = world.draft_sec(*drafted) * world.draft_slower * slower if drafted else 0.0
        step_sec = world.curve(len(running) + sum(ks)) * slower
        rounds = []
        for life, k, room in zip(running, ks, rooms, strict=True):
            assert 0 <= k <= min(MAX_K, room) or isinstance(chooser, int)
            right = (draws(life.seed)[life.done + i] < world.acceptance(life.done + i) for i in range(k))
            accepted = next((i for i, ok in enumerate(right) if not ok), k)
            life.num_behind = 1 if k or life.num_behind == 1 else life.num_behind + 1
            life.done += 1 + accepted
            life.num_proposed += k
            rounds.append((k, accepted))
        total += step_sec + draft_sec
        if isinstance(chooser, AdaptiveK):
            step_sec, draft_sec = (sec * math.exp(noise.gauss(0, NOISE)) for sec in (step_sec, draft_sec))
            chooser.learn(StepOutcome(rounds, step_sec, draft_sec, drafted))
    return total


def decode(world: World, chooser: AdaptiveK | int | None, batch: int = 1, seeds: int = 1, length: int = 256) -> float:
    """Return the seconds of some batches one after the other, each in a new engine where chooser is None."""
    return sum(
        simulate(
            world,
            [Life(1000 * seed + i, length) for i in range(batch)],
            world.adaptive() if chooser is None else chooser,
        )
        for seed in range(seeds)
    )


# What a bad drafter costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("draft_cost", [0.0, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.slow_if(lambda batch: batch != 8)
def test_a_drafter_that_is_always_wrong_costs_two_percent_at_most(curve: str, draft_cost: float, batch: int) -> None:
    world = World(CURVES[curve], draft_cost, lambda position: 0.0)
    seeds = 3 if batch == 1 else 1
    assert decode(world, None, batch, seeds) <= 1.02 * decode(world, 0, batch, seeds)


def test_many_short_requests_do_not_open_a_new_credit_each() -> None:
    """A batch job: what was learned and lost belongs to the engine."""
    world = World(CURVES["flat"], 0.3, lambda position: 0.0)
    sec = decode(world, world.adaptive(), seeds=40, length=24)
    assert sec <= 1.013 * decode(world, 0, seeds=40, length=24)


def test_prompts_are_soon_not_read_any_more_for_a_drafter_that_is_always_wrong() -> None:
    """Reading the prompt takes as long as four steps: one loan, repaid from the 1%."""
    world = World(CURVES["flat"], 0.05, lambda position: 0.0, read_cost=0.04)
    lives = [Life(seed, 100, num_behind=100) for seed in range(12)]
    adaptive = world.adaptive()
    sec = sum(simulate(world, [life], adaptive) for life in lives)
    assert lives[0].num_proposed > 0
    assert sum(life.num_proposed > 0 for life in lives) <= 3
    assert sec <= 1.022 * 12 * 100 * STEP


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    world = World(CURVES["flat"], 0.05, lambda position: 1.0, read_cost=0.01)
    for num_behind, reads in ((1000, False), (100, True)):
        life = Life(0, 9, num_behind=num_behind)
        simulate(world, [life], world.adaptive())
        assert (life.num_proposed > 0) is reads


def test_prompts_of_a_batch_are_read_when_the_draft_is_good() -> None:
    """Not all in the first step, for a loan is limited; but soon."""
    world = World(CURVES["knee at 100"], 0.05, lambda position: 0.9, read_cost=0.02)
    lives = [Life(seed, 128, num_behind=100) for seed in range(8)]
    assert simulate(world, lives, world.adaptive()) < 0.6 * simulate(world, [Life(i, 128) for i in range(8)], 0)
    assert all(life.num_proposed for life in lives)


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_a_drafter_that_takes_another_time_than_it_says_costs_little(factor: float) -> None:
    """Right half of the time. The estimate is wrong from the beginning."""
    world = World(CURVES["flat"], 0.3, lambda position: 0.5, draft_slower=factor)
    best = min(decode(world, k, seeds=3, length=400) for k in (0, 1, 2, 4))
    assert decode(world, None, seeds=3, length=400) <= 1.06 * best


@pytest.mark.parametrize("then", [0.4, 2.5])
@pytest.mark.parametrize("acceptance, k", [(0.0, 0), (0.8, 4)])
def test_a_machine_that_becomes_faster_or_slower_in_the_middle(then: float, acceptance: float, k: int) -> None:
    """Steps of all kinds change alike, so the best choice stays the same."""
    world = World(CURVES["slow rise"], 0.1, lambda p: acceptance, slower=lambda step: 1.0 if step < 60 else then)
    assert decode(world, None, seeds=4, length=400) <= 1.08 * decode(world, k, seeds=4, length=400)


def test_acceptance_that_drops_in_the_middle_is_given_up_soon() -> None:
    world = World(CURVES["flat"], 0.2, lambda position: 1.0 if position < 200 else 0.0)
    life = Life(0, 600)
    sec = simulate(world, [life], world.adaptive())
    best = simulate(World(world.curve, 0.2, lambda position: 1.0), [Life(0, 200)], 8) + 400 * STEP
    assert sec <= best + 0.05 * 600 * STEP


def test_acceptance_that_rises_in_the_middle_is_found() -> None:
    world = World(CURVES["flat"], 0.1, lambda position: 0.0 if position < 200 else 0.9)
    late = World(CURVES["flat"], 0.1, lambda position: 0.9)
    best = 200 * STEP + decode(late, 8, seeds=4, length=600) / 4
    assert decode(world, None, seeds=4, length=800) / 4 <= best + 0.1 * 800 * STEP


@pytest.mark.parametrize("phase", [5, 40, 150])
@pytest.mark.parametrize("draft_cost", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("curve", ["flat", "slow rise", "knee at 6"])
def test_alternating_good_and_bad_phases_never_cost_two_percent(curve: str, draft_cost: float, phase: int) -> None:
    world = World(CURVES[curve], draft_cost, lambda p: float(p // phase % 2 == 0))
    assert decode(world, None, seeds=2, length=300) <= 1.02 * decode(world, 0, seeds=2, length=300)


# What a good one gains -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft_cost", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.slow_if(lambda batch: batch != 8)
@pytest.mark.nightly_if(lambda batch, acceptance: batch == 1 or (batch == 64 and acceptance == 0.6))
def test_close_to_the_best_fixed_k(curve: str, draft_cost: float, acceptance: float, batch: int) -> None:
    """94% of its speed over 256 tokens after one other request; 93% where the longest k is best."""
    world, seeds = World(CURVES[curve], draft_cost, lambda p: acceptance), 4 if batch == 1 else 1
    best, k = min((decode(world, k, batch, seeds), k) for k in (0, 1, 2, 4, 8, 12))
    adaptive = world.adaptive()
    simulate(world, [Life(77 + i, 64) for i in range(batch)], adaptive)
    assert best / decode(world, adaptive, batch, seeds) >= (0.94 if k < 12 else 0.93)


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
@pytest.mark.parametrize("draft_cost", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("curve", CURVES)
def test_close_to_the_best_fixed_k_from_the_first_token(curve: str, draft_cost: float, acceptance: float) -> None:
    """90%, while costs and acceptance are being learned."""
    world = World(CURVES[curve], draft_cost, lambda p: acceptance)
    best = min(decode(world, k, seeds=4) for k in (0, 1, 2, 4, 8, 12))
    assert best / decode(world, None, seeds=4) >= 0.9


def test_costs_that_were_measured_on_a_busy_machine_do_not_end_speculation() -> None:
    """Two tokens seemed to cost twice as much as one, and cost the same."""
    world = World(CURVES["flat"], 0.1, lambda p: 0.9)
    adaptive = AdaptiveK(StepCosts(StepTimes({n: CURVES["proportional"](n) for n in SIZES})), world.draft_sec)
    assert decode(world, adaptive, seeds=2) < 0.6 * decode(world, 0, seeds=2)


def test_both_kinds_of_steps_stay_known() -> None:
    """A perfect drafter: a plain step comes now and then all the same."""
    world = World(CURVES["flat"], 0.01, lambda p: 1.0)
    adaptive, plain = world.adaptive(), list[int]()
    for step in range(3000):
        (k,) = adaptive.choose([12], [1])
        plain += [step] if k == 0 else []
        drafted = (1, k, 1)
        draft_sec = world.draft_sec(*drafted) if k else 0.0
        adaptive.learn(StepOutcome([(k, k)], STEP, draft_sec, drafted if k else None))
    assert plain[0] == 0
    assert plain[1] <= 10
    assert 3000 / 65 <= len(plain) <= 3000 / 65 + 10


# Times that are corrected --------------------------------------------------------------------------------------


def test_a_slower_machine_moves_all_sizes_and_no_ratio() -> None:
    costs = StepCosts(StepTimes({1: 1.0, 5: 1.5}))
    for step in range(30):
        costs.learn(1, 5 if step % 10 else 1, 3.0 if step % 10 else 2.0)
    before = costs(1, 5) / costs(1, 1)
    for _ in range(40):
        costs.learn(1, 5, 9.0)
    assert costs(1, 5) == pytest.approx(9.0, rel=0.02)
    assert costs(1, 5) / costs(1, 1) == pytest.approx(before)
    assert before == pytest.approx(1.5, rel=0.1)


def test_a_ratio_that_was_measured_wrongly_is_corrected_by_pairs_of_steps() -> None:
    costs = StepCosts(StepTimes({1: 1.0, 5: 3.0}))
    for _ in range(40):
        costs.learn(1, 1, 1.0)
        costs.learn(1, 5, 1.2)
    assert costs(1, 5) / costs(1, 1) == pytest.approx(1.2, rel=0.05)
    assert costs(1, 4) < 1.5  # not timed: corrected like its neighbour
    assert costs(1, 2) >= costs(1, 1)


# What a step costs ---------------------------------------------------------------------------------------------


def test_step_times_between_at_and_past_what_was_measured() -> None:
    times = StepTimes({1: 0.010, 4: 0.013, 8: 0.012, 16: 0.028})
    assert [times(n) for n in (1, 4, 16)] == [0.010, 0.013, 0.028]
    assert times(2) == pytest.approx(0.011)
    assert times(8) == 0.013  # less for more tokens is noise
    assert times(12) == pytest.approx((0.013 + 0.028) / 2)
    assert times(32) == pytest.approx(0.056)  # past the end: the last one's price a token
    assert [StepTimes({1: 2.0})(n) for n in (1, 3)] == [2.0, 6.0]


class Timed:
    """An engine whose steps take what a curve says; the first one takes longer, and every third is disturbed."""

    def __init__(self, clock: list[float], curve: Curve, block_size: int = 1024) -> None:
        self.limits, self.config = EngineLimits(1, block_size, block_size), ModelConfig()
        self._clock, self._curve = clock, curve
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.fail_at = 0

    def open(self, adapter: int = 0) -> Handle:
        self.calls.append("open")
        return Handle(3)

    def extend(self, batch: StepBatch) -> None:
        (n,) = batch.num_new
        assert (batch.handles, batch.num_logits, len(batch.token_ids)) == ([3], [n], n)
        if n == self.fail_at:
            raise KeyboardInterrupt
        self.sizes.append(n)
        self._clock[0] += self._curve(n) * (5.0 if len(self.sizes) == 1 else 1.0 + 0.5 * (len(self.sizes) % 3 == 0))

    def truncate(self, handle: Handle, length: int) -> None:
        assert (handle, length) == (3, 0)

    def close(self, handle: Handle) -> None:
        self.calls.append("close")


def time_steps(engine: Timed, clock: list[float], max_tokens: int, budget_sec: float = 1e9) -> StepTimes:
    return measure_steps(engine, max_tokens, clock=lambda: clock[0], budget_sec=budget_sec)  # type: ignore[arg-type]


def test_steps_are_measured_undisturbed_and_up_to_what_matters() -> None:
    clock = [7.0]
    engine = Timed(clock, CURVES["slow rise"])
    times = time_steps(engine, clock, 20)
    assert sorted(set(engine.sizes)) == [1, 2, 4, 8, 16]
    assert [times(n) for n in (1, 8, 12)] == pytest.approx([CURVES["slow rise"](n) for n in (1, 8, 12)])
    assert engine.calls == ["open", "close"]


@pytest.mark.parametrize(
    "block_size, budget_sec, largest", [(5, 1e9, 4), (1, 1e9, 1), (1024, 0.065, 32), (1024, 0.0, 8)]
)
def test_measuring_ends_with_the_context_and_the_time(block_size: int, budget_sec: float, largest: int) -> None:
    clock = [0.0]
    engine = Timed(clock, CURVES["flat"], block_size)
    time_steps(engine, clock, 256, budget_sec)
    assert max(engine.sizes) == largest


def test_what_a_gpu_needs_to_warm_up_is_neither_measured_nor_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Captures(Timed):
        """Compiles in the first run of each size, captures in the second."""

        def extend(self, batch: StepBatch) -> None:
            super().extend(batch)
            self._clock[0] += {1: 9.0, 2: 0.3}.get(self.sizes.count(batch.num_new[0]), 0.0)

    monkeypatch.setattr(step_costs, "_wait", lambda logits: True)
    clock = [0.0]
    engine = Captures(clock, CURVES["slow rise"])
    times = time_steps(engine, clock, 20, budget_sec=2.0)
    assert max(engine.sizes) == 16
    assert [times(n) for n in (1, 8, 12)] == pytest.approx([CURVES["slow rise"](n) for n in (1, 8, 12)])


def test_measuring_that_is_interrupted_closes_its_sequence() -> None:
    clock = [0.0]
    engine = Timed(clock, CURVES["flat"])
    engine.fail_at = 4
    with pytest.raises(KeyboardInterrupt):
        time_steps(engine, clock, 64)
    assert engine.calls == ["open", "close"]


# Prompt lookup -------------------------------------------------------------------------------------------------


def look_up(text: str, k: int, drafter: PromptLookup | None = None, row: Text | None = None) -> str:
    ids = [ord(c) for c in text]
    row = row or Text(Request(0, None, ids, SamplingParams(), 0), 0, OutputText(None, ()), 64, ids)
    (proposal,) = (drafter or PromptLookup()).propose([DraftRequest(row, ids, 0, k)])  # type: ignore[arg-type]
    assert proposal.weights is None
    return "".join(map(chr, proposal.token_ids))


@pytest.mark.parametrize(
    "text, k, proposal",
    [
        ("the cat sat; the cat", 4, " sat"),
        ("the cat sat; the cat", 12, " sat; the ca"),
        ("ab ab", 7, " ab ab "),  # it runs into its own end, and goes on
        ("xaaaa", 3, "aaa"),
        ("aa", 2, ""),  # nothing follows the only place where "a a" stood
        ("aaa", 5, "aaaaa"),
        ("abc", 4, ""),
        ("a", 4, ""),
        ("", 4, ""),
        ("abab", 1, "a"),
        ("bcX abcY abc", 1, "Y"),  # "abc" says more than "bc"
        ("zabcX bcY zabc", 1, "X"),  # the longest, though another is nearer
        ("abX abY ab", 1, "Y"),  # of equals the last
        ("ab-abcdefab", 2, "cd"),
        ("12345X 2345Y 12345", 1, "X"),
        ("0123456X 3456", 1, "X"),
    ],
)
def test_prompt_lookup_on_texts_by_hand(text: str, k: int, proposal: str) -> None:
    assert look_up(text, k) == proposal


def test_prompt_lookup_grows_with_a_text_as_if_it_had_read_it_at_once() -> None:
    drafter = PromptLookup()
    rng = random.Random(3)
    text = "".join(rng.choice("abc") for _ in range(300))
    ids = [ord(c) for c in text]
    row = Text(Request(0, None, ids, SamplingParams(), 0), 0, OutputText(None, ()), 64, ids)
    end = 0
    while (end := end + rng.randint(1, 7)) < len(text):  # bursts
        assert look_up(text[:end], 6, drafter, row) == look_up(text[:end], 6)
    drafter.forget(row)  # type: ignore[arg-type]
    drafter.forget(row)  # type: ignore[arg-type]
    assert look_up("abc", 6, drafter, row) == ""


def test_a_pool_has_ended_texts_of_the_same_salt_up_to_its_number_of_tokens() -> None:
    drafter = PromptLookup(pool_tokens=20)

    def propose(text: str, salt: str | None, k: int = 5) -> str:
        ids = [ord(c) for c in text]
        row = Text(Request(0, None, ids, SamplingParams(), 0), 0, OutputText(None, ()), 64, ids)
        asked = DraftRequest(row, ids, 0, k, salt)  # type: ignore[arg-type]
        (proposal,) = drafter.propose([asked])
        assert (drafter.num_behind(asked) is None) == (not proposal.token_ids)
        drafter.forget(row)  # type: ignore[arg-type]
        return "".join(map(chr, proposal.token_ids))

    assert propose("abcdefgh", "a") == ""
    assert propose("..bcde", "b") == ""  # of another salt
    assert propose("abcde", "a") == "fgh"  # and adds nothing that the pool has not
    assert propose("abcdXcdefabcd", "a") == "Xcdef"  # the sequence's own text is first
    assert propose("bcdefg", "a") == ""  # the first text was dropped for the last one
    drafter.reset()
    assert propose("abcd", "a") == ""


def test_prompt_lookup_looks_before_the_window_too() -> None:
    """The window that the target sees slides; what stood before it was still said."""
    ids = [ord(c) for c in "hello world. " + "x" * 40 + "hello wor"]
    row = Text(Request(0, None, ids, SamplingParams(), 0), 0, OutputText(None, ()), 64, ids)
    (proposal,) = PromptLookup().propose([DraftRequest(row, ids, 50, 3)])  # type: ignore[arg-type]
    assert "".join(map(chr, proposal.token_ids)) == "ld."
