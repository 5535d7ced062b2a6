"""Static shapes: which calls a batch becomes, what is recorded, what is uploaded, and what a replay may not bake in."""

from __future__ import annotations

import gc
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from helpers.engines import naive_greedy, prompt
from helpers.environment import ROOT
from helpers.models import TINY, make_limits, make_model
from helpers.overlap import TorchSampler
from helpers.recorded import FakeRecorder
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines import transfers
from nanoinfer.engines.base import PENDING, StepBatch
from nanoinfer.engines.buckets import Bucket, BucketLimits, SubBatch, plan, round_up, warm_buckets
from nanoinfer.engines.compiled import CompiledEngine
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.graphs import CudaRecorder, Graphs
from nanoinfer.engines.static import StaticEngine
from nanoinfer.engines.static_shapes import StaticShapeEngine, StepOutput, StepTensors, run_block
from nanoinfer.engines.transfers import StepInputs
from nanoinfer.kv.slots import SlotCache
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.transformer import Transformer

NUM_KERNELS = runpy.run_path(str(ROOT / "benchmarks" / "gpu_steps.py"))["NUM_KERNELS"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_sizes_are_rounded_up_to_a_few() -> None:
    assert [round_up(n) for n in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
    assert [BucketLimits(1, 1000).context(n) for n in (1, 64, 65, 129, 600)] == [64, 64, 128, 256, 1000]
    assert [BucketLimits(1, 1000, min_context=256).context(n) for n in (1, 257)] == [256, 512]


def test_decode_steps_of_all_sizes_up_to_a_context_are_prepared() -> None:
    shapes = [(b.rows, b.dense, b.context) for b in warm_buckets(BucketLimits(5, 2048))]
    rows = (1, True), (1, False), (2, True), (2, False), (4, True), (4, False), (5, True)
    assert shapes == [(*row, context) for row in rows for context in (64, 128, 256, 512, 1024)]
    assert [b.context for b in warm_buckets(BucketLimits(1, 700))] == [64, 128, 256, 512, 700]


def test_inputs_of_one_and_of_two_tokens_have_the_alignments_of_all() -> None:
    """Triton compiles a kernel for each: addresses and strides that 16 divides, or not."""

    def alignments(tokens: int) -> tuple[bool, ...]:
        inputs = StepInputs(3, tokens, torch.device("cpu"))
        columns = (inputs.given, inputs.start, inputs.count, inputs.slots, inputs.wanted, inputs.sampler_slots)
        return *(c.data_ptr() % 16 == 0 for c in columns), inputs.start.stride(0) % 16 == 0

    assert {alignments(1 << i) for i in range(13)} == {alignments(1), alignments(2)}


@pytest.mark.parametrize(
    "slots, starts, num_new, calls",
    [
        ([0], [9], [1], [SubBatch(Bucket(1, 1, 64, True), [0], [0])]),
        ([2, 0, 1], [9, 70, 3], [1, 1, 1], [SubBatch(Bucket(4, 1, 128, True), [1, 2, 0], [0, 1, 2])]),
        ([9], [0], [1], [SubBatch(Bucket(1, 1, 64, False), [0], [0])]),  # one of ten: gathered, not ten rows
        (
            [0, 1, 2],
            [9, 9, 0],
            [1, 1, 50],
            [SubBatch(Bucket(2, 1, 64, True), [0, 1], [0, 1]), SubBatch(Bucket(1, 64, 64, False), [2], [0])],
        ),
        ([0], [0], [256], [SubBatch(Bucket(1, 256, 256, True), [0], [0])]),
    ],
)
def test_a_batch_becomes_calls(slots: list[int], starts: list[int], num_new: list[int], calls: list[SubBatch]) -> None:
    assert plan(slots, starts, num_new, BucketLimits(10, 256)) == calls


def test_calls_are_bounded_and_cover_every_member_once() -> None:
    n = 100
    calls = plan(list(range(n)), [0] * n, [100] * n, BucketLimits(n, 1024))
    assert sorted(i for call in calls for i in call.members) == list(range(n))
    assert all(call.bucket.rows * call.bucket.tokens <= 4096 for call in calls)
    assert len(calls) == 4


def run(engine: StaticShapeEngine, ids: list[int]) -> Tensor:
    """Feed tokens one by one; return the logits after each."""
    handle = engine.open()
    rows = [engine.extend(StepBatch([handle], [t], [1], [1])).clone() for t in ids]
    engine.close(handle)
    return torch.cat(rows)


def test_a_replay_at_any_position_equals_eager() -> None:
    gpt, recorder = make_model(), FakeRecorder()
    engine = CudaGraphEngine(gpt, make_limits(), EngineConfig(graph_memory=2**30), recorder=recorder)
    expected = gpt(torch.tensor([prompt(20)]))[0]
    for _ in range(2):
        torch.testing.assert_close(run(engine, prompt(20)), expected, atol=1e-4, rtol=1e-4)
    assert (recorder.num_recordings, recorder.num_replays) == (1, 39)  # one step of forty ran before the recording


class BakesThePosition(CudaGraphEngine):
    """The known fault: the step takes the position from the host."""

    def _forward(self, step: StepTensors) -> Tensor:
        return super()._forward(replace(step, pos=torch.full_like(step.pos, self.at)))

    @property
    def at(self) -> int:
        return max(self._lengths.values())


def test_the_recorder_finds_a_position_that_is_baked_in() -> None:
    gpt = make_model()
    engine = BakesThePosition(gpt, make_limits(), EngineConfig(graph_memory=2**30), recorder=FakeRecorder())
    logits, expected = run(engine, prompt(5)), gpt(torch.tensor([prompt(5)]))[0]
    torch.testing.assert_close(logits[:2], expected[:2], atol=1e-4, rtol=1e-4)
    assert (logits[2] - expected[2]).abs().max() > 0.1


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every upload that is made."""
    made: list[object] = []
    upload = transfers.upload
    monkeypatch.setattr(transfers, "upload", lambda values, device: made.append(values) or upload(values, device))
    return made


def test_a_decode_step_needs_nothing_from_the_host(uploads: list[object]) -> None:
    gpt, recorder, sampler = make_model(), FakeRecorder(), TorchSampler()
    engine = CudaGraphEngine(gpt, make_limits(), EngineConfig(graph_memory=2**30), recorder=recorder)
    handles = [engine.open(), engine.open()]
    ids = [*prompt(6), *prompt(3)]
    drawn = [engine.step(StepBatch(handles, ids, [6, 3], [1, 1]), sampler.sample_slots, [2, 0])]
    step = StepBatch(handles, [PENDING, PENDING], [1, 1], [1, 1])
    drawn.append(engine.step(step, sampler.sample_slots, [2, 0]))
    before = len(uploads)
    drawn += [engine.step(step, sampler.sample_slots, [2, 0]) for _ in range(10)]
    assert len(uploads) == before
    assert recorder.num_replays == 10
    texts = list(zip(*(d.read() for d in drawn), strict=True))  # all read at the end
    assert texts == [tuple(naive_greedy(gpt, p, 12)) for p in (prompt(6), prompt(3))]


def test_verification_of_one_sequence_uploads_its_tokens_only(uploads: list[object]) -> None:
    """5 tokens in a bucket of 8: their logits are consecutive rows, so no index is uploaded and nothing gathered."""
    gpt = make_model()
    engine = StaticShapeEngine(gpt, make_limits())
    handle = engine.open()
    engine.extend(StepBatch([handle], prompt(8)[:3], [3], [0]))
    before = len(uploads)
    logits = engine.extend(StepBatch([handle], prompt(8)[3:], [5], [5]))
    assert len(uploads) == before + 1
    torch.testing.assert_close(logits, gpt(torch.tensor([prompt(8)]))[0, 3:], atol=1e-4, rtol=1e-4)
    assert len(logits) < 8 == logits.untyped_storage().nbytes() // (4 * TINY.vocab_size)  # a view of all rows
    torch.testing.assert_close(engine.model.logits(engine._hidden), logits, atol=1e-5, rtol=1e-5)  # of 5 rows, and of 8


def test_rows_that_are_not_consecutive_are_uploaded_once(uploads: list[object]) -> None:
    gpt = make_model()
    engine = StaticShapeEngine(gpt, make_limits())
    handles = [engine.open(), engine.open()]
    logits = engine.extend(StepBatch(handles, [*prompt(5), *prompt(6, 1)], [5, 6], [5, 6]))
    expected = torch.cat([gpt(torch.tensor([p]))[0] for p in (prompt(5), prompt(6, 1))])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert len(uploads) == 2  # the inputs, and the index of logits and hidden states


def decode_kernels(config: ModelConfig, num_layers: int) -> list[str]:
    """What a graph of a decode step holds, without the sampler's kernels."""
    config = replace(config, n_layer=num_layers, layers=config.layers[:num_layers])
    gpt, recorder = Transformer(config).eval().bfloat16(), FakeRecorder()
    engine = CudaGraphEngine(gpt, make_limits(config), EngineConfig(graph_memory=2**30), recorder=recorder)
    handle = engine.open()

    def draw(logits: Tensor, *_: Tensor) -> Tensor:
        return torch.empty(len(logits), dtype=torch.int64)

    for _ in range(2):
        engine.step(StepBatch([handle], [1], [1], [1]), draw, [0])
    return recorder.kernels


@pytest.mark.parametrize("name, outside, layer", [("gpt2", 16, 12), ("llama-3.2-1b", 23, 18), ("qwen3-0.6b", 23, 20)])
def test_kernels_of_a_decode_step(name: str, outside: int, layer: int) -> None:
    assert NUM_KERNELS["cuda_graph", PRESETS[name].family] == (layer, outside + 2)  # the sampler's 2
    sizes = {"n_embd": 32, "n_inner": 64, "block_size": 64, "vocab_size": 80, "bos_token_id": 0, "eos_token_ids": ()}
    config = replace(PRESETS[name], head_size=PRESETS[name].head_dim, **sizes)
    one, two = (len(decode_kernels(config, n)) for n in (1, 2))
    assert (2 * one - two, two - one) == (outside, layer)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Every copy of a slot that is made."""
    made: list[tuple[int, int]] = []
    copy = SlotCache.copy
    monkeypatch.setattr(
        SlotCache,
        "copy",
        lambda self, source, target, n: made.append((source, target)) or copy(self, source, target, n),
    )
    return made


@pytest.mark.parametrize("first_to_last", [True, False])
def test_closing_all_sequences_copies_nothing(copies: list[tuple[int, int]], first_to_last: bool) -> None:
    engine = StaticShapeEngine(make_model(), make_limits(max_num_seqs=32))
    handles = [engine.open() for _ in range(32)]
    engine.extend(StepBatch(handles, [1] * 32, [1] * 32, [0] * 32))
    for handle in handles if first_to_last else reversed(handles):
        engine.close(handle)
    assert copies == []


@pytest.mark.parametrize("make", [StaticEngine, StaticShapeEngine])
def test_holes_are_filled_before_a_step(
    make: type[StaticEngine | StaticShapeEngine], copies: list[tuple[int, int]]
) -> None:
    """Closed: slots 0, 1 and 4 of 6. One opened sequence takes slot 0; slot 5 moves to 1; 4 is past the end."""
    gpt = make_model()
    engine = make(gpt, make_limits(max_num_seqs=6))
    handles = [engine.open() for _ in range(6)]
    ids = [prompt(3 + i, i) for i in range(6)]
    engine.extend(StepBatch(handles, [t for p in ids for t in p], [len(p) for p in ids], [0] * 6))
    for i in (0, 4, 1):
        engine.close(handles[i])
    handles, ids = [handles[2], handles[3], handles[5], engine.open()], [ids[2], ids[3], ids[5], []]
    assert copies == []
    for _ in range(2):
        for p in ids:
            p.append(7)
        logits = engine.extend(StepBatch(handles, [7] * 4, [1] * 4, [1] * 4))
        expected = torch.cat([gpt(torch.tensor([p]))[0, -1:] for p in ids])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert copies == [(5, 1)]
    assert [engine._cache.slot(h) for h in handles] == [2, 3, 1, 0]


@pytest.mark.parametrize("make", [StaticEngine, StaticShapeEngine])
@pytest.mark.parametrize("moves", [False, True], ids=["opened", "moved"])
def test_a_sequence_does_not_read_what_a_closed_one_left(
    make: type[StaticEngine | StaticShapeEngine], moves: bool
) -> None:
    """A masked NaN is a NaN: it is zeroed before its slot has another sequence."""
    gpt = make_model()
    engine = make(gpt, make_limits())
    failed, other = engine.open(), engine.open()
    engine.extend(StepBatch([failed, other], [*prompt(9), 3], [9, 1], [0, 0]))
    for cache in (*engine._cache.k.whole, *engine._cache.v.whole):
        cache[:, engine._cache.slot(failed), :, :9] = float("nan")
    engine.close(failed)
    ids = {other: [3, 4]} if moves else {other: [3, 4], engine.open(): [4]}
    logits = engine.extend(StepBatch([*ids], [4] * len(ids), [1] * len(ids), [1] * len(ids)))
    expected = torch.cat([gpt(torch.tensor([p]))[0, -1:] for p in ids.values()])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_graphs_stay_within_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    recorder = FakeRecorder(bytes_each=100)
    graphs: Graphs[Tensor] = Graphs(recorder, memory_limit=150)
    x = torch.zeros(1)
    for key in "aaabbbccc":
        graphs.run(key, lambda: x.add_(1))
    assert x.item() == 9  # each ran once, recorded or not
    assert (len(graphs), graphs.num_bytes, recorder.num_replays) == (2, 200, 4)
    assert "2 CUDA graphs hold 200 bytes, no more are captured; the limit is graph_memory=150 bytes" in caplog.text


def test_memory_that_runs_out_in_a_recording_is_said_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    gpt = make_model()
    engine = CudaGraphEngine(gpt, make_limits(), EngineConfig(graph_memory=2**30), recorder=FakeRecorder(fail_at=0))
    expected = gpt(torch.tensor([prompt(8)]))[0]
    torch.testing.assert_close(run(engine, prompt(8)), expected, atol=1e-4, rtol=1e-4)
    assert "the device is out of memory: lower kv_cache_memory or max_num_seqs" in caplog.text
    assert len(engine.graphs) == 0


def test_an_error_that_is_not_about_memory_is_raised() -> None:
    class Broken(FakeRecorder):
        def record(self, compute: object) -> object:  # type: ignore[override]
            raise RuntimeError("broken")

    graphs: Graphs[None] = Graphs(Broken(), 1)  # type: ignore[arg-type]
    graphs.run("a", lambda: None)
    with pytest.raises(RuntimeError, match="broken"):
        graphs.run("a", lambda: None)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fail_at", [None, 0])
def test_no_garbage_is_collected_while_a_recording_is_open(enabled: bool, fail_at: int | None) -> None:
    class Full(FakeRecorder):
        def record(self, compute: Callable[[], object]) -> object:  # type: ignore[override]
            compute()
            return super().record(compute)

    graphs: Graphs[None] = Graphs(Full(fail_at=fail_at), 1)  # type: ignore[arg-type]
    found: list[bool] = []
    (gc.enable if enabled else gc.disable)()
    try:
        for _ in range(2):  # the second is recorded
            graphs.run("a", lambda: found.append(gc.isenabled()))
        assert found[:2] == [enabled, False]
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "words", ["CUDA error: out of memory\nmore", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"]
)
def test_memory_that_runs_out_elsewhere_than_for_a_tensor_is_known_by_its_words(words: str) -> None:
    class Full(FakeRecorder):
        def record(self, compute: object) -> object:  # type: ignore[override]
            raise RuntimeError(words)

    graphs: Graphs[int] = Graphs(Full(), 1)  # type: ignore[arg-type]
    assert [graphs.run("a", lambda: 7) for _ in range(3)] == [7, 7, 7]
    assert len(graphs) == 0


def test_a_step_that_is_interrupted_leaves_no_position_behind() -> None:
    """The device has moved on, and the host did not get to note it: the same step is another one now."""

    class Interrupted(StaticShapeEngine):
        def _execute(self, key: tuple[Bucket, bool], compute: Callable[[], StepOutput]) -> StepOutput:
            super()._execute(key, compute)
            raise KeyboardInterrupt

    gpt = make_model()
    engine, expected = StaticShapeEngine(gpt, make_limits()), gpt(torch.tensor([prompt(4)]))[0]
    handle = engine.open()
    engine.extend(StepBatch([handle], prompt(4)[:3], [3], [0]))
    step = StepBatch([handle], prompt(4)[3:], [1], [1])
    engine.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.extend(step)
    engine.__class__ = StaticShapeEngine
    torch.testing.assert_close(engine.extend(step), expected[3:], atol=1e-4, rtol=1e-4)


def test_blocks_are_compiled_once_for_each_shape_and_never_for_a_length() -> None:
    """Two layers, prompts of many lengths, batches that share a bucket: each shape of a decode step compiles once."""
    gpt, counter = make_model(), CompileCounter()
    engine = CompiledEngine(gpt, make_limits(max_num_seqs=4), backend=counter)
    counts = []
    for batch in ([5], [9], [2, 30], [1, 3, 7], [4, 4, 4, 4]):
        handles = [engine.open() for _ in batch]
        engine.extend(StepBatch(handles, [t for n in batch for t in prompt(n)], batch, [0] * len(batch)))
        for _ in range(2):
            engine.extend(StepBatch(handles, [1] * len(batch), [1] * len(batch), [1] * len(batch)))
        for handle in handles:
            engine.close(handle)
        counts.append(counter.frame_count)
    assert counts == [1, 1, 2, 3, 3]


class TracedEngine(CompiledEngine):
    """Blocks are not compiled: torch.compile refuses the mode of torch in which the recorder sees operations."""

    def __init__(self, gpt: Transformer, recorder: FakeRecorder | None) -> None:
        super().__init__(gpt, make_limits(), EngineConfig(graph_memory=2**30), recorder=recorder)
        self.compiled: list[bool] = []
        """For each block that is compiled, whether that is in a recording."""
        self.num_calls = 0

    def _compile(self) -> Callable[..., Tensor]:
        self.compiled.append(bool(_get_current_dispatch_mode_stack()))

        def call(*arguments: Any) -> Tensor:
            self.num_calls += 1
            return run_block(*arguments)

        return call


def test_a_compiled_step_is_captured_where_graphs_are() -> None:
    gpt, recorder = make_model(), FakeRecorder()
    engine, expected = TracedEngine(gpt, recorder), gpt(torch.tensor([prompt(20)]))[0]
    for _ in range(2):
        torch.testing.assert_close(run(engine, prompt(20)), expected, atol=1e-4, rtol=1e-4)
    assert engine.compiled == [False]  # once, before the recording
    assert engine.num_calls == 2 * TINY.n_layer  # the first step and the recording
    assert (recorder.num_recordings, recorder.num_replays, len(engine.graphs)) == (1, 39, 1)


def test_a_compiled_step_is_not_captured_on_a_cpu() -> None:
    engine = TracedEngine(make_model(), None)
    run(engine, prompt(5))
    assert (engine.num_calls, len(engine.graphs)) == (5 * TINY.n_layer, 0)


def test_captured_compiled_steps_draw_greedy_tokens_and_upload_nothing(uploads: list[object]) -> None:
    gpt, recorder, sampler = make_model(), FakeRecorder(), TorchSampler()
    engine = TracedEngine(gpt, recorder)
    handles = [engine.open(), engine.open()]
    drawn = [engine.step(StepBatch(handles, [*prompt(6), *prompt(3)], [6, 3], [1, 1]), sampler.sample_slots, [2, 0])]
    step = StepBatch(handles, [PENDING, PENDING], [1, 1], [1, 1])
    drawn += [engine.step(step, sampler.sample_slots, [2, 0]) for _ in range(2)]
    before = len(uploads)
    drawn += [engine.step(step, sampler.sample_slots, [2, 0]) for _ in range(9)]
    assert (len(uploads) - before, recorder.num_replays) == (0, 10)
    texts = list(zip(*(d.read() for d in drawn), strict=True))
    assert texts == [tuple(naive_greedy(gpt, p, 12)) for p in (prompt(6), prompt(3))]


@pytest.mark.slow
def test_compiled_blocks_say_what_the_model_says() -> None:
    """With the real compiler: it needs a C++ compiler, as the tests of the native engine do."""
    gpt = make_model()
    engine = CompiledEngine(gpt, make_limits())
    torch.testing.assert_close(run(engine, prompt(6)), gpt(torch.tensor([prompt(6)]))[0], atol=1e-4, rtol=1e-4)


def test_memory_that_does_not_suffice_is_one_line() -> None:
    with pytest.raises(NanoinferError, match="keys and values of 64 sequences need 18,014,398,509,744,128 bytes") as e:
        StaticShapeEngine(Transformer(TINY), EngineLimits(64, 2**40, 2**46))
    assert "\n" not in str(e.value)


def test_a_compiler_that_fails_is_one_line() -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no compiler\nat all")

    engine = CompiledEngine(make_model(), make_limits(), backend=broken)
    with pytest.raises(NanoinferError, match=r"cannot run: torch.compile failed") as e:
        run(engine, prompt(2))
    assert "\n" not in str(e.value)


@pytest.mark.gpu
@needs_cuda
def test_no_step_waits_for_the_device() -> None:
    gpt = make_model().to("cuda")
    engine, sampler = CudaGraphEngine(gpt, make_limits()), TorchSampler()
    for name in ("temperature", "position", "uniforms"):
        setattr(sampler, name, getattr(sampler, name).cuda())
    handle = engine.open()
    drawn = [engine.step(StepBatch([handle], prompt(6), [6], [1]), sampler.sample_slots, [0])]
    step = StepBatch([handle], [PENDING], [1], [1])
    drawn += [engine.step(step, sampler.sample_slots, [0]) for _ in range(3)]  # the third is the first replay
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn += [engine.step(step, sampler.sample_slots, [0]) for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [d.read()[0] for d in drawn] == naive_greedy(gpt, prompt(6), 12)
    assert len(engine.graphs) == 1


@pytest.mark.gpu
@needs_cuda
def test_a_real_graph_replays_at_any_position() -> None:
    gpt = make_model().to("cuda")
    engine = CudaGraphEngine(gpt, make_limits())
    expected = gpt(torch.tensor([prompt(20)], device="cuda"))[0]
    for _ in range(2):
        torch.testing.assert_close(run(engine, prompt(20)), expected, atol=1e-4, rtol=1e-4)
    assert len(engine.graphs) == 1


@pytest.mark.gpu
@needs_cuda
def test_a_real_graph_has_compiled_blocks() -> None:
    gpt = make_model().to("cuda")
    engine, expected = CompiledEngine(gpt, make_limits()), gpt(torch.tensor([prompt(20)], device="cuda"))[0]
    for _ in range(2):
        torch.testing.assert_close(run(engine, prompt(20)), expected, atol=1e-4, rtol=1e-4)
    assert (len(engine.graphs), len(engine._compiled)) == (1, 1)


@pytest.mark.gpu
@needs_cuda
def test_others_can_record_after_an_engine_has() -> None:
    """Engines record in inference mode, others outside of it; the generator's tensors are everyone's."""
    x = torch.zeros(1, device="cuda")
    graphs: Graphs[Tensor] = Graphs(CudaRecorder(x.device), 2**30)
    with torch.inference_mode():
        for _ in range(3):
            graphs.run("a", lambda: x.add_(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    assert x.item() == 4
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("engine", ["static", "compiled", "cuda_graph", "triton"])
def test_a_device_that_is_not_the_current_one(tiny_folder: Path, engine: str) -> None:
    expected = LLM(str(tiny_folder), engine="recompute", device="cpu").generate("abc", SamplingParams(temperature=0))
    for device in ("cuda:0", "cuda:1"):
        llm = LLM(str(tiny_folder), engine=engine, device=device, dtype="float32")
        for _ in range(2):
            made = llm.generate("abc", SamplingParams(temperature=0))
            assert made[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
