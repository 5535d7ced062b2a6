"""Overlap scheduling produces the tokens of steps without overlap when sequences end, join, fork or fail.

Steady decoding with steps that overlap: equal steps, and what happens between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.engines import BATCHES, DEVICES, GREEDY, V, generate, naive_greedy, prompt
from helpers.environment import INTERPRETED
from helpers.models import TINY, make_folder, make_limits, make_model, submit
from helpers.overlap import TorchSampler, make_core
from helpers.recorded import FakeRecorder
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.config import EngineConfig, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.core.overlap import OverlapScheduler, overlap_scheduler
from nanoinfer.engines.base import PENDING, Handle, StepBatch
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.static_shapes import StaticShapeEngine
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.sampler import sample
from nanoinfer.sampling.triton import TritonSampler
from nanoinfer.scheduling.scheduler import Scheduler

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WARM = SamplingParams(max_tokens=14, temperature=1.0)


def test_decode_steps_are_captured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 1, 2, 4 in the only context, the first two also of later slots. Afterwards, only prompts are captured."""
    gpt, recorder = make_model(), FakeRecorder()
    engine = CudaGraphEngine(gpt, make_limits(gpt.config, 4), EngineConfig(graph_memory=2**30), recorder=recorder)
    assert overlap_scheduler(engine, V, "cpu") is None
    assert recorder.num_recordings == 0
    monkeypatch.setattr("nanoinfer.sampling.triton.TritonSampler", lambda *_: TorchSampler())
    overlap = overlap_scheduler(engine, V, "cuda:0")
    assert recorder.num_recordings == 5
    core = Core(engine, Scheduler(engine, SchedulerConfig()), sample, None, V, overlap=overlap)
    prompts = [prompt(n, i) for i, n in enumerate((3, 9, 14))]
    params = [replace(GREEDY, max_tokens=n) for n in (4, 7, 9)]
    expected = [[naive_greedy(gpt, p, q.max_tokens)] for p, q in zip(prompts, params, strict=True)]
    assert generate(core, prompts, params) == expected
    assert [bucket.tokens for bucket, *_ in engine.graphs._recorded][5:] == [4]


def test_a_warm_up_leaves_half_of_the_memory_for_graphs_and_survives_without_any(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt, draw = make_model(), TorchSampler().sample_slots
    for graph_memory, num_graphs in ((1200, 5), (500, 3), (300, 2), (200, 1), (0, 0)):
        recorder = FakeRecorder(bytes_each=100)
        options = EngineConfig(graph_memory=graph_memory)
        engine = CudaGraphEngine(gpt, make_limits(gpt.config, 4), options, recorder=recorder)
        engine.warm_up(draw)
        assert len(engine.graphs) == num_graphs
    assert not caplog.records

    def no_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    engine.__init__(gpt, engine.limits, EngineConfig(graph_memory=500), recorder=recorder)  # type: ignore[misc]
    engine.warm_up(no_memory)
    assert "steps of 1 sequences do not fit in the device's memory: lower kv_cache_memory" in caplog.text


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: b.replace(" ", "-"))
@pytest.mark.parametrize("chunk", [2048, 5], ids=["whole", "chunked"])
def test_greedy_tokens_equal_the_naive_loop(batch: str, chunk: int) -> None:
    gpt = make_model()
    prompts = [prompt(n, i) for i, n in enumerate(BATCHES[batch])]
    params = [replace(GREEDY, max_tokens=3 + 4 * i) for i in range(len(prompts))]
    expected = [[naive_greedy(gpt, p, q.max_tokens)] for p, q in zip(prompts, params, strict=True)]
    core = make_core(gpt, chunk=chunk)
    assert generate(core, prompts, params) == expected
    assert generate(core, prompts, params) == expected


