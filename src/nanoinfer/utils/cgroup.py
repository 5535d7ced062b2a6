"""The limits of a container: those of the control groups (Linux, version 2) that this process is in.

The kernel reports the machine's CPUs and memory in a container, too. A process that uses more CPU time than its group
has is stopped for the rest of each period, and one that uses more memory is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cpu_limit() -> float | None:
    """Return the number of CPUs whose time this process may use; None: no limit is set, or there are no such groups."""
    limits = []
    for text in _read("cpu.max"):
        quota, _, period = text.partition(" ")  # microseconds: "150000 100000" is 1.5 CPUs
        if quota.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def free_memory() -> int | None:
    """Return the bytes that this process and its group may still use; None as for `cpu_limit`.

    Pages of files count as free: the kernel drops them when memory is needed.
    """
    free = []
    for limit, used, stat in zip(*map(_read, ("memory.max", "memory.current", "memory.stat")), strict=True):
        if limit.isdecimal() and used.isdecimal():
            fields = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
            files = int(fields.get("inactive_file", "0")) + int(fields.get("active_file", "0"))
            free.append(max(0, int(limit) - int(used) + files))
    return min(free, default=None)


def _read(name: str) -> Iterator[str]:
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
