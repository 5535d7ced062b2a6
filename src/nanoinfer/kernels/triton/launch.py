"""Programmatic dependent launch: a kernel starts, and loads its parameters, while the kernel before it still runs.

A kernel that takes part has a `PDL: tl.constexpr` parameter, is launched with `**launch_options(device)`, and obeys one
rule: before it calls `wait_for_predecessor`, it reads only parameters of the model, and writes nothing. Every program
of the kernel must make the call, before any early return. The next kernel is allowed to start only after this one's
calls, when the results of all kernels before this one are complete.

Weights that are needed soon can be brought to the L2 cache, which needs no registers and no shared memory.

Devices before compute capability 9.0 and the interpreter launch one kernel after the other; they do neither.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from . import tiles


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended and its results can be read; then let the next one start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch_share(data, num_bytes, program, num_programs):
    """Start to bring this program's share of the bytes at `data`, an address divisible by 16, to the L2 cache."""
    share = tl.cdiv(num_bytes, num_programs * 16) * 16
    first = program.to(tl.int64) * share
    size = tl.minimum(num_bytes - first, share).to(tl.int32) // 16 * 16
    tl.inline_asm_elementwise(
        """{
        .reg .pred first, some;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        setp.gt.and.s32 some, $2, 0, first;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [data.to(tl.int64) + first, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@cache
def is_available(device: torch.device) -> bool:
    """Return whether a device has programmatic dependent launch: compute capability 9.0 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the keyword arguments for the launch of a kernel that has a `PDL` parameter.

    launch_options(cuda:0, an H100) -> {"PDL": True, "launch_pdl": True};   of the CPU -> {"PDL": False}
    """
    if tiles.USE_PDL and is_available(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def can_prefetch(data: Tensor) -> bool:
    """Return whether `prefetch_share` can be called for a tensor."""
    return tiles.USE_L2_PREFETCH and is_available(data.device) and data.data_ptr() % 16 == 0
