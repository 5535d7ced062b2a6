"""`nanoinfer serve` with an engine of a given speed that takes little CPU: to measure what is around the engines.

    python benchmarks/slow_server.py STEP_MS TOKEN_MS MODEL [options of `nanoinfer serve`, --replicas N among them]

A step of engine native first sleeps STEP_MS and TOKEN_MS for each new token. So four replicas of a small model behave
on two cores as those of a larger one on four machines do.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from nanoinfer.cli.app import run
from nanoinfer.cluster import host, local
from nanoinfer.engines.native import NativeEngine


def slow_down(step_ms: float, token_ms: float) -> None:
    """Let every step sleep first."""
    extend = NativeEngine.extend

    def slow(self: NativeEngine, batch: Any) -> Any:
        time.sleep((step_ms + token_ms * sum(batch.num_new)) / 1e3)
        return extend(self, batch)

    NativeEngine.extend = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "host":
        slow_down(float(sys.argv[2]), float(sys.argv[3]))
        host.main()
    else:
        slow_down(float(sys.argv[1]), float(sys.argv[2]))
        local.HOST_COMMAND = (sys.executable, __file__, "host", *sys.argv[1:3])
        sys.exit(run(["serve", *sys.argv[3:]]))
