"""The environment of this process: all environment variables that nanoinfer reads, and the usable CPUs.

NANOINFER_ISA         instruction set of the native engine (`nanoinfer engines` lists them); default: the fastest
NANOINFER_API_KEY     keys of `nanoinfer serve`, separated by white space
NANOINFER_NO_NATIVE   read at installation: 1 omits the native extension (see pyproject.toml)
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from nanoinfer.utils.cgroup import cpu_limit

_TASKS = Path("/proc/self/task")
MAX_WAITED = 0.1
"""Share of the wall time: where threads waited longer for cores, in total, the machine was too busy to be measured."""


def isa() -> str:
    """Return the requested instruction set; "" is the fastest. The native engine raises for unsupported ones."""
    name = os.environ.get("NANOINFER_ISA", "")
    return "" if name == "all" else name  # of a build: CMakeLists.txt


def api_keys() -> list[str]:
    """Return the API keys of a server that are given by the environment."""
    return os.environ.get("NANOINFER_API_KEY", "").split()


def num_cpus() -> int:
    """Return the number of CPUs that this process may use: under `taskset` and in containers, fewer than there are."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux, others
    limit = cpu_limit()
    return found if limit is None else max(1, min(found, math.ceil(limit)))


def waited_seconds(tasks: Path = _TASKS) -> float | None:
    """Return how long the threads of this process were ready and waited for a core; None where the kernel does not say.

    The second number of a schedstat: https://docs.kernel.org/scheduler/sched-stats.html
    """
    found = []
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError, IndexError):  # the thread has ended
            found.append(int(path.read_text().split()[1]) * 1e-9)
    return sum(found) if found else None
