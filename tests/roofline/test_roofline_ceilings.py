"""Ceilings of devices: the published ones, and those that are measured, with stand-in clocks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest

from helpers.models import TINY, refuses
from nanoinfer.roofline import ceilings as measuring
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.ceilings import DEVICES, Ceiling, Workload, find_device, measure
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.roofline.report import predict
from nanoinfer.utils import environment
from nanoinfer.utils.environment import num_cpus

FP32 = FORMATS["float32"]


def test_every_device_has_a_source_and_knows_its_dtypes() -> None:
    for name, ceiling in DEVICES.items():
        assert find_device(name.upper()) is ceiling
        assert "NVIDIA" in ceiling.source
        assert ceiling.resolve_format("auto").name == ceiling.default_dtype
    t4 = DEVICES["t4"]
    assert (t4.bandwidth_bytes_per_sec, t4.flops_per_sec["float16"]) == (300e9, 65e12)
    refuses(lambda: t4.resolve_format("bfloat16"), "dtype='bfloat16'", "t4", "float16")
    assert t4.compute_dtype(FORMATS["int4"]) == "float16"
    assert find_device("RTX 4090") is DEVICES["rtx4090"]
    for bad in ("t5", "", None, 3):
        refuses(lambda bad=bad: find_device(bad), f"device={bad!r}", "h100")  # type: ignore[misc]


# Measuring -------------------------------------------------------------------------------------------------


def test_measure_takes_the_best_round_of_a_clock() -> None:
    intervals = [4.0, 2.0, 3.0, 0.5, 0.25, 1.0]  # reading, NumPy's float32 product
    # float32, bfloat16, int8: the loops on registers in 3 long rounds of 256 steps and 192 short ones of 16.
    for long, short in ((2.0, 1.0), (1.0, 2.0), (8.0, 0.25)):
        intervals += [16.0, long, 8.0, 4.0, short, *[3.0] * 190]
    compute = pytest.importorskip("nanoinfer._native").compute
    done = {
        (name, steps): compute(format=name, steps=steps, threads=num_cpus())
        for name in ("float32", "bfloat16", "int8")
        for steps in (256, 16)
    }
    times = itertools.chain.from_iterable((100.0 * i, 100.0 * i + d) for i, d in enumerate(intervals))
    ceiling = measure(Workload(num_bytes=1 << 16, matrix_size=8, num_rounds=3), clock=lambda: next(times))
    assert ceiling.bandwidth_bytes_per_sec == (1 << 16) / 2.0
    assert ceiling.flops_per_sec == {
        "float32": max(2 * 8**3 / 0.25, done["float32", 256] / 2.0),
        "bfloat16": done["bfloat16", 256] / 1.0,
        "int8": done["int8", 16] / 0.25,
    }
    assert ceiling.default_dtype == "float32"
    assert ceiling.memory_bytes is None
    refuses(lambda: measure(Workload(1 << 16, 8), clock=lambda: 1.0), "larger buffers")
    refuses(lambda: measure(Workload(1 << 60, 8), clock=lambda: 1.0), "device='measure'", "memory")


@pytest.mark.parametrize("waited", [0.4, 1e3, None])
def test_measure_warns_of_a_busy_machine(
    waited: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([5.0, 5.0 + (waited or 0.0)])
    monkeypatch.setattr(environment, "waited_seconds", lambda: None if waited is None else next(times))
    measure(Workload(num_bytes=1 << 16, matrix_size=8, num_rounds=1))
    assert ("threads waited 1000.0 s in " in caplog.text) == (waited == 1e3)


def test_measure_reads_buffers_of_halving_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller buffers are read more often, and none is slower than a larger one; the largest is the memory's."""
    reads: list[int] = []

    def reader(num_bytes: int, native: bool) -> Callable[[], object]:
        return lambda: reads.append(num_bytes)

    monkeypatch.setattr(measuring, "_reader", reader)
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    intervals = [4.0, 2.0, 1.0, 2.0, 9.0, 2.0, 0.25, 0.5, 1.0, 1.0]  # two rounds each; the last are NumPy's product
    times = itertools.chain.from_iterable((100.0 * i, 100.0 * i + d) for i, d in enumerate(intervals))
    workload = Workload(num_bytes=1 << 20, matrix_size=8, num_rounds=2, smallest_bytes=1 << 17)
    assert workload.buffers == [(1 << 20, 1), (1 << 19, 1), (1 << 18, 1), (1 << 17, 1)]
    ceiling = measure(workload, clock=lambda: next(times))
    assert reads == [size for size in (1 << 20, 1 << 19, 1 << 18, 1 << 17) for _ in range(3)]  # one to warm up
    assert ceiling.bandwidth_bytes_per_sec == (1 << 20) / 2.0
    assert ceiling.bandwidth_by_bytes == {
        1 << 20: (1 << 20) / 2.0,
        1 << 19: (1 << 19) / 1.0,
        1 << 18: (1 << 19) / 1.0,  # 2**18 / 2 is slower than the larger buffer
        1 << 17: (1 << 17) / 0.25,
    }
    several = Workload(num_bytes=1 << 20, matrix_size=8, num_rounds=2, smallest_bytes=1 << 14)
    assert several.buffers[-4:] == [(1 << 17, 1), (1 << 16, 2), (1 << 15, 4), (1 << 14, 8)]
    assert measuring._read_speed(1 << 14, 8, False, 1, iter([0.0, 0.5]).__next__) == (1 << 17) / 0.5
    assert Workload(1 << 16, 8).buffers == [(1 << 16, 1)]
    assert [size >> 20 for size, _ in measuring.CPU_WORKLOAD.buffers] == [1 << i for i in range(10, -1, -1)]


