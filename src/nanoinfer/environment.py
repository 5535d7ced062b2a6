"""What this process was given: the environment variables that nanoinfer reads (all of them), and CPUs.

NANOINFER_ISA         instruction set of the native engine (`nanoinfer engines` lists them); unset: the fastest
NANOINFER_NO_NATIVE   when installing: 1 leaves the native extension out (see pyproject.toml)
"""

from __future__ import annotations

import os


def isa() -> str:
    """Return the instruction set asked for, "" for the fastest. The native engine refuses what it does not have."""
    return os.environ.get("NANOINFER_ISA", "")


def num_cpus() -> int:
    """Return the CPUs that this process may use: all of the machine's, or fewer under `taskset`."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
