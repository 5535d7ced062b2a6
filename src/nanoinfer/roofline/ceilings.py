"""Ceilings of devices: published peaks, and measurements of this machine (docs/inference-math.md, part 5).

Covered: peak read bandwidth of the main memory, and throughput of dense matrix products with float32 accumulation at
boost clock. Kernels typically reach 80-95% of the bandwidth and 50-80% of the throughput. Not covered: kernel launches,
interconnects, and caches (a measured CPU has the speeds of its caches too). float32 means float32, PyTorch's default,
not TF32.

Bandwidth, CPU: all threads read a buffer on huge pages: first 1 GiB, much more than the caches, then half as much, and
so on to 1 MiB. A decode step reads the same weights as the step before, so a model that fits in the caches is read at
their speed. A speed is the best of several rounds, because interference only makes a round slower; for the same reason
a buffer is not slower than a larger one. GPU: copies of 1 GiB, at least twenty times the L2 cache; the median round, at
the GPU's sustained clock, in which the time for launches and synchronization is negligible.

Arithmetic, CPU: multiplications and additions in registers, with the instructions of the native kernels
(kernels/cpu/kernels/peak.h). If NumPy's float32 product is faster, the result is NumPy's. GPU: products of random
numbers; those of ones or zeros use less power, which allows a higher clock and measures up to a tenth too fast.

Without the native extension NumPy reads and multiplies, in float32 only.
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nanoinfer.errors import NanoinferError, show
from nanoinfer.roofline.formats import FORMATS, WeightFormat
from nanoinfer.utils import environment
from nanoinfer.utils.checks import require_choice


@dataclass(frozen=True)
class Ceiling:
    """Peak bandwidth and throughput of a device."""

    name: str
    bandwidth_bytes_per_sec: float
    """Bandwidth of the main memory."""
    flops_per_sec: Mapping[str, float]
    """Throughput by dtype; dtypes that the device does not support, or that were not measured, are missing. "int8":
    products of 8-bit or 4-bit weights with 8-bit activations."""
    source: str
    """Source of the figures."""
    memory_bytes: int | None = None
    """Size of the main memory; None if it is not fixed for the device."""
    default_dtype: str = "bfloat16"
    bandwidth_by_bytes: Mapping[int, float] = field(default_factory=dict)
    """Speed of reading a buffer again and again, by its size; a larger one is not faster, and the largest is read from
    the main memory. Empty: bandwidth_bytes_per_sec for all sizes."""

    def bandwidth(self, num_bytes: float) -> float:
        """Return the bytes/s at which a step reads `num_bytes`, which the next step reads again.

        Between two measured sizes, the time is interpolated; below the smallest, the speed is that of the smallest.
        """
        sizes = sorted(self.bandwidth_by_bytes)
        i = bisect_left(sizes, num_bytes)
        if i == len(sizes):
            return self.bandwidth_bytes_per_sec
        if i == 0:
            return self.bandwidth_by_bytes[sizes[0]]
        low, high = sizes[i - 1 : i + 1]
        low_sec, high_sec = (size / self.bandwidth_by_bytes[size] for size in (low, high))
        return num_bytes / (low_sec + (num_bytes - low) / (high - low) * (high_sec - low_sec))

    def compute_dtype(self, fmt: WeightFormat) -> str:
        """Return the dtype of the arithmetic for a weight format.

        A float format uses its own dtype; a quantized one uses int8 if the device has it, else the fastest dtype.

        Raises:
            NanoinferError: the device has no throughput for the dtype.
        """
        name = fmt.name if fmt.is_float else "int8"
        if not fmt.is_float and name not in self.flops_per_sec:
            name = max(self.flops_per_sec, key=lambda name: self.flops_per_sec[name], default=name)
        if not self.flops_per_sec.get(name):
            raise NanoinferError(
                f"dtype={fmt.name!r} has no throughput on {self.name}: use {', '.join(self.flops_per_sec)}, or a"
                " quantized format"
            )
        return name

    def throughput(self, fmt: WeightFormat) -> float:
        """Return the FLOP/s of matrix products with weights of a format."""
        return self.flops_per_sec[self.compute_dtype(fmt)]

    def ridge(self, fmt: WeightFormat, num_bytes: float) -> float:
        """Return the FLOPs per byte above which a step that reads `num_bytes` is compute-bound."""
        return self.throughput(fmt) / self.bandwidth(num_bytes)

    def resolve_format(self, dtype: str, stored: WeightFormat | None = None) -> WeightFormat:
        """Return the format for a name; "auto" is `stored`, the model's own, or else the device's default.

        Raises:
            NanoinferError: the name is unknown, or the device has no throughput for the format.
        """
        require_choice("dtype", dtype, ("auto", *FORMATS))
        fmt = stored if dtype == "auto" and stored else FORMATS[self.default_dtype if dtype == "auto" else dtype]
        self.compute_dtype(fmt)
        return fmt

    def to_results(self) -> dict[str, Any]:
        """Return the ceiling of a results file."""
        by_bytes = {str(size): speed for size, speed in self.bandwidth_by_bytes.items()}
        limits = {"read_bytes_per_sec": self.bandwidth_bytes_per_sec, "read_bytes_per_sec_by_size": by_bytes}
        return limits | {"flops_per_sec": dict(self.flops_per_sec), "source": self.source}

    @staticmethod
    def from_results(limits: Mapping[str, Any]) -> Ceiling:
        """Return the ceiling of a results file; that of an older one has the speed of the main memory only.

        Raises:
            KeyError, TypeError, ValueError: a value is missing, of another type or out of range.
        """
        memory, flops = limits["read_bytes_per_sec"], dict(limits["flops_per_sec"])
        by_bytes = {int(size): speed for size, speed in dict(limits.get("read_bytes_per_sec_by_size", {})).items()}
        for name, numbers in (("speed", (memory, *flops.values(), *by_bytes.values())), ("size", by_bytes)):
            if wrong := [number for number in numbers if not 1 <= number < 1e300]:
                raise ValueError(f"ceiling: a {name} is {show(wrong[0])}")
        return Ceiling("file", memory, flops, "", bandwidth_by_bytes=by_bytes)


log = logging.getLogger("nanoinfer")

Clock = Callable[[], float]
MEASURE = "measure"
MIN_WAITED_SEC = 0.5  # of a busy machine: a usual measurement takes 10 s
GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Workload:
    """Sizes of a measurement. The largest buffer must be several times larger than the caches."""

    num_bytes: int
    """Size of the largest buffer that is read."""
    matrix_size: int
    """Rows and columns of the square matrices."""
    num_rounds: int = 7
    """Timed rounds; a warm-up round precedes them."""
    num_copies: int = 1
    """On a GPU: copies or products per round."""
    smallest_bytes: int = 1 << 20
    """On a CPU: size of the smallest buffer, which is not used if the largest is smaller."""

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """Sizes of the buffers that a CPU reads, the largest first, and how often each is read in a round."""
        sizes = [self.num_bytes]
        while sizes[-1] // 2 >= self.smallest_bytes:
            sizes.append(sizes[-1] // 2)
        return [(size, max(1, self.num_bytes // 8 // size)) for size in sizes]


CPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=1536, num_rounds=15)
GPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=8192, num_copies=20)


def _gpu(name: str, gb_per_sec: float, fp32: float, half: float, memory_gb: int, source: str) -> Ceiling:
    """Return the ceiling of a GPU whose bfloat16 and float16 throughput is `half` TFLOP/s."""
    flops = {"float32": fp32 * TERA, "bfloat16": half * TERA, "float16": half * TERA}
    return Ceiling(name, gb_per_sec * GB, flops, source, memory_gb * GB)


DEVICES: dict[str, Ceiling] = {
    "t4": Ceiling(
        "t4", 300 * GB, {"float32": 8.1 * TERA, "float16": 65 * TERA},  # no bfloat16 before Ampere
        "NVIDIA T4 Tensor Core GPU datasheet", 16 * GB, default_dtype="float16",
    ),
    "l40s": _gpu("l40s", 864, 91.6, 362.05, 48, "NVIDIA L40S datasheet"),
    "rtx4090": _gpu("rtx4090", 1008, 82.6, 165.2, 24, "NVIDIA Ada GPU architecture whitepaper, RTX 4090"),
    "a100": _gpu("a100", 2039, 19.5, 312, 80, "NVIDIA A100 datasheet (80 GB, SXM)"),
    "h100": _gpu("h100", 3350, 67, 989.4, 80, "NVIDIA H100 datasheet (SXM) and architecture whitepaper"),
    "h200": _gpu("h200", 4800, 67, 989.4, 141, "NVIDIA H200 datasheet (SXM); it computes as an H100"),
}  # fmt: skip


def find_device(name: str, local_device: str = "cpu") -> Ceiling:
    """Return a device's ceiling; "measure" measures `local_device` of this machine, cpu or cuda:N.

    Case, spaces, hyphens and underscores are ignored: "RTX 4090" is "rtx4090".

    Raises:
        NanoinferError: an unknown device.
    """
    key = "".join(c for c in name.lower() if c not in " -_") if isinstance(name, str) else ""
    if key == MEASURE:
        return measure(device=local_device)
    if key not in DEVICES:
        require_choice("device", name, (*DEVICES, MEASURE))
    return DEVICES[key]


def measure(workload: Workload | None = None, clock: Clock = time.perf_counter, device: str = "cpu") -> Ceiling:
    """Measure and return the ceiling of a device, and warn if the machine was busy. All memory is freed afterwards.

    Args:
        workload: sizes; None selects the sizes for the device.
        clock: returns seconds; for tests.
        device: cpu or cuda:N.

    Raises:
        NanoinferError: memory is insufficient for the buffers, or a round took no time by the clock.
    """
    start, before = time.monotonic(), environment.waited_seconds()
    try:
        if device != "cpu":
            return _measure_gpu(workload or GPU_WORKLOAD, clock, device)
        ceiling = _measure_cpu(workload or CPU_WORKLOAD, clock)
    except (RuntimeError, MemoryError, ValueError) as e:  # out of memory, in torch, NumPy or the native extension
        reason = " ".join(str(e).split())[:100] or "out of memory"
        raise NanoinferError(
            f"device='measure': this machine could not be measured ({reason}): free some memory, or name a device"
        ) from None
    waited, seconds = (environment.waited_seconds() or 0.0) - (before or 0.0), time.monotonic() - start
    if waited > max(MIN_WAITED_SEC, environment.MAX_WAITED * seconds):
        log.warning(
            "the measurement's threads waited %.1f s in %.1f s for a core: an idle machine may be faster; measure again"
            " when other programs have ended", waited, seconds,
        )  # fmt: skip
    return ceiling


def _measure_cpu(workload: Workload, clock: Clock) -> Ceiling:
    """Return the ceiling of all CPUs of this process."""
    native, num_cpus = importlib.util.find_spec("nanoinfer._native") is not None, environment.num_cpus()
    speed, by_bytes = 0.0, {}
    for size, num_reads in workload.buffers:
        speed = by_bytes[size] = max(speed, _read_speed(size, num_reads, native, workload.num_rounds, clock))
    a = np.random.default_rng(0).standard_normal((workload.matrix_size,) * 2, dtype=np.float32)
    out = np.empty_like(a)
    flops = {"float32": 2 * workload.matrix_size**3 / _best(lambda: np.matmul(a, a, out), workload.num_rounds, clock)}
    for name in ("float32", "bfloat16", "int8") if native else ():
        flops[name] = max(flops.get(name, 0.0), _peak_flops(name, workload, clock))
    how = "wide loads and products on registers" if native else "NumPy"
    source = f"read bandwidth and arithmetic ({how}) of {num_cpus} CPUs, measured now"
    return Ceiling(
        MEASURE, by_bytes[workload.num_bytes], flops, source, default_dtype="float32", bandwidth_by_bytes=by_bytes
    )


def _read_speed(num_bytes: int, num_reads: int, native: bool, num_rounds: int, clock: Clock) -> float:
    """Return the bytes/s of reading a buffer, `num_reads` times in a round."""
    read = _reader(num_bytes, native)

    def one_round() -> None:
        for _ in range(num_reads):
            read()

    return num_bytes * num_reads / _best(one_round, num_rounds, clock)


def _reader(num_bytes: int, native: bool) -> Callable[[], object]:
    """Return a function that reads a buffer once, by all CPUs."""
    if native:
        from nanoinfer._native import ReadBuffer

        read: Callable[[], object] = ReadBuffer(num_bytes=num_bytes, threads=environment.num_cpus()).read
        return read
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), environment.num_cpus())  # written: all pages are mapped
    pool = ThreadPoolExecutor(len(parts))  # NumPy releases the GIL
    return lambda: list(pool.map(np.max, parts))  # np.sum adds in an order that halves the speed


def _measure_gpu(workload: Workload, clock: Clock, device: str) -> Ceiling:
    """Return the ceiling of a CUDA device."""
    import torch

    old = torch.cuda.get_device_capability(device) < (8, 0)  # no bfloat16 before Ampere
    names = ["float32", "float16"] if old else ["float32", "bfloat16", "float16"]
    bandwidth = _copy_bandwidth(device, workload, clock)
    n, flops = workload.matrix_size, {}
    for name in names:
        matrix = torch.randn(n, n, device=device).to(getattr(torch, name))
        product = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
        flops[name] = 2 * n**3 / _seconds(product, device, workload, clock)
    torch.cuda.empty_cache()  # other processes may need the memory
    text = f"copy bandwidth and matrix products of {torch.cuda.get_device_name(device)}, measured now"
    return Ceiling(MEASURE, bandwidth, flops, text, default_dtype=names[1])


def _copy_bandwidth(device: str, workload: Workload, clock: Clock) -> float:
    """Return bytes read and written per second by copies."""
    import torch

    source = torch.ones(workload.num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, workload, clock)


def _peak_flops(name: str, workload: Workload, clock: Clock) -> float:
    """Return multiplications and additions per second on registers, with the instructions for a weight format.

    Long rounds do not show the time to start the threads, and short ones fit between disturbances on a shared machine.
    """
    from nanoinfer._native import compute

    num_threads, speed = environment.num_cpus(), 0.0
    for divisor, num_rounds in ((1 << 8, workload.num_rounds), (1 << 12, 64 * workload.num_rounds)):
        steps = max(1, workload.num_bytes // divisor)
        done: int = compute(format=name, steps=steps, threads=num_threads)
        seconds = _best(partial(compute, format=name, steps=steps, threads=num_threads), num_rounds, clock)
        speed = max(speed, done / seconds)
    return speed


def _best(call: Callable[[], object], num_rounds: int, clock: Clock) -> float:
    """Return the shortest time of `num_rounds` calls after a warm-up call."""
    call()
    seconds = []
    for _ in range(num_rounds):
        start = clock()
        call()
        seconds.append(clock() - start)
    return _checked(min(seconds))


def _seconds(call: Callable[[], object], device: str, workload: Workload, clock: Clock) -> float:
    """Return the seconds of a call on a GPU in the median round, after a warm-up round.

    Calls are asynchronous, so the GPU is synchronized before the clock is read.
    """
    import torch

    seconds = []
    for _ in range(1 + workload.num_rounds):
        torch.cuda.synchronize(device)
        start = clock()
        for _ in range(workload.num_copies):
            call()
        torch.cuda.synchronize(device)
        seconds.append((clock() - start) / workload.num_copies)
    return _checked(statistics.median(seconds[1:]))


def _checked(seconds: float) -> float:
    if seconds <= 0:
        raise NanoinferError(f"a round took {seconds} s by the clock: use larger buffers")
    return seconds
