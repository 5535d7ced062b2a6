"""The engine of fused kernels, on the CPU under Triton's interpreter: its logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from helpers.models import TINY, make_limits, make_model
from helpers.recorded import FakeRecorder
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.recompute import RecomputeEngine
from nanoinfer.engines.triton_engine import TritonEngine
from nanoinfer.kernels.triton import products
from nanoinfer.kernels.triton.quantize import dequantize
from nanoinfer.kernels.triton.tiles import attention_splits, product_tile
from nanoinfer.models.transformer import Transformer

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.skipif(not products.INTERPRETED, reason="on a CUDA device tests/engines/test_engines.py covers it"),
]
SMALL = replace(TINY, n_layer=2)
EXACT = {"rtol": 0, "atol": 2e-4}


def make_engine(gpt: Transformer, limits: EngineLimits, quantization: str | None = None) -> TritonEngine:
    """An engine without graphs: what Triton's interpreter does is not among the operations that can be recorded."""
    none = FakeRecorder(fail_at=0)
    return TritonEngine(gpt, limits, EngineConfig(quantization=quantization, graph_memory=2**30), recorder=none)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY.vocab_size, (count,), generator=generator).tolist()


def run(engine: TritonEngine | RecomputeEngine, prompts: list[int]) -> list[torch.Tensor]:
    """A life of several sequences: prompts alone, decode together, verify, truncate, fork, close, decode."""
    handles = [engine.open() for _ in prompts]
    found = []
    for i, (handle, length) in enumerate(zip(handles, prompts, strict=True)):
        found.append(engine.extend(StepBatch([handle], ids(length, i), [length], [1])).clone())
    together = StepBatch()
    for i, handle in enumerate(handles):
        together.add(handle, ids(1, 10 + i))
    found.append(engine.extend(together).clone())
    found.append(engine.extend(StepBatch([handles[0]], ids(4, 20), [4], [4])).clone())
    engine.truncate(handles[0], engine.length(handles[0]) - 2)
    child = engine.fork(handles[-1])
    engine.close(handles[-1])
    found.append(engine.extend(StepBatch([child, handles[0]], ids(3, 30), [1, 2], [1, 1])).clone())
    found.append(engine.hidden().clone())
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no-biases"])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.slow_if(lambda activation, bias: (activation, bias) != ("gelu_new", True))
def test_fused_logits_are_those_of_the_naive_loop(bias: bool, activation: str) -> None:
    config = replace(SMALL, bias=bias, activation=activation)
    limits = make_limits(config)
    expected = run(RecomputeEngine(make_model(config), limits), [3, 20, 1])
    same(run(make_engine(make_model(config), limits), [3, 20, 1]), expected, **EXACT)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.slow
def test_quantized_logits_are_those_of_a_model_with_the_values(quantization: str) -> None:
    """Prompts of 20 tokens take blocks of 32 rows, those of 3 blocks of 16."""
    limits = make_limits(SMALL)
    engine = make_engine(make_model(SMALL), limits, quantization)
    reference = make_model(SMALL)
    with_values(reference, engine)
    same(run(engine, [3, 20]), run(RecomputeEngine(reference, limits), [3, 20]), **EXACT)
    assert all(block.attn.c_attn.weight.numel() == 0 for block in engine.model.blocks)  # nothing is kept twice


def with_values(gpt: Transformer, engine: TritonEngine) -> None:
    """Put the values that an engine's weights stand for into a model."""
    for layer, block in zip(engine._layers, gpt.blocks, strict=True):
        for name, weight in layer.weights.items():
            block.get_submodule(name).weight.data = dequantize(weight)
    gpt.lm_head.weight = torch.nn.Parameter(dequantize(engine._head_weight), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.slow
@pytest.mark.nightly_if(lambda dtype: dtype == torch.float16)
def test_reduced_precision_stays_close(dtype: torch.dtype, quantization: str | None) -> None:
    limits = make_limits(SMALL)
    expected = run(RecomputeEngine(make_model(SMALL), limits), [3, 20])
    found = run(make_engine(make_model(SMALL).to(dtype), limits, quantization), [3, 20])
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() / b.norm() < 0.1


def test_at_gpt2s_shapes_a_long_context_is_split_at_batch_1_and_products_are_not() -> None:
    assert attention_splits(12, 32, 16, 132) == 1
    assert attention_splits(12, 1024, 16, 132) == 4  # a sixth launch merges the parts
    for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072)):
        assert product_tile(n, k, 1, 16, 132).num_splits == 1
