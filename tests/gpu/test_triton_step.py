"""A whole step of engine `triton`: its first kernel, all nodes that a graph of it has, and its tokens."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime import interpreter

from helpers.engines import GREEDY, generate, naive_greedy, prompt
from helpers.environment import ROOT
from helpers.models import TINY, make_limits, make_model
from helpers.overlap import make_core as make_torch_core
from helpers.recorded import FakeRecorder
from helpers.samplers import make_row
from nanoinfer.config import EngineConfig, LayerKind, ModelConfig, Rotary
from nanoinfer.core.core import Core
from nanoinfer.core.overlap import OverlapScheduler
from nanoinfer.engines.base import PENDING, StepBatch
from nanoinfer.engines.static_shapes import StepOutput
from nanoinfer.engines.transfers import StepInputs
from nanoinfer.engines.triton_engine import TritonEngine
from nanoinfer.kernels.triton import products
from nanoinfer.kernels.triton.step import begin
from nanoinfer.sampling.triton import TritonSampler
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler

NUM_KERNELS = runpy.run_path(str(ROOT / "benchmarks" / "gpu_steps.py"))["NUM_KERNELS"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
interpreted = pytest.mark.skipif(not products.INTERPRETED, reason="nodes are counted in Triton's interpreter")
SMALL = replace(TINY, n_layer=2)
LLAMA = replace(
    SMALL, family="llama", bias=False, activation="silu", norm="rms", gated_mlp=True, learned_positions=False,
    num_kv_heads=1, layers=(LayerKind(rotary=Rotary(8)),) * 2,
)  # fmt: skip
L = SMALL.n_layer
ALLOCATIONS = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}
MAY_COPY = {torch.ops.aten.to.dtype, torch.ops.aten.contiguous.default, torch.ops.aten.reshape.default}
"""Operations that are views by their schema."""
SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "min_tokens": 4},
]
"""One launch plan serves all of them: parameters are read on the device."""


# The first kernel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_kernel_prepares_rows_and_advances_them(n: int, device: str) -> None:
    if (device == "cpu") != products.INTERPRETED:
        pytest.skip("kernels run on the other device")
    generator = torch.Generator().manual_seed(n)
    wte, wpe = torch.randn(11, 20, generator=generator), torch.randn(9, 20, generator=generator)
    inputs, last = StepInputs(3, n, torch.device(device)), torch.tensor([7, 8, 9, 10], device=device)
    given = [[*[i % 7 for i in range(n - 1)], PENDING], [PENDING] * n, [0] * n]
    start, count, slots = [2, 5, 0], [n, min(n, 3), 0], [3, 1, 2]
    inputs.put([[*g, 0, 0, s, c, slot, 0, 0] for g, s, c, slot in zip(given, start, count, slots, strict=True)])
    pos, x = torch.empty(3, n, dtype=torch.int64, device=device), torch.empty(3 * n, 20, device=device)
    begin(
        inputs.given, inputs.start, inputs.count, inputs.slots, last, wte.to(device), wpe.to(device), 9, pos, x
    )  # fmt: skip
    places = [[s + i if i < c else 9 for i in range(n)] for s, c in zip(start, count, strict=True)]
    tokens = [[last[slot].item() if t < 0 else t for t in g] for g, slot in zip(given, slots, strict=True)]
    assert pos.tolist() == places
    assert torch.equal(x.cpu(), (wte[torch.tensor(tokens)] + wpe[torch.tensor(places).clamp(max=8)]).flatten(0, 1))
    assert inputs.start.tolist() == [s + c for s, c in zip(start, count, strict=True)]
    assert inputs.given.tolist() == given


def test_the_first_kernel_refuses_what_it_would_read_past() -> None:
    inputs, x, pos = StepInputs(2, 1, torch.device("cpu")), torch.empty(2, 4), torch.empty(2, 1, dtype=torch.int64)
    table, last = torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)

    def call(start: Tensor = inputs.start, x: Tensor = x, pos: Tensor = pos) -> None:
        begin(inputs.given, start, inputs.count, inputs.slots, last, table, table, 8, pos, x)

    for wrong, words in (
        ({"start": inputs.start.clone()}, "start of shape"),
        ({"x": x[:1]}, "x of"),
        ({"pos": pos[:1]}, "pos of shape"),
        ({"x": x.T.contiguous().T}, "x is not contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**wrong)


# Nodes ----------------------------------------------------------------------------------------------------


class Nodes(TorchDispatchMode):
    """Names what a graph of the code inside `with` holds: operations of torch that compute or copy."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = func in MAY_COPY and out.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
        if copies or (not func.is_view and func not in ALLOCATIONS):
            self._names.append(str(func))
        return out


