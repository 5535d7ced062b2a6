"""Programmatic dependent launch: a kernel starts, and loads its parameters, while the kernel before it still runs.

A kernel that takes part has a `PDL: tl.constexpr` parameter, is launched with `**launch_options(device)`, and obeys one
rule: before it calls `wait_for_predecessor`, it reads only parameters of the model, and writes nothing. Every program
of the kernel must make the call, before any early return. The next kernel is allowed to start only after this one's
calls, when the results of all kernels before this one are complete.

Devices before compute capability 9.0 and the interpreter launch one kernel after the other.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from . import tiles


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended and its results can be read; then let the next one start."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


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
