"""Measure the ceilings of this machine: memory bandwidth and FLOP/s of matrix products.

Bandwidth, CPU: all threads read 1 GiB on huge pages, much more than the caches, once, by wide loads with software
prefetch. Without the native extension, torch sums a buffer, which reads up to a third slower. The result is the best of
several rounds, because interference only makes a round slower. On a machine that shares its memory bandwidth with
others the ceiling varies over time, so a benchmark run at another time can exceed 100%.

Bandwidth, GPU: copy 1 GiB, at least twenty times the L2 cache, and count the bytes read and written. (An H100 copies at
about 3.0 TB/s of the 3.35 on its data sheet, an H200 at 4.3 of 4.8.) A round has many copies between two
synchronizations, so the time for launches and synchronization, about 10 us, is negligible. The result is the median
round, at the GPU's sustained clock.

Arithmetic, CPU: all threads multiply and add in registers, with the instructions of the native kernels for float32,
bfloat16 and 8-bit weights (kernels/cpu/peak.h). No matrix product with these instructions is faster. If torch's matrix
products are faster because they use others (AMX), the result is theirs. Without the native extension the result is
torch's, which a better kernel can exceed.

Arithmetic, GPU: square matrix products of random numbers in torch. Products of ones or zeros use less power, which
allows a higher clock and measures up to a tenth too fast.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer import environment
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.ceilings import MEASURE, Ceiling

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """Sizes of a measurement. The buffer must be several times larger than the caches."""

    num_bytes: int
    """Size of the buffer that is read."""
    matrix_size: int
    """Rows and columns of the square matrices."""
    num_rounds: int = 7
    """Timed rounds; a warm-up round precedes them."""
    num_copies: int = 1
    """On a GPU: copies or products per round."""


CPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=1536, num_rounds=15)
GPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=8192, num_copies=20)


def measure(workload: Workload | None = None, clock: Clock = time.perf_counter, device: str | None = None) -> Ceiling:
    """Measure and return the ceiling of a device. All memory is freed afterwards.

    Args:
        workload: sizes; None selects the sizes for the device.
        clock: returns seconds; for tests.
        device: None is the first CUDA device if there is one, else the CPU.

    Raises:
        NanoinferError: memory is insufficient for the buffers, or a round took no time by the clock.
    """
    import torch

    on = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    workload = workload or (GPU_WORKLOAD if on.type == "cuda" else CPU_WORKLOAD)
    names = ["float32", "bfloat16"]
    if on.type == "cuda":
        old = torch.cuda.get_device_capability(on) < (8, 0)  # no bfloat16 before Ampere
        names = ["float32", "float16"] if old else ["float32", "bfloat16", "float16"]
    try:
        bandwidth = _bandwidth(on, workload, clock)
        flops = {name: _matmul_flops(getattr(torch, name), on, workload, clock) for name in names}
        if on.type == "cpu" and _has_native():
            for name in (*names, "int8"):
                flops[name] = max(flops.get(name, 0.0), _peak_flops(name, workload, clock))
    except (RuntimeError, MemoryError, ValueError) as e:  # out of memory, in torch or the native extension
        reason = " ".join(str(e).split())[:100] or "out of memory"
        raise NanoinferError(
            f"device='measure': this machine could not be measured ({reason}): free some memory, or name a device"
        ) from None
    if on.type == "cuda":
        torch.cuda.empty_cache()  # other processes may need the memory
        what = f"copy bandwidth and matrix products of {torch.cuda.get_device_name(on)}, measured now"
    else:
        how = "wide loads and products on registers" if _has_native() else "torch"
        what = f"read bandwidth and arithmetic ({how}) of {environment.num_cpus()} CPUs, measured now"
    auto = "float32" if on.type == "cpu" else names[1]
    return Ceiling(MEASURE, bandwidth, flops, what, default_dtype=auto)


def _bandwidth(device: torch.device, workload: Workload, clock: Clock) -> float:
    """Return bytes per second: bytes read on a CPU, bytes read and written on a GPU."""
    import torch

    if device.type == "cpu" and _has_native():
        from nanoinfer._native import ReadBuffer

        buffer = ReadBuffer(num_bytes=workload.num_bytes, threads=environment.num_cpus())
        return workload.num_bytes / _best(buffer.read, workload.num_rounds, clock)
    source = torch.ones(workload.num_bytes // 4, device=device)  # written, so that all pages are mapped
    if device.type == "cuda":
        target = torch.empty_like(source)
        return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, workload, clock)
    return source.nbytes / _best(source.sum, workload.num_rounds, clock)


def _has_native() -> bool:
    return importlib.util.find_spec("nanoinfer._native") is not None


def _matmul_flops(dtype: torch.dtype, device: torch.device, workload: Workload, clock: Clock) -> float:
    """Return FLOP/s of a square matrix product."""
    import torch

    n = workload.matrix_size
    a = torch.randn(n, n, device=device).to(dtype)
    if device.type == "cuda":
        out = torch.empty_like(a)
        return 2 * n**3 / _seconds(lambda: torch.mm(a, a, out=out), device, workload, clock)
    return 2 * n**3 / _best(lambda: a @ a, workload.num_rounds, clock)


def _peak_flops(name: str, workload: Workload, clock: Clock) -> float:
    """Return multiplications and additions per second on registers, with the instructions for a weight format."""
    from nanoinfer._native import compute

    num_threads, steps = environment.num_cpus(), max(1, workload.num_bytes >> 8)
    done: int = compute(format=name, steps=steps, threads=num_threads)
    return done / _best(lambda: compute(format=name, steps=steps, threads=num_threads), workload.num_rounds, clock)


def _best(call: Callable[[], object], num_rounds: int, clock: Clock) -> float:
    """Return the shortest time of `num_rounds` calls after a warm-up call."""
    call()
    seconds = []
    for _ in range(num_rounds):
        start = clock()
        call()
        seconds.append(clock() - start)
    return _checked(min(seconds))


def _seconds(call: Callable[[], object], device: torch.device, workload: Workload, clock: Clock) -> float:
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
