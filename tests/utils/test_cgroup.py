"""The limits of a container: threads, and the memory for keys and values, are those of its control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanoinfer.engines import devices
from nanoinfer.utils import environment

MIB = 1 << 20


class Groups:
    """Control groups in a folder: of a container, which sees its own as the root, unless `own` is another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, own: str = "0::/\n") -> None:
        self.folder = folder / "cgroup"
        (folder / "own").write_text(own)
        monkeypatch.setattr(environment, "_GROUPS", self.folder)
        monkeypatch.setattr(environment, "_OWN", folder / "own")

    def write(self, group: str = "", **files: str) -> None:
        (self.folder / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.folder / group / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_without_limits_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(tmp_path, monkeypatch)
    groups.write(cpu_max="max 100000", memory_max="max", memory_current="5", memory_stat="")
    assert (environment.cpu_limit(), environment.container_memory()) == (None, None)
    assert environment.num_cpus() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("own", ["", "0::/../other\n", "4:memory:/docker/x\n", "nonsense"])
def test_groups_that_cannot_be_seen_set_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    groups = Groups(tmp_path, monkeypatch, own)
    groups.write(cpu_max="100000 100000", memory_max="1000", memory_current="5", memory_stat="")
    groups.write("../other", cpu_max="100000 100000")
    assert (environment.cpu_limit(), environment.container_memory()) == (None, None)


@pytest.mark.parametrize(
    "quota, cpus, threads", [("200000 100000", 2.0, 2), ("150000 100000", 1.5, 2), ("20000 100000", 0.2, 1)]
)
def test_threads_are_those_of_the_cpu_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: float, threads: int
) -> None:
    Groups(tmp_path, monkeypatch).write(cpu_max=quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert environment.cpu_limit() == cpus
    assert environment.num_cpus() == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7})
    assert environment.num_cpus() == 1


def test_free_memory_is_what_the_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(tmp_path, monkeypatch)
    stat = f"anon {40 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}"
    groups.write(memory_max=str(100 * MIB), memory_current=str(70 * MIB), memory_stat=stat)
    assert environment.container_memory() == devices.free_memory("cpu") == 60 * MIB
    groups.write(memory_current=str(200 * MIB))
    assert devices.free_memory("cpu") == 0
    groups.write(memory_max=str(1 << 60))
    assert 0 < devices.free_memory("cpu") < 1 << 50


def test_the_least_limit_of_all_groups_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(tmp_path, monkeypatch, "1:name=systemd:/x\n0::/user/service\n")
    groups.write(cpu_max="100000 100000")  # the root is a parent, too
    groups.write("user", cpu_max="400000 100000", memory_max="900", memory_current="100", memory_stat="")
    groups.write("user/service", cpu_max="300000 100000", memory_max="max", memory_current="50", memory_stat="")
    assert environment.cpu_limit() == 1.0
    assert environment.container_memory() == 800
