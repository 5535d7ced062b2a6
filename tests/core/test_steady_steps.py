"""Steady decoding with steps that overlap: equal steps, and what happens between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.engines import GREEDY, naive_greedy, prompt
from helpers.models import TINY, make_limits, make_model, submit
from helpers.overlap import TorchSampler
from nanoinfer.core.core import Core
from nanoinfer.core.overlap import OverlapScheduler
from nanoinfer.engines.base import PENDING, Handle, StepBatch
from nanoinfer.engines.static_shapes import StaticShapeEngine
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler

LONG = replace(TINY, block_size=128)


def make_core(gpt: Transformer, *, overlaps: bool = True) -> Core:
    engine = StaticShapeEngine(gpt, make_limits(gpt.config, 4))
    ahead = OverlapScheduler(engine, TorchSampler()) if overlaps else None
    return Core(engine, Scheduler(engine), sample, None, gpt.config.vocab_size, overlap=ahead)


def test_requests_come_and_go_between_steps_that_differ_in_their_tokens_alone() -> None:
    gpt = make_model(LONG)
    core = make_core(gpt)
    lengths = [40, 12, 25, 7, 18]
    requests = []
    for i, n in enumerate(lengths):
        requests.append(submit(core, None, prompt(4 + i, i), replace(GREEDY, max_tokens=n), seed=0))
        for _ in range(6):
            core.step()
    while core.unfinished:
        core.step()
    expected = [naive_greedy(gpt, prompt(4 + i, i), n) for i, n in enumerate(lengths)]
    assert [core.output(r).outputs[0].token_ids for r in requests] == expected


def close_another(engine: StaticShapeEngine, others: list[Handle], drawing: list[Handle]) -> None:
    engine.close(others[0])  # the last slot moves to the first


def extend_others(engine: StaticShapeEngine, others: list[Handle], drawing: list[Handle]) -> None:
    engine.extend(StepBatch(others, [3, 4], [1, 1], [0, 0]))  # slots 0 and 3: the inputs of 4 rows, as slots 1 and 2


def truncate(engine: StaticShapeEngine, others: list[Handle], drawing: list[Handle]) -> None:
    for handle in drawing:
        engine.truncate(handle, engine.length(handle) - 1)


@pytest.mark.parametrize("between", [close_another, extend_others, truncate])
def test_other_calls_between_two_equal_steps(between: Callable[..., None]) -> None:
    gpt, sampler = make_model(LONG), TorchSampler()
    engine = StaticShapeEngine(gpt, make_limits(LONG, 4))
    first, *drawing, last = (engine.open() for _ in range(4))
    prompts = [prompt(6, 1), prompt(3, 2)]
    engine.extend(StepBatch([first, last], [1, 2], [1, 1], [0, 0]))
    first_step = StepBatch(drawing, [*prompts[0], *prompts[1]], [6, 3], [1, 1])
    drawn = [engine.step(first_step, sampler.sample_slots, [1, 2]).read()]
    step = StepBatch(drawing, [PENDING, PENDING], [1, 1], [1, 1])
    drawn += [engine.step(step, sampler.sample_slots, [1, 2]).read() for _ in range(3)]
    between(engine, [first, last], drawing)
    if between is truncate:  # the last tokens again, at the same positions
        drawn[-1] = engine.step(replace(step, token_ids=drawn[-2]), sampler.sample_slots, [1, 2]).read()
    drawn += [engine.step(step, sampler.sample_slots, [1, 2]).read() for _ in range(4)]
    expected = [naive_greedy(gpt, p, len(drawn)) for p in prompts]
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == expected