@pytest.mark.parametrize("chunk", [2048, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("stride", [1, 5, None])
@pytest.mark.slow_if(lambda stride, chunk: (stride, chunk) != (None, 7))
@pytest.mark.nightly_if(lambda stride, chunk: (stride, chunk) == (1, 7))
def test_windows_slide_before_the_token_is_read(stride: int | None, chunk: int) -> None:
    gpt = make_model()
    prompts = [prompt(4), prompt(30), prompt(50)]
    params = [replace(q, max_tokens=2 * TINY.block_size, overflow="slide", slide_stride=stride) for q in (GREEDY, WARM)]
    for q in params:
        at_once = generate(make_core(gpt, recorded=False, overlap=False, chunk=chunk), prompts, [q] * 3)
        assert generate(make_core(gpt, recorded=False, chunk=chunk), prompts, [q] * 3) == at_once


def test_drawn_texts_equal_those_of_steps_that_are_read_at_once() -> None:
    """Sequences that end at an end token, at max_tokens and at the context length; one more waits for room."""
    gpt = make_model()
    prompts = [prompt(n, i) for i, n in enumerate([3, 17, 30, 8, 8, 32])]
    stop = tuple(range(0, V, 9))
    params = [replace(WARM, stop_token_ids=stop if i % 2 else (), max_tokens=20 - i) for i in range(len(prompts))]
    at_once = generate(make_core(gpt, overlap=False), prompts, params)
    assert generate(make_core(gpt), prompts, params) == at_once
    assert any(0 < len(texts[0]) < q.max_tokens for texts, q in zip(at_once, params, strict=True))


def test_samples_run_ahead_once_they_have_forked() -> None:
    gpt = make_model()
    params = [replace(WARM, n=3), WARM]
    core = make_core(gpt)
    sampler = core._overlap._sampler  # type: ignore[union-attr]
    expected = generate(make_core(gpt, overlap=False), [prompt(9), prompt(2)], params)
    assert generate(core, [prompt(9), prompt(2)], params) == expected
    assert sampler.num_assigned == 4


def test_a_request_that_the_sampler_refuses_is_read_at_once_and_then_steps_overlap_again() -> None:
    gpt = make_model()
    biased = replace(WARM, max_tokens=4, logit_bias={3: 2.0})
    params = [WARM, biased]
    core = make_core(gpt)
    expected = generate(make_core(gpt, overlap=False), [prompt(9), prompt(2)], params)
    assert generate(core, [prompt(9), prompt(2)], params) == expected
    sampler = core._overlap._sampler  # type: ignore[union-attr]
    assert sampler.num_assigned == 1  # the first, from its fifth token on


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    gpt = make_model()
    core = make_core(gpt)
    request = submit(core, None, prompt(5), replace(GREEDY, max_tokens=3), seed=0, end_token_ids=())
    assert core.step() == []  # the prompt is on its way
    (first,) = core.step()
    assert (first.num_tokens, first.finish_reason) == (1, None)
    assert core.engine.length(Handle(0)) == 6  # its first token is in the engine already
    (second,) = core.step()
    (third,) = core.step()
    assert (second.num_tokens, third.num_tokens, third.finish_reason) == (1, 1, "length")
    assert not core.unfinished
    assert core._in_flight is None
    assert core.output(request).outputs[0].token_ids == naive_greedy(gpt, prompt(5), 3)


def test_an_aborted_request_leaves_its_neighbours_alone() -> None:
    gpt = make_model()
    core = make_core(gpt)
    a = submit(core, None, prompt(5), replace(GREEDY, max_tokens=20), seed=0, end_token_ids=())
    b = submit(core, None, prompt(9), replace(GREEDY, max_tokens=12), seed=0, end_token_ids=())
    for _ in range(4):
        core.step()
    core.abort(a)
    c = submit(core, None, prompt(3), replace(GREEDY, max_tokens=9), seed=0, end_token_ids=())  # takes its slots
    while core.unfinished:
        core.step()
    made = core.output(a).outputs[0]
    assert (made.finish_reason, made.token_ids) == ("abort", naive_greedy(gpt, prompt(5), 3))
    assert core.output(b).outputs[0].token_ids == naive_greedy(gpt, prompt(9), 12)
    assert core.output(c).outputs[0].token_ids == naive_greedy(gpt, prompt(3), 9)


def test_logits_that_are_not_finite_end_their_own_sequence() -> None:
    gpt = make_model(replace(TINY, tie_word_embeddings=False))
    gpt.transformer["wte"].weight[5] = float("nan")
    core = make_core(gpt)
    clean = [t for t in prompt(12) if t != 5]
    request, other = submit(core, None, [5], GREEDY, seed=0), submit(core, None, clean, GREEDY, seed=0)
    while core.unfinished:
        core.step()
    (failed,), (whole,) = core.output(request).outputs, core.output(other).outputs
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert failed.error is not None
    assert "largest logit is not finite" in failed.error
    assert whole.token_ids == naive_greedy(gpt, clean, GREEDY.max_tokens)
    assert generate(core, [clean], [GREEDY])[0][0] == whole.token_ids


def test_steps_refuse_what_they_cannot_mean() -> None:
    gpt = make_model()
    engine = StaticShapeEngine(gpt, make_limits())
    draw = TorchSampler().sample_slots
    a = engine.open()
    for batch, slots, message in (
        (StepBatch([a], [-1], [1], [1]), [0], "the last step sampled"),
        (StepBatch([a], [1, 2], [2], [2]), [0], r"num_logits=\[2\]"),
        (StepBatch([a], [1], [1], [1]), [], "with 0 sampler slots"),
        (StepBatch([a], [-1, 1], [2], [1]), [0], "token id -1"),
        (StepBatch([Handle(7)], [1], [1], [1]), [0], "handle 7"),
    ):
        with pytest.raises(NanoinferError, match=message):
            engine.step(batch, draw, slots)
    assert engine.length(a) == 0
    (token,) = engine.step(StepBatch([a], [1, 2], [2], [1]), draw, [0]).read()
    assert [token] == naive_greedy(gpt, [1, 2], 1)
    child = engine.fork(a)
    tokens = engine.step(StepBatch([child, a], [-1, -1], [1, 1], [1, 1]), draw, [1, 0]).read()
    assert tokens == naive_greedy(gpt, [1, 2], 2)[1:] * 2
    engine.extend(StepBatch([a], [3], [1], [0]))
    with pytest.raises(NanoinferError, match="that step sampled none"):
        engine.step(StepBatch([a], [-1], [1], [1]), draw, [0])


CONTROLS = [
    SamplingParams(max_tokens=9, temperature=0.9, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(max_tokens=12, temperature=1.2, top_k=9, presence_penalty=0.5, frequency_penalty=0.7, n=2),
    SamplingParams(max_tokens=7, temperature=0, frequency_penalty=1.5),
    SamplingParams(max_tokens=5, temperature=1.0, min_p=0.1, logit_bias={4: 3.0}),
    SamplingParams(max_tokens=4, temperature=1.0, logprobs=2),  # read at once: the sampler keeps no log-probabilities
    SamplingParams(max_tokens=11, temperature=1.0, stop_token_ids=(5, 6, 7), min_tokens=6),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow_if(lambda device: device == "cpu" and INTERPRETED)
def test_the_fused_sampler_draws_what_the_reference_draws(device: str) -> None:
    """Everything together, six requests on four slots: sequences that come late find no counts of those before."""
    pytest.importorskip("triton", reason="triton is not installed")
    gpt = make_model().to(device)
    limits = make_limits(gpt.config, 4)
    engine = CudaGraphEngine(gpt, limits) if device == "cuda" else StaticShapeEngine(gpt, limits)
    sampler = TritonSampler(4, V, torch.device(device))
    core = Core(engine, Scheduler(engine), sample, None, V, overlap=OverlapScheduler(engine, sampler))
    prompts = [prompt(n, i) for i, n in enumerate((3, 7, 5, 9, 2, 12))]
    expected = generate(make_core(gpt, recorded=False, overlap=False), prompts, CONTROLS)
    assert generate(core, prompts, CONTROLS) == expected
    overlapped = generate(core, prompts[:4], [replace(q, n=1) for q in CONTROLS[:4]])  # all on the device
    assert [texts[0] for texts in overlapped] == [texts[0] for texts in expected[:4]]


@needs_cuda
@pytest.mark.gpu
def test_an_llm_runs_ahead_on_a_gpu(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m"))
    params = [SamplingParams(max_tokens=20, temperature=t, top_k=20, seed=1) for t in (0.0, 0.9)]
    expected = LLM(folder, engine="static", dtype="float32").generate(["Go", "To be"], params)
    for engine in ("cuda_graph", "triton"):
        llm = LLM(folder, engine=engine, dtype="float32")
        assert llm.core._overlap is not None
        found = llm.generate(["Go", "To be"], params)
        assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in expected]


LONG = replace(TINY, block_size=128)


def steady_core(gpt: Transformer, *, overlaps: bool = True) -> Core:
    engine = StaticShapeEngine(gpt, make_limits(gpt.config, 4))
    ahead = OverlapScheduler(engine, TorchSampler()) if overlaps else None
    return Core(engine, Scheduler(engine), sample, None, gpt.config.vocab_size, overlap=ahead)


def test_requests_come_and_go_between_steps_that_differ_in_their_tokens_alone() -> None:
    gpt = make_model(LONG)
    core = steady_core(gpt)
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
