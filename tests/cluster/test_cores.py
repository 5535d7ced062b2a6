"""Which cores a replica runs on."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")

from nanoinfer import NanoinferError
from nanoinfer.cluster import local
from nanoinfer.cluster.local import plan_cores
from nanoinfer.server.config import ClusterConfig


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, of which this process has six."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6}, raising=False)
    monkeypatch.setattr(local, "num_cpus", lambda: 6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[]]),
        ({"cores_per_replica": 2}, [[0, 1]]),
        ({"replicas": 2}, [[0, 1, 2], [4, 5, 6]]),
        ({"replicas": 2, "cores_per_replica": 2}, [[0, 1], [2, 4]]),
        ({"replicas": 4}, [[0], [1], [2], [4]]),
        ({"replicas": 7}, [[0], [1], [2], [4], [5], [6], [0]]),
    ],
)
def test_cores_of_each_replica(options: dict[str, int], expected: list[list[int]]) -> None:
    assert plan_cores(ClusterConfig(**options)) == expected


def test_a_limit_of_cpu_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_cpus", lambda: 2)
    assert plan_cores(ClusterConfig(replicas=2)) == [[0], [1]]


def test_more_cores_than_there_are() -> None:
    with pytest.raises(NanoinferError, match="replicas=2 times cores_per_replica=4 is 8 cores and this process has 6"):
        plan_cores(ClusterConfig(replicas=2, cores_per_replica=4))
