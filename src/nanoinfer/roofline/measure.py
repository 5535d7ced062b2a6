"""Measures the ceilings of this machine: read bandwidth of the main memory, and FLOP/s of matrix products.

CPU: wide loads with software prefetch over 1 GiB on huge pages, far larger than caches, by as many threads as
this process may use; each byte is read once and nothing is written. (Without the native extension: the sum of a
buffer in torch, which reads up to a third slower.) GPU: a copy of 1 GiB, which reads and writes each byte.
Matrix products are square, in float32 and bfloat16 (on a GPU float16 too). Always the best of several rounds:
interference only ever slows a round down. On a machine whose memory is shared with others the ceiling itself
moves; a measurement far from it in time can stand above 100%.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer import environment
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.devices import MEASURE, Ceiling

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
    """Rounds, of which the best counts; one more before them is not timed."""


CPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=1536, num_rounds=15)
GPU_WORKLOAD = Workload(num_bytes=1 << 30, matrix_size=8192)


def measure(workload: Workload | None = None, clock: Clock = time.perf_counter) -> Ceiling:
    """Return the ceiling of this machine: of its first CUDA device if it has one, else of its CPU.

    Args:
        workload: sizes; None is right for the device.
        clock: returns seconds; a test gives its own.

    Raises:
        NanoinferError: not enough memory for the buffers, or a clock that stands still.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = workload or (GPU_WORKLOAD if device.type == "cuda" else CPU_WORKLOAD)
    names = ["float32", "bfloat16"]
    if device.type == "cuda":
        old = torch.cuda.get_device_capability() < (8, 0)  # bfloat16 came with Ampere
        names = ["float32", "float16"] if old else ["float32", "bfloat16", "float16"]
    try:
        bandwidth = _bandwidth(device, workload, clock)
        flops = {name: _matmul_flops(getattr(torch, name), device, workload, clock) for name in names}
    except (RuntimeError, MemoryError, ValueError) as e:  # out of memory: torch's kinds, and the native buffer's
        reason = " ".join(str(e).split())[:100] or "out of memory"
        raise NanoinferError(
            f"device='measure': this machine could not be measured ({reason}): free some memory, or name a device"
        ) from None
    if device.type == "cuda":
        what = f"copy bandwidth and matrix products of {torch.cuda.get_device_name()}, measured now"
    else:
        how = "wide loads on huge pages" if _has_native() else "torch"
        what = f"read bandwidth ({how}) and matrix products (torch) of {environment.num_cpus()} CPUs, measured now"
    auto = "float32" if device.type == "cpu" else names[1]
    return Ceiling(MEASURE, bandwidth, flops, what, default_dtype=auto)


def _bandwidth(device: torch.device, workload: Workload, clock: Clock) -> float:
    """Return bytes per second: read on a CPU; read and written on a GPU."""
    import torch

    if device.type == "cpu" and _has_native():
        from nanoinfer._native import ReadBuffer

        buffer = ReadBuffer(num_bytes=workload.num_bytes, threads=environment.num_cpus())
        return workload.num_bytes / _best(buffer.read, device, workload.num_rounds, clock)
    source = torch.ones(workload.num_bytes // 4, device=device)  # written, so that every page is real
    if device.type == "cuda":
        target = torch.empty_like(source)
        return 2 * source.nbytes / _best(lambda: target.copy_(source), device, workload.num_rounds, clock)
    return source.nbytes / _best(source.sum, device, workload.num_rounds, clock)


def _has_native() -> bool:
    return importlib.util.find_spec("nanoinfer._native") is not None


def _matmul_flops(dtype: torch.dtype, device: torch.device, workload: Workload, clock: Clock) -> float:
    """Return FLOP/s of a square matrix product."""
    import torch

    n = workload.matrix_size
    a = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / _best(lambda: a @ a, device, workload.num_rounds, clock)


def _best(call: Callable[[], object], device: torch.device, num_rounds: int, clock: Clock) -> float:
    """Return the fewest seconds that one of `num_rounds` calls took, after one that is not timed."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    seconds = []
    for _ in range(num_rounds):
        finish()
        start = clock()
        call()
        finish()
        seconds.append(clock() - start)
    if min(seconds) <= 0:
        raise NanoinferError(f"a round took {min(seconds)} s by the clock: measure with larger buffers")
    return min(seconds)
