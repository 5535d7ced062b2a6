"""The environment of this process: all environment variables that nanoinfer reads, and the usable CPUs and memory.

NANOINFER_ISA         instruction set of the native engine (`nanoinfer engines` lists them); default: the fastest
NANOINFER_API_KEY     keys of `nanoinfer serve`, separated by white space
NANOINFER_NO_NATIVE   read at installation: 1 omits the native extension (see pyproject.toml)

The kernel reports the machine's CPUs and memory in a container, too. The limits of a container are those of the control
groups (Linux, version 2) that this process is in: a process that uses more CPU time than its group has is stopped for
the rest of each period, and one that uses more memory is killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
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
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux, others
    limit = cpu_limit()
    return count if limit is None else max(1, min(count, math.ceil(limit)))


def waited_seconds(tasks: Path = _TASKS) -> float | None:
    """Return how long the threads of this process were ready and waited for a core; None where the kernel does not say.

    The second number of a schedstat: https://docs.kernel.org/scheduler/sched-stats.html
    """
    seconds = []
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError, IndexError):  # the thread has ended
            seconds.append(int(path.read_text().split()[1]) * 1e-9)
    return sum(seconds) if seconds else None


def cpu_limit() -> float | None:
    """Return the number of CPUs whose time this process may use; None: no limit is set, or there are no such groups."""
    limits = []
    for text in _read_groups("cpu.max"):
        quota, _, period = text.partition(" ")  # microseconds: "150000 100000" is 1.5 CPUs
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def container_memory() -> int | None:
    """Return the bytes that this process and its group may still use; None as for `cpu_limit`.

    Pages of files count as free: the kernel drops them when memory is needed.
    """
    free = []
    for limit, used, stat in zip(*map(_read_groups, ("memory.max", "memory.current", "memory.stat")), strict=True):
        if limit.isdecimal() and used.isdecimal():
            fields = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
            files = int(fields.get("inactive_file", "0")) + int(fields.get("active_file", "0"))
            free.append(max(0, int(limit) - int(used) + files))
    return min(free, default=None)


def _read_groups(name: str) -> Iterator[str]:
    """Yield a file of the process's group and of each group above; "" where it cannot be read."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[3:] for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in Path(own).parts:  # ..: the group lies outside of this namespace
        return
    folder = _GROUPS / own.lstrip("/")
    for group in (folder, *folder.parents):
        if group.is_relative_to(_GROUPS):
            try:
                yield (group / name).read_text().strip()
            except OSError:
                yield ""
