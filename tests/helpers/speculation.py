"""A core that speculates, and what it generates."""

from __future__ import annotations

from helpers.engines import V
from helpers.models import CHARS, submit
from helpers.scheduling import check_integrity
from nanoinfer import SamplingParams
from nanoinfer.config import SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines.base import Engine
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.speculative.base import Drafter
from nanoinfer.speculative.speculator import Speculator
from nanoinfer.speculative.step_costs import StepCosts, StepTimes
from nanoinfer.tokenizers.tokenizer import CharTokenizer

FLAT = StepTimes({1: 1e-3, 256: 1.01e-3})  # a step costs the same whatever is in it, so any proposal is worth it


def make_core(engine: Engine, drafter: Drafter, k: int | None, **options: int) -> Core:
    speculator = Speculator(drafter, speculate_k=k, costs=None if k else StepCosts(FLAT))
    tokenizer = CharTokenizer(CHARS)
    scheduler = Scheduler(engine, SchedulerConfig(target_step_ms=None, **options))
    return Core(engine, scheduler, sample, tokenizer, V, speculator=speculator)


def generate(
    core: Core, prompts: list[list[int]], params: list[SamplingParams], eos: tuple[int, ...] = ()
) -> list[object]:
    requests = [submit(core, None, p, q, seed=7, end_token_ids=eos) for p, q in zip(prompts, params, strict=True)]
    while core.unfinished:
        core.step()
        check_integrity(core.scheduler)
        for s in core.scheduler.running:
            if s.handle is not None:
                assert core.engine.length(s.handle) == s.num_cached  # type: ignore[arg-type]
    core.reset_prefix_cache()  # another core may use the engine next
    return [[(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in core.output(r).outputs] for r in requests]


def plain(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], eos: tuple[int, ...] = ()
) -> list[object]:
    return generate(Core(engine, Scheduler(engine), sample, CharTokenizer(CHARS), V), prompts, params, eos)


SAMPLED = {
    "plain": SamplingParams(max_tokens=20, temperature=1.0),
    "controls": SamplingParams(
        max_tokens=20,
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=0.3,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={3: 2.0},
    ),
    "n": SamplingParams(max_tokens=12, temperature=0.7, n=3),
    "min_tokens": SamplingParams(max_tokens=20, min_tokens=9, temperature=1.2, stop_token_ids=(3, 5, 7, 20)),
    "allowed": SamplingParams(max_tokens=20, temperature=1.2, allowed_token_ids=(1, 3, 5, 7, 20, 33), logprobs=-1),
    "stop": SamplingParams(max_tokens=25, temperature=1.3, stop=("ab", "e", "Q", "zz")),
    "slide": SamplingParams(max_tokens=50, temperature=1.0, overflow="slide"),
    "greedy penalised": SamplingParams(max_tokens=20, temperature=0.0, frequency_penalty=1.5, logprobs=2),
}
