"""How many tokens to propose, in simulated time: what a bad drafter costs, what a good one gains, when it is given up.

`simulate` is the loop of core.py and speculator.py without tensors: choose, draft, verify, learn. Time is what the
curves say. All seeds are fixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from nanoinfer.speculative.pace import MAX_K, Outcome, Pace, Trust, Wish

from nanoinfer.engines.base import EngineLimits, Handle, StepBatch
from nanoinfer.roofline.speculation import best_speculation
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.scheduling.sequence import Sequence as Text
from nanoinfer.scheduling.text import OutputText
from nanoinfer.speculative import costs
from nanoinfer.speculative.base import DraftRequest
from nanoinfer.speculative.prompt_lookup import PromptLookup
from nanoinfer.speculative.step_costs import SIZES, StepTimes, measure_steps

Curve = Callable[[int], float]
STEP = 0.01  # seconds of a step of one token

CURVES: dict[str, Curve] = {
    "flat": lambda n: STEP,
    "slow rise": lambda n: STEP * (1 + 0.02 * (n - 1)),
    "rise": lambda n: STEP * (1 + 0.15 * (n - 1)),
    "knee at 6": lambda n: STEP * max(1.0, n / 6),
    "knee at 100": lambda n: STEP * max(1.0, n / 100),
    "proportional": lambda n: STEP * n,
}


def measured(curve: Curve) -> StepTimes:
    return StepTimes({n: curve(n) for n in (*SIZES, 512, 1024)})


@dataclass
class Life:
    """One text: when it begins, how long it gets, and what its drafter knows."""

    length: int
    """Tokens after the prompt's own."""
    is_right: Callable[[int], bool]
    """Whether the proposal for a position is right."""
    start_step: int = 0
    num_behind: int = 0
    """Tokens that the drafter has to read when it is asked for the first time."""
    trust: Trust = field(default_factory=Trust)
    done: int = 0
    num_proposed: int = 0


@dataclass
class World:
    """What things cost, in truth. The pace is told `curve` and `draft_cost`; the truth may be another."""

    curve: Curve
    draft_cost: float
    """Of one proposal for any number of texts, over the step of one token."""
    read_cost: float = 0.0
    """Of a token that is read, over the step of one token."""
    slower: Callable[[int], tuple[float, float]] = lambda step: (1.0, 1.0)
    """(the target's, the draft's) true costs over those told, at each step."""

    def draft_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        return STEP * (self.draft_cost * num_tokens + self.read_cost * max(0, num_behind - num_seqs))


def simulate(world: World, lives: Sequence[Life], pace: Pace | None, max_num_seqs: int = 64) -> float:
    """Return the seconds that a text takes on average, while it runs; pace None decodes plainly."""
    total, step = 0.0, 0
    waiting, running = list(lives), list[Life]()
    while waiting or running:
        while waiting and len(running) < max_num_seqs and waiting[0].start_step <= step:
            running.append(waiting.pop(0))
        step += 1
        if not running:
            continue
        target, draft = world.slower(step)
        ks = [0] * len(running)
        if pace is not None:
            wishes = []
            for life in running:
                to_come = life.length - life.done
                wishes.append(Wish(life.trust, to_come - 1, to_come, life.num_behind or 1))
            ks = pace.choose(wishes)
        asked = [(life, k) for life, k in zip(running, ks, strict=True) if k > 0]
        expected = 0.0
        if asked:
            behind = sum(life.num_behind or 1 for life, _ in asked)
            expected = world.draft_sec(len(asked), max(k for _, k in asked), behind)
        step_sec = world.curve(len(running) + sum(ks)) * target
        texts = []
        for life, k in zip(running, ks, strict=True):
            assert 0 <= k <= min(MAX_K, life.length - life.done - 1) or k == 0
            accepted = next((i for i in range(k) if not life.is_right(life.done + i)), k)
            life.num_behind = 0 if k else life.num_behind
            life.done += 1 + accepted
            life.num_proposed += k
            texts.append((life.trust, k, accepted))
        total += (step_sec + expected * draft) * len(running)
        if pace is not None:
            pace.learn(Outcome(texts, step_sec, expected * draft, expected))
        running = [life for life in running if life.done < life.length]
    return total / len(lives)


def never(position: int) -> bool:
    return False


