"""Prompts beside sequences that decode: how many of their tokens a step processes, from times that are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.engines import GREEDY
from helpers.models import TINY, make_model
from helpers.models import submit as submit_unstreamed
from helpers.overlap import make_core as make_overlap_core
from helpers.scheduling import World, summary
from helpers.scheduling import make_request as make_unstreamed
from helpers.table_engine import ALPHABET, Clock, make_core
from nanoinfer.config import EngineLimits, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines.transfers import PendingTokens
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.scheduling.work import MIN_PREFILL, PrefillLimit

ANY = 1 << 20


def make_request(num_prompt: int, params: SamplingParams, block_size: int) -> Request:
    request = make_unstreamed(num_prompt, params, block_size)
    request.queue = deque()
    return request


def submit(core: Core, prompt: list[int], params: SamplingParams) -> Request:
    request = submit_unstreamed(core, None, prompt, params, seed=0, end_token_ids=())
    request.queue = deque()
    return request


def run_steps(limit: PrefillLimit, decode_sec: float, token_sec: float, num: int) -> list[float]:
    """Return the times of the next steps, all of them with as many prompt tokens as the limit permits."""
    times = []
    for _ in range(num):
        num_prefill = limit.apply(ANY)
        times.append(decode_sec + num_prefill * token_sec)
        limit.note(num_prefill, times[-1])
    return times


def test_without_a_target_nothing_is_limited() -> None:
    for limit in (PrefillLimit(None), PrefillLimit(0)):
        limit.note(500, 9.0)
        assert limit.apply(ANY) == ANY


def test_the_limit_begins_small_and_doubles_until_a_step_takes_the_target() -> None:
    limit = PrefillLimit(80)
    sizes = [limit.apply(ANY)]
    for _ in range(7):
        limit.note(sizes[-1], 0.010 + sizes[-1] * 0.0005)
        sizes.append(limit.apply(ANY))
    assert sizes == [16, 32, 64, 121, 137, 139, 139, 139]  # 140 tokens are 80 ms
    assert limit.apply(100) == 100


@pytest.mark.parametrize("token_ms", [0.01, 0.1, 0.5, 1.5, 4.0])
@pytest.mark.parametrize("decode_ms", [1.0, 15.0, 40.0])
def test_no_step_takes_twice_the_target(decode_ms: float, token_ms: float) -> None:
    times = run_steps(PrefillLimit(80), decode_ms / 1000, token_ms / 1000, 40)
    assert max(times) < 0.160
    if decode_ms + token_ms * MIN_PREFILL < 80:
        assert 0.080 * 0.9 < times[-1] <= 0.081


def test_steps_that_take_longer_than_the_target_without_prompts_have_the_minimum() -> None:
    limit = PrefillLimit(80)
    run_steps(limit, 0.3, 0.001, 5)
    assert limit.apply(ANY) == MIN_PREFILL == 16


def test_one_slow_step_halves_the_limit_and_a_longer_context_lowers_it() -> None:
    limit = PrefillLimit(80)
    run_steps(limit, 0.010, 0.0005, 10)
    assert limit.apply(ANY) == 139
    limit.note(139, 30.0)
    assert limit.apply(ANY) == 69
    run_steps(limit, 0.010, 0.0005, 5)
    assert limit.apply(ANY) == 139
    assert run_steps(limit, 0.010, 0.001, 10)[0] == pytest.approx(0.149)
    assert 65 <= limit.apply(ANY) <= 70


def test_short_prompts_and_ends_of_prompts_do_not_lower_it() -> None:
    limit = PrefillLimit(80)
    run_steps(limit, 0.010, 0.0005, 10)
    limit.note(20, 0.020)  # as if 80 tokens fitted: most of the time is not the prompt's
    limit.note(3, 5.0)
    limit.note(0, 5.0)
    assert limit.apply(ANY) == 139


# The scheduler -----------------------------------------------------------------------------------------------


def make_world(decode_sec: float, token_sec: float, target_step_ms: int | None = 80) -> World:
    config = SchedulerConfig(enable_prefix_caching=False, target_step_ms=target_step_ms)
    return World(EngineLimits(8, 1000, 8000), config, decode_sec=decode_sec, token_sec=token_sec)


def test_a_prompt_is_split_while_another_sequence_decodes() -> None:
    world = make_world(0.010, 0.001)
    world.scheduler.add(make_request(5, SamplingParams(max_tokens=50), 1000))
    world.step()
    world.scheduler.add(make_request(200, SamplingParams(), 1000))
    chunks = [summary(world.step())[1][1:] for _ in range(6)]
    assert chunks == [(16, False), (32, False), (60, False), (68, False), (24, True), (1, True)]


def test_prompts_are_not_split_while_no_sequence_decodes() -> None:
    world = make_world(1.0, 1.0)
    world.scheduler.add(make_request(700, SamplingParams(), 1000), make_request(900, SamplingParams(), 1000))
    assert summary(world.step()) == [(700, 700, True), (900, 900, True)]


@pytest.mark.parametrize("target_step_ms, make", [(None, make_request), (80, make_unstreamed)])
def test_without_a_target_or_a_stream_a_prompt_is_not_split(
    target_step_ms: int | None, make: Callable[..., Request]
) -> None:
    world = make_world(1.0, 1.0, target_step_ms)
    world.scheduler.add(make(5, SamplingParams(), 1000))
    world.step()
    world.scheduler.add(make_request(900, SamplingParams(), 1000))
    assert summary(world.step()) == [(5, 1, True), (900, 900, True)]


def test_every_prompt_progresses_on_the_slowest_machine() -> None:
    world = make_world(5.0, 1.0)
    world.scheduler.add(make_request(5, SamplingParams(max_tokens=9), 1000))
    world.step()
    for num_prompt in (40, 30):
        world.scheduler.add(make_request(num_prompt, SamplingParams(), 1000))
    fed = [[(n, count) for n, count, _ in summary(world.step()) if n != 5] for _ in range(6)]
    assert fed[:3] == [[(40, 16)], [(40, 16)], [(40, 8), (30, 8)]]
    assert fed[3:5] == [[(40, 1), (30, 16)], [(40, 1), (30, 6)]]


# The core ----------------------------------------------------------------------------------------------------

LIMITED = SchedulerConfig(enable_prefix_caching=False, target_step_ms=80)


def limit_of(core: Core) -> int:
    return core.scheduler.prefill_limit.apply(ANY)


def test_the_core_measures_its_steps() -> None:
    core, engine, _ = make_core(ALPHABET, block_size=400, config=LIMITED)
    engine.cost_sec = iter([0.040, 0.020, 0.080, 0.160, 0.010])
    submit(core, [0] * 20, SamplingParams(max_tokens=50, temperature=0))
    core.step()
    assert limit_of(core) == 32  # 40 fit
    submit(core, [0] * 300, SamplingParams(max_tokens=50, temperature=0))
    limits, fed = [], []
    for _ in range(3):
        before = engine.num_fed
        core.step()
        fed.append(engine.num_fed - before)
        limits.append(limit_of(core))
    assert fed == [1 + 32, 1 + 64, 1 + 64]
    assert limits == [64, 64, 32]


@pytest.mark.parametrize("error", [RuntimeError("the engine failed"), KeyboardInterrupt()])
def test_a_step_that_fails_or_is_interrupted_changes_nothing(error: BaseException) -> None:
    core, engine, _ = make_core(ALPHABET, block_size=400, config=LIMITED)
    engine.fail, engine.error, engine.cost_sec = ("extend", 1), error, iter([0.001])
    submit(core, [0] * 300, GREEDY)
    with pytest.raises(type(error)):
        core.step()
    assert limit_of(core) == MIN_PREFILL


class SlowFuture:
    """Tokens whose computation takes a told time after the ones before."""

    def __init__(self, tokens: PendingTokens, clock: Clock, seconds: float) -> None:
        self.tokens, self.clock, self.seconds = tokens, clock, seconds

    def read(self) -> list[int]:
        self.clock.now += self.seconds
        return self.tokens.read()


def test_with_overlap_scheduling_a_step_is_the_time_between_two_reads() -> None:
    core, clock = make_overlap_core(make_model(replace(TINY, block_size=128)), target_step_ms=80), Clock()
    core.clock, costs, engine = clock, iter([0.010, 0.010, 0.160, 0.020, 0.5]), core.engine
    step = engine.step  # type: ignore[attr-defined]
    engine.step = lambda *a: SlowFuture(step(*a), clock, next(costs))  # type: ignore[attr-defined]
    submit(core, [1] * 4, replace(GREEDY, max_tokens=60))
    core.step()  # launches the prompt
    submit(core, [2] * 120, replace(GREEDY, max_tokens=4))
    clock.now += 7.0  # idle: no step runs longer for it
    limits = []
    for _ in range(4):
        core.step()
        limits.append(limit_of(core))
    assert limits == [16, 32, 16, 32]  # 4 tokens say nothing; 16 in 10 ms; 16 in 160 ms; 32 in 20 ms