CACHED = Ceiling(
    "cached", 10.0, {"float32": 100.0}, "test", bandwidth_by_bytes={100: 50.0, 200: 40.0, 400: 10.0},
)  # fmt: skip


def test_the_bandwidth_depends_on_the_bytes_of_a_step() -> None:
    assert [CACHED.bandwidth(n) for n in (1, 100, 200, 400, 401, 1e30)] == [50.0, 50.0, 40.0, 10.0, 10.0, 10.0]
    assert CACHED.bandwidth(150) == 150 / 3.5  # 100 bytes take 2 s, 200 take 5 s
    assert CACHED.bandwidth(300) == 300 / 22.5
    seconds = [n / CACHED.bandwidth(n) for n in range(1, 500)]
    assert seconds == sorted(seconds)
    assert (CACHED.ridge(FP32, 1), CACHED.ridge(FP32, 1000)) == (2.0, 10.0)
    assert Ceiling("flat", 10.0, {}, "test").bandwidth(1) == 10.0
    assert all(device.bandwidth(1) == device.bandwidth_bytes_per_sec for device in DEVICES.values())


def test_a_prediction_reads_the_whole_step_at_the_speed_of_its_bytes() -> None:
    cost = decode(TINY, FP32)
    weights, whole = cost.model.bytes(0, 0), cost.model.bytes(4, 32)
    ceiling = Ceiling("cached", 1e3, {"float32": 1e30}, "test", bandwidth_by_bytes={weights: 1e6, 2 * whole: 1e3})
    step = predict(cost.model, ceiling, FP32, 4, 32)
    assert whole > weights  # by the keys and values
    expected = weights / 1e6 + (whole - weights) / (2 * whole - weights) * (2 * whole / 1e3 - weights / 1e6)
    assert step.memory_sec == pytest.approx(expected, rel=1e-12)
    assert predict(cost.model, ceiling, FP32, 4, 1).memory_sec < expected


def test_results_keep_the_bandwidths() -> None:
    kept = json.loads(json.dumps(CACHED.to_results()))
    again = Ceiling.from_results(kept)
    assert again.bandwidth_by_bytes == CACHED.bandwidth_by_bytes
    assert again.bandwidth(150) == CACHED.bandwidth(150)
    assert again.flops_per_sec == CACHED.flops_per_sec
    del kept["read_bytes_per_sec_by_size"]  # a file of an older version
    assert Ceiling.from_results(kept).bandwidth(150) == 10.0
    for size, speed in (("0", 1.0), ("-1", 1.0), ("x", 1.0), ("9" * 5000, 1.0), ("1", 0.0)):
        with pytest.raises(ValueError):
            Ceiling.from_results(kept | {"read_bytes_per_sec_by_size": {size: speed}})


def test_measure_measures() -> None:
    ceiling = measure(Workload(num_bytes=8 << 20, matrix_size=128, num_rounds=3))
    assert 1e8 < ceiling.bandwidth_bytes_per_sec < 1e14
    assert list(ceiling.bandwidth_by_bytes) == [8 << 20, 4 << 20, 2 << 20, 1 << 20]
    assert sorted(ceiling.bandwidth_by_bytes.values()) == list(ceiling.bandwidth_by_bytes.values())
    assert all(1e7 < rate < 1e16 for rate in ceiling.flops_per_sec.values())
