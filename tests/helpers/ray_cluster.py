"""Ray clusters of several nodes on this machine, and what goes wrong with them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from helpers.models import command, one_thread

WAIT_SEC = 120.0  # for what takes seconds on an idle machine
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.update(LOOPBACK)  # before ray is imported, which reads them then: import this module first

NODE: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20}


@contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster with nodes of so many CPUs; its ports are bound to 127.0.0.1."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": cpus[0], "include_dashboard": False})
    try:
        for count in cpus[1:]:
            made.add_node(**NODE, num_cpus=count)
        yield made
    finally:
        made.shutdown()


def batch_command(*arguments: object, address: str) -> list[str]:
    return command("batch", *arguments, "--ray", address)


def start(folder: Path, *arguments: object, address: str) -> subprocess.Popen[str]:
    """Start `nanoinfer batch` on a cluster; its stderr is in the file `err`."""
    with (folder / "err").open("a") as err:
        return subprocess.Popen(
            batch_command(*arguments, address=address), cwd=folder, env=one_thread() | LOOPBACK, text=True,
            stdin=subprocess.DEVNULL, stdout=err, stderr=err, start_new_session=True,
        )  # fmt: skip


def until(happens: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_SEC
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def grows(path: Path, size: int, process: subprocess.Popen[str]) -> None:
    """Wait until a file has more than so many bytes, or the process has ended."""
    until(lambda: (path.exists() and path.stat().st_size > size) or process.poll() is not None, f"{path} does not grow")


def workers(cluster: Any) -> list[int]:
    """Return the ids of the processes that generate."""
    found = []
    for node in (cluster.head_node, *cluster.worker_nodes):
        for pid in children(node.all_processes["raylet"][0].process.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::LineActor"):
                    found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Return the ids of a process's children, and theirs."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen for TCP, as /proc has them: "0100007F:1F90" is 127.0.0.1:8080."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(path))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found
