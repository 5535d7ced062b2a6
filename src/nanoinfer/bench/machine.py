"""What was measured on, and with what: machine, versions, commit. Unknown is None, never a guess."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.environment import num_cpus

if TYPE_CHECKING:
    import torch

PACKAGES = ("nanoinfer", "torch", "numpy", "transformers", "ctranslate2", "llama-cpp-python", "triton")


# Fields of nvidia-smi -> keys of the description, with their units.
_GPU_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.mem": "max_memory_clock_mhz",
    "power.limit": "power_limit_watt",
    "temperature.gpu": "temperature_celsius",
}


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the CPU, its cores and instruction sets, threads, memory and GPU.

    Args:
        device: what is measured; a CUDA device is described in detail. None: the first, by its name alone.
    """
    import torch

    on_gpu = device if device is not None and device.type == "cuda" else None
    flags = _cpuinfo("flags").split()
    isa = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if f in flags]
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or None,
        "isa": isa,
        "cores": num_cpus(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name(on_gpu) if torch.cuda.is_available() else None,
        "gpu_details": describe_gpu(on_gpu) if on_gpu is not None else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Return a CUDA device's memory, capability, CUDA version, and what nvidia-smi says of driver and clocks now."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    described: dict[str, Any] = {
        "memory_bytes": properties.total_memory,
        "l2_cache_bytes": getattr(properties, "L2_cache_size", None),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
    uuid = getattr(properties, "uuid", None)  # torch's index counts what CUDA_VISIBLE_DEVICES shows, nvidia-smi's all
    return described | _nvidia_smi(f"GPU-{uuid}" if uuid is not None else str(device.index or 0))


def _nvidia_smi(which: str) -> dict[str, Any]:
    """Return what nvidia-smi says of a GPU, by the keys of _GPU_FIELDS; None for what it does not say."""
    query = ["nvidia-smi", "-i", which, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        values = done.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError):
        values = []
    said = dict(zip(_GPU_FIELDS.values(), values, strict=False))
    return {key: said.get(key) if key == "driver" else _number(said.get(key)) for key in _GPU_FIELDS.values()}


def _number(text: str | None) -> float | None:
    """Return a number as it was printed, None for "[N/A]" and the like."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _cpuinfo(name: str) -> str:
    """Return a field of /proc/cpuinfo, "" where there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that matter; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, "+dirty" if it has changes; else None."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short", "HEAD")
        return head + ("+dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
