"""The step in one launch: the same body phase by phase with many programs, and at once, against the fused engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from conftest import TINY, make_limits, make_model
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.triton_engine import TritonEngine, stack_of
from nanoinfer.kernels.triton import products
from nanoinfer.kernels.triton.persistent import Cache, decode_step
from recorded import FakeRecorder
from test_triton_engine import count_launches

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
CONFIG = replace(TINY, n_layer=2)
interpreted = pytest.mark.skipif(not products.INTERPRETED, reason="kernels run on the CUDA device here")


def compare(quantization: str | None, bias: bool, programs: int, at_once: bool, device: str) -> None:
    """Decode a second token: hidden state and stored keys are those of the fused engine's step."""
    config = replace(CONFIG, bias=bias)
    recorder = FakeRecorder(fail_at=0)
    engine = TritonEngine(
        make_model(config).to(device), make_limits(config), quantization=quantization, graph_memory=2, recorder=recorder
    )
    engine.open()
    handle = engine.open()
    engine.extend(StepBatch([handle], [5, 9, 2], [3], [1]))
    keys, values = engine._cache.k.clone(), engine._cache.v.clone()
    engine.extend(StepBatch([handle], [7], [1], [1]))
    slot = torch.tensor([engine._cache.slot(handle)], device=device)
    cache = Cache(keys, values, slot, torch.tensor([[3]], device=device))
    hidden = decode_step(stack_of(engine), cache, torch.tensor([7], device=device), 32, programs, at_once)
    torch.testing.assert_close(hidden, engine.hidden(), rtol=0, atol=1e-4)
    torch.testing.assert_close(keys, engine._cache.k, rtol=0, atol=1e-4)
    torch.testing.assert_close(values, engine._cache.v, rtol=0, atol=1e-4)


@interpreted
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no-biases"])
@pytest.mark.slow_if(lambda bias: not bias)
def test_phase_by_phase_with_three_programs(quantization: str | None, bias: bool) -> None:
    compare(quantization, bias, programs=3, at_once=False, device="cpu")


@interpreted
def test_at_once_with_one_program() -> None:
    compare(None, bias=True, programs=1, at_once=True, device="cpu")


@interpreted
def test_an_engine_decodes_single_tokens_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the head's; steps of several tokens stay as they are."""
    limits = make_limits(CONFIG)
    fused, whole = (
        TritonEngine(
            make_model(CONFIG), limits, persistent=persistent, graph_memory=2, recorder=FakeRecorder(fail_at=0)
        )
        for persistent in (False, True)
    )
    for ids in ([5, 9, 2], [7], [1], [4, 4]):
        results = []
        for engine in (fused, whole):
            handle = engine.open() if len(ids) == 3 else Handle(0)
            counted = count_launches(monkeypatch)
            results.append(engine.extend(StepBatch([handle], ids, [len(ids)], [1])).clone())
            said = engine.launches(1, 1 << (len(ids) - 1).bit_length(), 32)
            assert len(counted) == said.total, (ids, counted)
            monkeypatch.undo()
        torch.testing.assert_close(*results, rtol=0, atol=1e-4)
    assert whole.launches(1, 1, 32).total == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_at_once_with_all_multiprocessors(quantization: str | None) -> None:
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    for _ in range(20):
        compare(quantization, bias=True, programs=programs, at_once=True, device="cuda")
