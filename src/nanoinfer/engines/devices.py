"""Devices of this machine, the dtypes they support, and their free memory."""

from __future__ import annotations

import os
import re

import torch

from nanoinfer.errors import NanoinferError


def resolve_device(name: str) -> torch.device:
    """Return the device for a name: cpu, cuda, cuda:N, or auto (cuda if available, else cpu).

    Raises:
        NanoinferError: the name is unknown, this machine has no such device, or this process cannot use it.
    """
    # A CUDA build of PyTorch notes a fork also where there is no GPU.
    if name != "cpu" and torch.cuda._is_in_bad_fork() and torch.cuda.device_count():
        raise NanoinferError(
            f"device={name!r}: this process was forked from one that had used CUDA: start it with multiprocessing's"
            " method spawn, or use device=cpu"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if match := re.fullmatch(r"cuda(?::(\d{1,4}))?", str(name)):
        index = int(match.group(1) or 0)
        if index < count:
            return torch.device("cuda", index)
        have = f"{count} CUDA devices" if count else "no CUDA device"
        raise NanoinferError(f"device={name!r}: this machine has {have}: use device=cpu or auto")
    raise NanoinferError(f"device={name!r} is unknown: use cpu, cuda, cuda:N or auto")


def supported_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the names of the dtypes that `device` supports."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return ("float32", "float16")  # bfloat16 needs Ampere or newer
    return ("float32", "bfloat16", "float16")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for a name; auto is float32 on a CPU, and 16 bits on a GPU.

    Raises:
        NanoinferError: the device does not support the dtype.
    """
    have = supported_dtypes(device)
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16" if "bfloat16" in have else "float16"
    if name not in have:
        raise NanoinferError(f"dtype={name!r} is not supported on {device}: use one of {', '.join(have)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def free_memory(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device now."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":", 1) for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: assume that half of the installed memory is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
