"""What was measured on, and with what: machine, versions, commit. Unknown is None, never a guess."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanoinfer.environment import num_cpus

PACKAGES = ("nanoinfer", "torch", "numpy", "transformers", "ctranslate2", "llama-cpp-python", "triton")


def describe_machine() -> dict[str, Any]:
    """Return the CPU, its cores and instruction sets, threads, memory and GPU."""
    import torch

    flags = _cpuinfo("flags").split()
    isa = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if f in flags]
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or None,
        "isa": isa,
        "cores": num_cpus(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


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
