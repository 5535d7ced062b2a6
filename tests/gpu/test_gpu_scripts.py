"""The bodies of benchmarks/triton_kernels.py and triton_sampler.py, interpreted, with a stand-in for CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.environment import INTERPRETED, ROOT
from helpers.models import TINY
from helpers.recorded import FakeRecorder

pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(ROOT / "benchmarks"))  # as when they are run as scripts

import triton_kernels
import triton_sampler

from nanoinfer.roofline.ceilings import DEVICES

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.skipif(not INTERPRETED, reason="kernels run on the CUDA device here"),
]
SMALL = replace(TINY, n_layer=1, n_embd=64)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device on the CPU: graphs replay by calling again, and each call takes 2 ms."""

    def captured(call: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        result = call()
        return lambda: result.copy_(call()) if isinstance(result, torch.Tensor) else call(), result

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 2.0)
    for module in (triton_kernels, triton_sampler):
        monkeypatch.setattr(module, "captured", captured)
    monkeypatch.setattr(triton_kernels, "CACHE_BYTES", 0)
    monkeypatch.setattr(triton_kernels, "ROUNDS", 1)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr("nanoinfer.engines.cuda_graph.CudaRecorder", lambda device: FakeRecorder(fail_at=0))
    monkeypatch.setattr("nanoinfer.profiling.checks.ROUNDS", 1)
    monkeypatch.setattr("nanoinfer.profiling.checks.WARM_UPS", 0)
    monkeypatch.setattr(triton_kernels, "ceiling", lambda device: DEVICES["h200"])
    triton_kernels.expected_logits.cache_clear()
    yield
    triton_kernels.expected_logits.cache_clear()


@pytest.mark.parametrize("engine, quantization", triton_kernels.STEPS)
@pytest.mark.nightly_if(lambda quantization: quantization is not None)
@pytest.mark.slow_if(lambda engine: engine == "triton")
def test_a_step_is_checked_and_timed(engine: str, quantization: str | None) -> None:
    row = triton_kernels.step_row(SMALL, engine, quantization, "cpu", 1)
    assert set(row) == {"predicted_usec", "bytes_usec", "usec", "usec_per_kernel", "gb_per_sec", "verify_ratio"}
    assert all(value > 0 for value in row.values())


def test_a_wrong_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(triton_kernels.STEP_TOLERANCE, None, 1e-4)
    monkeypatch.setattr(triton_kernels, "step_microseconds", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(ValueError, match=r"relative error 0\.\d+ exceeds 0.0001: not timed"):
        triton_kernels.step_row(SMALL, "cuda_graph", None, "cpu", 2)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", triton_kernels.KINDS)
@pytest.mark.nightly_if(lambda kind, rows: (rows == 1) != (kind == triton_kernels.KINDS[0]))
@pytest.mark.slow_if(lambda rows: rows > 1)
def test_products_of_a_step_are_checked_and_timed(kind: str, rows: int) -> None:
    row = triton_kernels.product_row(kind, "bfloat16" if rows == 1 else "int4", SMALL, rows, "cpu")
    assert row["usec"] == row["torch_usec"] == 1000.0  # two turns in 2 ms
    n, k = {"qkv": (192, 64), "attn_proj": (64, 64), "mlp_fc": (256, 64), "mlp_proj": (64, 256), "head": (60, 64)}[kind]
    assert row["torch_gb_per_sec"] == pytest.approx(2 * n * k / 1e6, rel=0.05)


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels.products, "product", lambda *_: None)
    with pytest.raises(ValueError, match="not timed"):
        triton_kernels.product_row("qkv", "int8", SMALL, 1, "cpu")


@pytest.mark.parametrize("rows, new", [(1, 1), (1, 5), (3, 1)])
@pytest.mark.slow_if(lambda new: new > 1)
def test_attention_is_checked_and_timed(rows: int, new: int) -> None:
    row = triton_kernels.attention_row(SMALL, rows, new, "cpu", 40)
    assert row["gb_per_sec"] == pytest.approx(2 * rows * 40 * 64 * 2 / 1e6)


@pytest.mark.parametrize("name", ["greedy", "all controls"])
@pytest.mark.nightly_if(lambda name: name != "greedy")
def test_samplers_are_compared_and_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "V", 300)
    calls: list[Any] = []
    reference = triton_sampler.sampler.sample
    monkeypatch.setattr(triton_sampler.sampler, "sample", lambda *given: calls.append(given) or reference(*given))
    row = triton_sampler.sampler_row(name, 2, 20, "cpu")
    assert len(calls) == 1 + 3  # compared, then timed
    assert row == {"num_different": 0, "fused_usec": 2000.0, "call_usec": 2000.0, "reference_usec": 2000.0}
    if name == "greedy":
        others = [SimpleNamespace(token_id=-5)] * 2
        monkeypatch.setattr(triton_sampler.sampler, "sample", lambda *_: others)
        with pytest.raises(ValueError, match="2 of 2 tokens are not the reference's: not timed"):
            triton_sampler.sampler_row(name, 2, 1, "cpu")
