"""The environment of this process: all environment variables that nanoinfer reads, and the usable CPUs.

NANOINFER_ISA         instruction set of the native engine (`nanoinfer engines` lists them); default: the fastest
NANOINFER_API_KEY     keys of `nanoinfer serve`, separated by white space
NANOINFER_NO_NATIVE   read at installation: 1 omits the native extension (see pyproject.toml)
"""

from __future__ import annotations

import math
import os

from nanoinfer.utils.cgroup import cpu_limit


def isa() -> str:
    """Return the requested instruction set; "" is the fastest. The native engine raises for unsupported ones."""
    return os.environ.get("NANOINFER_ISA", "")


def api_keys() -> list[str]:
    """Return the API keys of a server that are given by the environment."""
    return os.environ.get("NANOINFER_API_KEY", "").split()


def num_cpus() -> int:
    """Return the number of CPUs that this process may use: under `taskset` and in containers, fewer than there are."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux, others
    limit = cpu_limit()
    return found if limit is None else max(1, min(found, math.ceil(limit)))