@contextmanager
def counted(engine: TritonEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the nodes of each captured function: launches of Triton kernels, and operations of torch."""
    names: list[str] = []
    launch, execute = interpreter.GridExecutor.__call__, engine._execute

    def launched(self: interpreter.GridExecutor, *args: object, **kwargs: object) -> object:
        names.append(self.fn.__name__)
        with _disable_current_modes():  # the interpreter's own copies
            return launch(self, *args, **kwargs)

    def executed(key: Any, compute: Callable[[], StepOutput]) -> StepOutput:
        with Nodes(names):
            return execute(key, compute)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(engine, "_execute", executed)
        yield names


def make_engine(
    quantization: str | None = None, max_num_seqs: int = 4, model: ModelConfig = SMALL
) -> TritonEngine:  # fmt: skip
    """An engine without graphs: the interpreter's operations cannot be recorded."""
    none, config = FakeRecorder(fail_at=0), EngineConfig(graph_memory=2**30, quantization=quantization)
    return TritonEngine(make_model(model), make_limits(model, max_num_seqs), config, recorder=none)


def sampler_for(engine: TritonEngine, rows: int, params: SamplingParams) -> TritonSampler:
    sampler = TritonSampler(rows, SMALL.vocab_size, engine.device)
    for slot in range(rows):
        sampler.assign(slot, make_row(params, [1], seed=slot))
    return sampler


ROW = ["product_kernel", "attention_kernel", "product_kernel", "product_kernel", "product_kernel"] * L
ROWS = [
    "norm_kernel", "product_rows_kernel", "attention_kernel", "product_rows_kernel",
    "norm_kernel", "product_rows_kernel", "product_rows_kernel",
] * L  # fmt: skip


@interpreted
@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_a_decode_step_has_5_nodes_a_layer_and_4_sampling_included(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    sampler, handle = sampler_for(engine, 1, SamplingParams(**params)), engine.open()
    engine.step(StepBatch([handle], prompt(6), [6], [1]), sampler.sample_slots, [0])
    with counted(engine, monkeypatch) as nodes:
        engine.step(StepBatch([handle], [PENDING], [1], [1]), sampler.sample_slots, [0])
    assert nodes == ["begin_kernel", *ROW, "product_kernel", "weigh", "sample"]
    assert len(nodes) == 5 * L + 4
    assert NUM_KERNELS["triton", "gpt2"] == (5, 4)


@interpreted
@pytest.mark.parametrize(
    "new, quantization, num_products",
    [(16, None, 4 * L + 1), (17, None, 0), (17, "int4", 4 * L)],  # the logits of up to 16 tokens are computed, too
)
@pytest.mark.slow_if(lambda new: new == 16)
def test_steps_of_more_tokens_than_pay_run_on_pytorch_unless_weights_are_quantized(
    new: int, quantization: str | None, num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(quantization)
    with counted(engine, monkeypatch) as nodes:
        engine.extend(StepBatch([engine.open()], prompt(new), [new], [0]))
    assert nodes.count("product_rows_kernel") == num_products


@interpreted
@pytest.mark.parametrize("new", [1, 4], ids=["decode", "verify"])
def test_a_step_that_returns_logits_has_3_around_its_layers(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are among its results, so the final norm is a launch of its own."""
    engine = make_engine()
    with counted(engine, monkeypatch) as nodes:
        engine.extend(StepBatch([engine.open()], prompt(new), [new], [new]))
    layers, head = (ROW, "product_kernel") if new == 1 else (ROWS, "product_rows_kernel")
    assert nodes == ["begin_kernel", *layers, "norm_kernel", head]


@interpreted
def test_the_count_sees_an_operation_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with counted(engine, monkeypatch) as nodes:
        engine._execute(None, lambda: engine._last.add_(1).view(-1, 1)[:1].clone())  # type: ignore[arg-type, return-value]
    assert nodes == ["aten.add_.Tensor", "aten.clone.default"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_replay_on_a_gpu_runs_as_many_kernels() -> None:
    engine = TritonEngine(make_model(SMALL).cuda(), make_limits(SMALL), EngineConfig(graph_memory=2**30))
    sampler, handle = sampler_for(engine, 1, SamplingParams()), engine.open()
    engine.step(StepBatch([handle], prompt(6), [6], [1]), sampler.sample_slots, [0])
    decode = StepBatch([handle], [PENDING], [1], [1])
    for _ in range(3):  # the second is recorded
        engine.step(decode, sampler.sample_slots, [0]).read()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.step(decode, sampler.sample_slots, [0]).read()
        torch.cuda.synchronize()
    events = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not events:
        pytest.skip("the profiler sees no kernels on this machine")
    nodes = [name for name in events if "DtoH" not in name]  # the copy of the token to the host follows the graph
    assert len(nodes) == 5 * L + 4, nodes


# Tokens ---------------------------------------------------------------------------------------------------


def never(*_: object) -> Any:
    raise AssertionError("a token was sampled outside the step")


def make_core(engine: TritonEngine) -> Core:
    sampler = TritonSampler(4, SMALL.vocab_size, engine.device)
    return Core(engine, Scheduler(engine), never, None, SMALL.vocab_size, overlap=OverlapScheduler(engine, sampler))


@interpreted
@pytest.mark.slow
def test_greedy_tokens_of_steps_that_sample_on_the_device_equal_the_naive_loop() -> None:
    prompts = [prompt(n, i) for i, n in enumerate((3, 7, 20))]
    params = [replace(GREEDY, max_tokens=n) for n in (9, 4, 6)]
    expected = [[naive_greedy(make_model(SMALL), p, q.max_tokens)] for p, q in zip(prompts, params, strict=True)]
    core = make_core(make_engine())
    assert generate(core, prompts, params) == expected
    assert generate(core, prompts[:1], params[:1]) == expected[:1]  # one row: the head normalises it


@interpreted
@pytest.mark.slow
def test_sampled_tokens_equal_those_of_the_reference_for_the_same_seeds() -> None:
    prompts = [prompt(n, i) for i, n in enumerate((3, 7, 5, 9))]
    params = [SamplingParams(max_tokens=8, **p) for p in SAMPLED]
    expected = generate(make_torch_core(make_model(SMALL), recorded=False, overlap=False), prompts, params)
    assert generate(make_core(make_engine()), prompts, params) == expected
