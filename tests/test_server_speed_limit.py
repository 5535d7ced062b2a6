"""The roofline's limit in /info: its value, and when the machine is measured."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nanoinfer import LLM
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline import measure
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.server import speed_limit


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("shakespeare", engine="native", threads=1)


@pytest.mark.parametrize("quantization, bytes_per_weight", [(None, 4), ("int8", 1)])
def test_the_limit_is_the_time_to_read_the_weights(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, bytes_per_weight: int
) -> None:
    monkeypatch.setattr(speed_limit, "_this_cpu", lambda: Ceiling("cpu", 20e9, {"float32": 1e12, "int8": 1e12}, ""))
    llm = LLM("shakespeare", engine="native", threads=1, quantization=quantization)
    config = llm.config
    num_weights = 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd
    num_cached = 2 * config.n_layer * config.n_embd * config.block_size // 2
    seconds = bytes_per_weight * (num_weights + num_cached) / 20e9
    assert speed_limit.tokens_per_sec(llm) == pytest.approx(1 / seconds, rel=0.05)  # biases, norms and scales are left


@pytest.mark.parametrize("flops", [{}, {"bfloat16": 1e12}])
def test_the_limit_of_a_format_without_a_peak_is_not_known(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, flops: dict[str, float]
) -> None:
    monkeypatch.setattr(speed_limit, "_this_cpu", lambda: Ceiling("cpu", 20e9, flops, ""))
    assert speed_limit.tokens_per_sec(llm) is None


def test_the_limit_of_a_machine_that_cannot_be_measured_is_not_known(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Ceiling:
        raise NanoinferError("out of memory")

    speed_limit._this_cpu.cache_clear()
    monkeypatch.setattr(measure, "measure", fail)
    assert speed_limit.tokens_per_sec(llm) is None


def test_the_published_peaks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for name, key in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA T400", None),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = speed_limit._published("cuda:0")
        assert (found and found.name) == key


def test_nothing_is_measured_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(speed_limit, "tokens_per_sec", lambda llm: calls.append(llm) or 123.0)
    served = SimpleNamespace(llm="the model", num_unfinished_requests=1)

    async def run() -> list[float | None]:
        limit = speed_limit.SpeedLimit(cast(Any, served))
        found = [limit.get()]
        await asyncio.sleep(0.05)
        found.append(limit.get())
        served.num_unfinished_requests = 0
        found.append(limit.get())
        await asyncio.sleep(0.2)
        return [*found, limit.get(), limit.get()]

    assert asyncio.run(run()) == [None, None, None, 123.0, 123.0]
    assert calls == ["the model"]
