"""Estimates of decode steps on a GPU: their terms, and what a measurement says about them."""

from __future__ import annotations

import sys

import pytest

from helpers.environment import ROOT

pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_steps
from gpu_steps import estimate

from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.ceilings import DEVICES
from nanoinfer.roofline.formats import FORMATS

BFLOAT16, H200 = FORMATS["bfloat16"], DEVICES["h200"]


@pytest.mark.parametrize(
    "engine, batch, num_kernels, usec",
    [
        ("triton", 1, 5 * 12 + 4, 248.9 / 4.8 + 2.0 * 64),  # 248.9 MB of weights, and one token's keys and values
        ("triton", 64, 7 * 12 + 5, 248.9 / 4.8 + 2.0 * 89),
        ("cuda_graph", 1, 12 * 12 + 18, 248.9 / 4.8 + 2.5 * 162),
    ],
)
def test_the_terms_of_gpt2(engine: str, batch: int, num_kernels: int, usec: float) -> None:
    found = estimate(engine, PRESETS["gpt2"], BFLOAT16, H200, batch, 1)
    assert found is not None
    assert found.num_kernels == num_kernels
    assert found.seconds * 1e6 == pytest.approx(usec, rel=0.01)
    assert found.seconds_per_kernel(found.seconds) == pytest.approx(gpu_steps.KERNEL_SEC[engine])
    assert found.seconds_per_kernel(found.bytes_sec) == 0


@pytest.mark.parametrize(
    "engine, model, batch", [("triton", "gpt2", 257), ("static", "gpt2", 1), ("cuda_graph", "gemma3-270m", 1)]
)
def test_what_is_not_counted_has_no_estimate(engine: str, model: str, batch: int) -> None:
    assert estimate(engine, PRESETS[model], BFLOAT16, H200, batch, 1) is None
