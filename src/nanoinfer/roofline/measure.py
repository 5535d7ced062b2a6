"""Measures the ceilings of this machine: bandwidth of the memory, and FLOP/s of matrix products.

CPU: wide loads with software prefetch over 1 GiB on huge pages, far larger than caches, by as many threads as
this process may use; each byte is read once and nothing is written. (Without the native extension: the sum of a
buffer in torch, which reads up to a third slower.) The best of several rounds: interference only ever slows a
round down. On a machine whose memory is shared with others the ceiling itself moves; a measurement far from it in
time can stand above 100%.

GPU: a copy of 1 GiB into another, twenty times its L2 cache or more; it reads and writes each byte, and both count
(an H100 copies at about 3.0 TB/s of the 3.35 on its data sheet, an H200 at 4.3 of 4.8). A round is many copies
between two waits for the device, so that launching and waiting, 10 us or so, are no part of the figure. The median
round, at the clock that the GPU keeps.

Arithmetic, CPU: multiplications and additions on registers, by the instructions that the native kernels use for
float32, bfloat16 and 8-bit weights, by all threads (kernels/cpu/peak.h); no matrix product on those instructions is
faster. Where torch's products are faster all the same (AMX), they are the figure. (Without the native extension:
torch's products alone, which a better kernel can pass.)

Arithmetic, GPU: square matrix products in torch, of random numbers: a GPU that multiplies ones or zeros draws less
power, keeps a higher clock, and looks a tenth faster than it ever is.
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
    """How much to measure with. Buffers smaller than a few times the caches measure the caches."""

    num_bytes: int
    """Size of the buffer that is read."""
    matrix_size: int
    """Rows and columns of the square matrices."""
    num_rounds: int = 7
    """Rounds; one more before them is not timed."""
    num_copies: int = 1
    """On a GPU: copies or products in a round."""


CPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=1536, num_rounds=15)
GPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=8192, num_copies=20)


def measure(
    workload: Workload | None = None, clock: Clock = time.perf_counter, device: torch.device | None = None
) -> Ceiling:
    """Return the ceiling of a device. Nothing of the measurement stays in its memory.

    Args:
        workload: sizes; None is right for the device.
        clock: returns seconds; a test gives its own.
        device: None is the first CUDA device if there is one, else the CPU.

    Raises:
        NanoinferError: not enough memory for the buffers, or a clock that stands still.
    """
    import torch

    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    workload = workload or (GPU_WORKLOAD if device.type == "cuda" else CPU_WORKLOAD)
    names = ["float32", "bfloat16"]
    if device.type == "cuda":
        old = torch.cuda.get_device_capability(device) < (8, 0)  # bfloat16 came with Ampere
        names = ["float32", "float16"] if old else ["float32", "bfloat16", "float16"]
    try:
        bandwidth = _bandwidth(device, workload, clock)
        flops = {name: _matmul_flops(getattr(torch, name), device, workload, clock) for name in names}
        if device.type == "cpu" and _has_native():
            for name in (*names, "int8"):
                flops[name] = max(flops.get(name, 0.0), _peak_flops(name, workload, clock))
    except (RuntimeError, MemoryError, ValueError) as e:  # out of memory: torch's kinds, and the native buffer's
        reason = " ".join(str(e).split())[:100] or "out of memory"
        raise NanoinferError(
            f"device='measure': this machine could not be measured ({reason}): free some memory, or name a device"
        ) from None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # this process may live on beside those that are measured
        what = f"copy bandwidth and matrix products of {torch.cuda.get_device_name(device)}, measured now"
    else:
        how = "wide loads and products on registers" if _has_native() else "torch"
        what = f"read bandwidth and arithmetic ({how}) of {environment.num_cpus()} CPUs, measured now"
    auto = "float32" if device.type == "cpu" else names[1]
    return Ceiling(MEASURE, bandwidth, flops, what, default_dtype=auto)


def _bandwidth(device: torch.device, workload: Workload, clock: Clock) -> float:
    """Return bytes per second: read on a CPU; read and written on a GPU."""
    import torch

    if device.type == "cpu" and _has_native():
        from nanoinfer._native import ReadBuffer

        buffer = ReadBuffer(num_bytes=workload.num_bytes, threads=environment.num_cpus())
        return workload.num_bytes / _best(buffer.read, workload.num_rounds, clock)
    source = torch.ones(workload.num_bytes // 4, device=device)  # written, so that every page is real
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
    """Return the multiplications and additions per second with weights of a format, without memory."""
    from nanoinfer._native import compute

    num_threads, steps = environment.num_cpus(), max(1, workload.num_bytes >> 8)
    done: int = compute(format=name, steps=steps, threads=num_threads)
    return done / _best(lambda: compute(format=name, steps=steps, threads=num_threads), workload.num_rounds, clock)


def _best(call: Callable[[], object], num_rounds: int, clock: Clock) -> float:
    """Return the fewest seconds that one of `num_rounds` calls took, after one that is not timed."""
    call()
    seconds = []
    for _ in range(num_rounds):
        start = clock()
        call()
        seconds.append(clock() - start)
    return _checked(min(seconds))


def _seconds(call: Callable[[], object], device: torch.device, workload: Workload, clock: Clock) -> float:
    """Return the seconds that a call takes of a GPU: of the median round, after one that is not timed.

    Calls only put work into the GPU's queue. So the clock is read when the queue is empty, before and after.
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
        raise NanoinferError(f"a round took {seconds} s by the clock: measure with larger buffers")
    return seconds
