"""Servers with replicas, for tests: their metrics, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from helpers.server_process import ServerProcess

TIMEOUT = 120.0


def until(condition: Callable[[], Any]) -> Any:
    """Return what a condition returns when that is true."""
    end = time.monotonic() + TIMEOUT
    while not (found := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
    return found


def metric(server: ServerProcess, start: str) -> float:
    """Return the sum of the samples whose lines begin so."""
    import httpx

    lines = httpx.get(server.url + "/metrics", timeout=TIMEOUT).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))