def make_pace(world: World) -> Pace:
    return Pace(measured(world.curve), world.draft_sec)


# What a bad drafter costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, apart", [(1, 0), (8, 1), (64, 0), (64, 1)])
@pytest.mark.parametrize("draft_cost", [0.01, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("curve", CURVES)
def test_a_drafter_that_is_always_wrong_costs_two_percent_at_most(
    curve: str, draft_cost: float, batch: int, apart: int
) -> None:
    """Texts of 100 tokens that begin together, or one after the other: then each proposes at another time."""
    world = World(CURVES[curve], draft_cost)

    def texts() -> list[Life]:
        return [Life(100, never, start_step=i * apart) for i in range(batch)]

    assert simulate(world, texts(), make_pace(world)) <= 1.02 * simulate(world, texts(), None)


@pytest.mark.parametrize("draft_cost", [0.05, 0.5])
def test_prompts_are_soon_not_read_any_more_for_a_drafter_that_is_always_wrong(draft_cost: float) -> None:
    """Beside the two percent, the first few requests cost the reading of their prompts; later ones do not."""
    world = World(CURVES["flat"], draft_cost, read_cost=0.01)
    plain = simulate(world, [Life(100, never) for _ in range(12)], None, max_num_seqs=1)
    lives = [Life(100, never, num_behind=100) for _ in range(12)]
    assert simulate(world, lives, make_pace(world), max_num_seqs=1) <= 1.02 * plain + 4 * 100 * 0.01 * STEP / 12
    assert not any(life.num_proposed for life in lives[4:])


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    world = World(CURVES["flat"], 0.05, read_cost=0.01)
    for num_behind, reads in ((1000, False), (100, True)):
        life = Life(8, lambda i: True, num_behind=num_behind)
        simulate(world, [life], make_pace(world))
        assert (life.num_proposed > 0) is reads


def test_a_text_whose_reading_is_put_off_is_lent_its_cost_once() -> None:
    """As with a draft whose context is too short for the text: it is asked, and never reads or proposes."""
    world = World(CURVES["flat"], 0.05, read_cost=0.01)
    pace, trust = make_pace(world), Trust()
    for _ in range(40):
        pace.choose([Wish(trust, 50, 50, num_behind=100)])
        pace.learn(Outcome([(trust, 0, 0)], STEP, 0.0, STEP))
    assert trust.balance_sec <= 2 * STEP


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("phase", [5, 40, 150])
@pytest.mark.parametrize("draft_cost", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("curve", ["flat", "slow rise", "knee at 6", "knee at 100"])
def test_alternating_good_and_bad_phases_never_cost_two_percent(
    curve: str, draft_cost: float, phase: int, batch: int
) -> None:
    world = World(CURVES[curve], draft_cost)

    def texts() -> list[Life]:
        return [Life(300, lambda p: p // phase % 2 == 0) for _ in range(batch)]

    assert simulate(world, texts(), make_pace(world)) <= 1.02 * simulate(world, texts(), None)


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_a_drafter_that_costs_other_than_it_says_is_found_out(factor: float) -> None:
    """Right half of the time. The estimate is wrong from the beginning, and the truth is charged."""
    world = World(CURVES["flat"], 0.3, slower=lambda step: (1.0, factor))
    bits = [random.Random(i).random() < 0.5 for i in range(1000)]
    plain = simulate(world, [Life(400, bits.__getitem__)], None)
    assert simulate(world, [Life(400, bits.__getitem__)], make_pace(world)) <= 1.03 * plain


@pytest.mark.parametrize("then", [0.4, 2.5])
def test_a_machine_that_becomes_faster_or_slower_in_the_middle(then: float) -> None:
    world = World(CURVES["slow rise"], 0.3, slower=lambda step: (1.0, 1.0) if step < 100 else (then, then))
    plain = simulate(world, [Life(600, never)], None)
    assert simulate(world, [Life(600, never)], make_pace(world)) <= 1.02 * plain


def test_acceptance_that_drops_in_the_middle_of_a_text_is_given_up_soon() -> None:
    world = World(CURVES["flat"], 0.2)
    good = Life(400, lambda p: p < 200)
    simulate(world, [good], pace := make_pace(world))
    before = good.num_proposed
    wrong = [Life(200, lambda p: p < 200), Life(400, lambda p: p < 200)]
    assert simulate(world, wrong[:1], make_pace(world)) < 0.4 * 200 * STEP  # it did gain before
    assert before <= wrong[0].num_proposed + 12 * 12  # a dozen rounds later it proposes no more
    assert good.trust.acceptance(0.0) < 0.2
    assert pace.plain.ratio == pytest.approx(1.0)


# What a good one gains -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("draft_cost", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("curve", CURVES)
def test_a_perfect_drafter_comes_close_to_the_best_fixed_number(curve: str, draft_cost: float, batch: int) -> None:
    world, cost = World(CURVES[curve], draft_cost), CURVES[curve]
    plain_sec = cost(batch)
    best = best_speculation(1.0, draft_cost * STEP / plain_sec, lambda n: cost(batch * n) / plain_sec, max_k=MAX_K)
    lives = [Life(300, lambda p: True) for _ in range(batch)]
    sec = simulate(world, lives, make_pace(world))
    speedup = simulate(world, [Life(300, never) for _ in range(batch)], None) / sec
    assert speedup >= 0.9 * best.speedup
    if best.speculate_k == 0:  # where every token has its price there is nothing to gain
        assert (speedup, sum(life.num_proposed for life in lives)) == (1.0, 0)


@pytest.mark.parametrize("draft_cost", [0.05, 0.2])
def test_texts_that_are_right_four_times_of_five_gain_in_company(draft_cost: float) -> None:
    """Also those that begin with bad luck: none is left behind while the others' drafts slow it down."""
    world = World(CURVES["flat"], draft_cost)
    bits = [[random.Random(1000 * t + i).random() < 0.8 for i in range(200)] for t in range(64)]
    sec = simulate(world, [Life(128, b.__getitem__) for b in bits], make_pace(world))
    assert sec < 0.95 * 128 * STEP


def test_nothing_is_proposed_where_every_token_costs_a_step() -> None:
    world = World(CURVES["proportional"], 0.0)
    pace = make_pace(world)
    assert pace.best(1, 1.0) == (0, 1.0)
    assert pace.choose([Wish(Trust(), 50, 50, 1)] * 3) == [0, 0, 0]


def test_both_kinds_of_steps_stay_known() -> None:
    """A perfect drafter on a free machine: a plain step comes by now and then all the same."""
    world = World(CURVES["flat"], 0.01)
    pace, trust, num_plain = make_pace(world), Trust(), 0
    for _ in range(256):
        (k,) = pace.choose([Wish(trust, 12, 10_000, 1)])
        num_plain += k == 0
        pace.learn(Outcome([(trust, k, k)], STEP, 0.01 * STEP * k, 0.01 * STEP * k))
    assert num_plain == 4


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
        self.limits = EngineLimits(1, block_size, block_size)
        self._clock, self._curve = clock, curve
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.fail_at = 0

    def open(self) -> Handle:
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
    assert sorted(set(engine.sizes)) == [n for n in SIZES if n <= 20]
    assert [times(n) for n in (1, 8, 20)] == pytest.approx([CURVES["slow rise"](n) for n in (1, 8, 20)])
    assert engine.calls == ["open", "close"]


@pytest.mark.parametrize("block_size, budget_sec, largest", [(5, 1e9, 5), (1, 1e9, 1), (1024, 0.14, 3), (1024, 0.0, 1)])
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

    monkeypatch.setattr(costs, "_wait", lambda logits: True)
    clock = [0.0]
    engine = Captures(clock, CURVES["slow rise"])
    times = time_steps(engine, clock, 20, budget_sec=2.0)
    assert max(engine.sizes) == 20
    assert [times(n) for n in (1, 8, 20)] == pytest.approx([CURVES["slow rise"](n) for n in (1, 8, 20)])


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


def test_prompt_lookup_looks_before_the_window_too() -> None:
    """The window that the target sees slides; what stood before it was still said."""
    ids = [ord(c) for c in "hello world. " + "x" * 40 + "hello wor"]
    row = Text(Request(0, None, ids, SamplingParams(), 0), 0, OutputText(None, ()), 64, ids)
    (proposal,) = PromptLookup().propose([DraftRequest(row, ids, 50, 3)])  # type: ignore[arg-type]
    assert "".join(map(chr, proposal.token_ids)) == "ld."
