"""Devices of this machine, the dtypes they support, and their free memory.

Devices and dtypes are names ("cpu", "cuda:0"; "float32"). PyTorch is imported only where there is a CUDA driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import sys

from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.utils.environment import container_memory

log = logging.getLogger("nanoinfer")


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that PyTorch can use; 0 without PyTorch."""
    if sys.modules.get("torch") is None and not (_has_cuda_driver() and importlib.util.find_spec("torch")):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")  # part of the driver, not of PyTorch; loading it does not start CUDA
    except OSError:
        return False
    return True


def resolve_device(name: str) -> str:
    """Return the device for a name: cpu, cuda, cuda:N, or auto (cuda if available, else cpu).

    Returns:
        "cpu" or "cuda:N".

    Raises:
        NanoinferError: the name is unknown, this machine has no such device, or this process cannot use it.
    """
    if name == "cpu":
        return name
    if name != "auto" and (match := re.fullmatch(r"cuda(?::(\d{1,4}))?", str(name))) is None:
        raise NanoinferError(f"device={name!r} is unknown: use cpu, cuda, cuda:N or auto")
    count = num_cuda_devices()
    _require_no_fork(name)
    if name == "auto":
        if not count and importlib.util.find_spec("torch") is None and _has_cuda_driver():
            log.warning("device=auto: using the CPU and no GPU: %s", missing_extra("torch", "gpu"))
        return "cuda:0" if count else "cpu"
    assert match is not None
    index = int(match.group(1) or 0)
    if index < count:
        return f"cuda:{index}"
    have = f"{count} CUDA devices" if count else "no CUDA device"
    raise NanoinferError(f"device={name!r}: this machine has {have}: use device=cpu or auto")


def _require_no_fork(name: str) -> None:
    """Raise NanoinferError in a forked process whose parent has used CUDA."""
    torch = sys.modules.get("torch")
    # A CUDA build of PyTorch notes a fork also where there is no GPU.
    if torch is not None and torch.cuda._is_in_bad_fork() and torch.cuda.device_count():
        raise NanoinferError(
            f"device={name!r}: this process was forked from one that had used CUDA: start it with multiprocessing's"
            " method spawn, or use device=cpu"
        )


def supported_dtypes(device: str) -> tuple[str, ...]:
    """Return the dtypes that `device` supports."""
    if device != "cpu":
        import torch

        if torch.cuda.get_device_capability(device) < (8, 0):
            return ("float32", "float16")  # bfloat16 needs Ampere or newer
    return ("float32", "bfloat16", "float16")


def resolve_dtype(name: str, device: str, stored: str = "float32") -> str:
    """Return the dtype for a name; auto is that of the checkpoint, where computing in it is fast.

    A CPU computes in bfloat16 or float32: for `auto`, float16 becomes float32, because it would not be faster. A GPU
    computes in 16 bits: float32 becomes bfloat16 if the GPU supports it, else float16.

    Args:
        name: float32, bfloat16, float16 or auto.
        device: "cpu" or "cuda:N".
        stored: dtype of the checkpoint.

    Raises:
        NanoinferError: the device does not support the dtype.
    """
    have = supported_dtypes(device)
    if name == "auto":
        if device == "cpu":
            name = "bfloat16" if stored == "bfloat16" else "float32"
        else:
            half = "bfloat16" if "bfloat16" in have else "float16"
            name = stored if stored in have and stored != "float32" else half
    if name not in have:
        raise NanoinferError(f"dtype={name!r} is not supported on {device}: use one of {', '.join(have)}")
    return name


def free_memory(device: str) -> int:
    """Return the bytes of memory that are free on a device now; in a container, at most what its limit leaves."""
    if device != "cpu":
        import torch

        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":", 1) for line in f)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: assume that half of the installed memory is free
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit = container_memory()
    return available if limit is None else min(available, limit)
