"""Ctrl-C at any point: every sequence is then closed or still owned, and the next request gives what it always gives.

Two ways to interrupt: at every so many-th line of ours that runs (a trace function raises there, inside engines and
inside the clean-up too), and by a real signal after a random time.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.interrupts import ENGINES, Interrupter, check, how_often, interrupt_everywhere, tracing
from helpers.models import TINY, make_limits, make_model
from helpers.overlap import TorchSampler
from helpers.recorded import FakeRecorder
from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.core.core import Core
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.entrypoints.streams import Ownership
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.tokenizers.tokenizer import CharTokenizer

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(seed=1, max_tokens=3, n=2),
    SamplingParams(seed=2, max_tokens=6, overflow="slide", slide_stride=3, logprobs=1),
]
PROMPTS = ["To be", "or", "c" * (TINY.block_size - 2)]


def texts(llm: LLM) -> list[str]:
    """Generate, stream and score: all ways to use an engine."""
    outputs = llm.generate(PROMPTS, PARAMS)
    stream = llm.stream("A", PARAMS[0])
    found = [next(stream), *(o.text for output in outputs for o in output.outputs)]
    del stream  # leaves its request to be ended
    return [*found, f"{llm.perplexity('To be or not to be')[0].log_likelihood:.4f}"]


@how_often
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow_if(lambda engine: engine != "native")
@pytest.mark.nightly_if(lambda engine: engine in ("recompute", "dynamic"))
def test_interrupted_at_any_line(folder: Path, engine: str, num_interrupts: int) -> None:
    llm = LLM(str(folder), engine=engine, max_num_seqs=5)
    interrupt_everywhere(llm.core, lambda: texts(llm), num_interrupts)


@how_often
@pytest.mark.parametrize("draft", ["prompt-lookup", "self:1"])
@pytest.mark.slow
def test_interrupted_while_tokens_are_proposed(folder: Path, draft: str, num_interrupts: int) -> None:
    llm = LLM(str(folder), engine="static", max_num_seqs=5, draft=draft, speculate_k=2)
    interrupt_everywhere(llm.core, lambda: texts(llm), num_interrupts)
    drafter = llm.core.speculator.drafter  # type: ignore[union-attr]
    llm.reset_prefix_cache()
    assert len(getattr(drafter, "engine", llm.engine).handles) == 0


@how_often
def test_a_stream_gets_each_output_once_wherever_a_step_is_interrupted(folder: Path, num_interrupts: int) -> None:
    """The steps of another call run the stream's requests, and end them when that call is interrupted."""
    llm = LLM(str(folder), max_num_seqs=5)

    def interrupted(at: int) -> int:
        ids, stream = llm.stream_outputs(PROMPTS, PARAMS)
        interrupter = Interrupter(at)
        with suppress(KeyboardInterrupt), tracing(interrupter):
            llm.generate(PROMPTS[0], PARAMS[0])
        items = list(stream)
        outputs = [item for item in items if isinstance(item, RequestOutput)]
        assert sorted(o.request_id for o in outputs) == ids
        reasons = {c.finish_reason for o in outputs for c in o.outputs}
        assert reasons <= {"length", "stop", "abort"}
        assert at > 0 or "abort" not in reasons
        for output in outputs:
            later = items[items.index(output) + 1 :]
            assert all(item.request_id != output.request_id for item in later)
        return interrupter.count

    num_lines = interrupted(-1)
    for i in range(num_interrupts):
        interrupted(1 + i * num_lines // num_interrupts)


@how_often
@pytest.mark.slow
def test_interrupted_while_a_step_is_in_flight(num_interrupts: int) -> None:
    from nanoinfer.core.overlap import OverlapScheduler

    gpt = make_model()
    limits = make_limits(gpt.config, 5)
    engine = CudaGraphEngine(gpt, limits, EngineConfig(graph_memory=2**30), recorder=FakeRecorder())

    class Sampler(TorchSampler):
        num_slots = 5

        def __init__(self) -> None:
            super().__init__()
            for name in ("temperature", "position", "uniforms"):
                value = getattr(self, name)
                setattr(self, name, value.new_zeros(5, *value.shape[1:]))

    tokenizer = CharTokenizer([chr(ord("A") + i) for i in range(TINY.vocab_size)])
    core = Core(
        engine, Scheduler(engine), sample, tokenizer, TINY.vocab_size, overlap=OverlapScheduler(engine, Sampler())
    )

    def work() -> list[str]:
        requests = [core.make(None, [3] * len(p), q, q.seed or 0) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        with Ownership(core, requests):
            core.submit(requests)
            while core.unfinished:
                core.step()
        return [o.text for r in requests for o in core.output(r).outputs]

    interrupt_everywhere(core, work, num_interrupts)


@how_often
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow_if(lambda engine: engine != "native")
def test_interrupted_by_a_signal_at_a_random_time(folder: Path, engine: str, num_interrupts: int) -> None:
    llm = LLM(str(folder), engine=engine, max_num_seqs=5)
    expected = texts(llm)
    rng = random.Random(0)
    num_interrupted, longest = 0, 0.005
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(num_interrupts):
            start = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
                texts(llm)
                signal.setitimer(signal.ITIMER_REAL, 0)
                longest = time.perf_counter() - start  # most are interrupted, on a machine of any speed
            except KeyboardInterrupt:
                num_interrupted += 1
                longest *= 1.1
            check(llm.core)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted > num_interrupts // 4
    assert texts(llm) == expected
    assert not llm.core.unfinished
