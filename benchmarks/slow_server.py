"""`nanoinfer serve` with an engine of a given speed that takes no CPU: for measuring what is around the engines.

    python benchmarks/slow_server.py STEP_MS MODEL [options of `nanoinfer serve --replicas N`]

A step of engine native first sleeps so long. So four replicas of a small model behave on two cores as those of a larger
one on four machines do, and what the front costs is measured alone.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from nanoinfer.cli import main
from nanoinfer.cluster import host, local
from nanoinfer.engines.native import NativeEngine


def slow_down(step_ms: float) -> None:
    """Let every step sleep first."""
    extend = NativeEngine.extend

    def slow(self: NativeEngine, batch: Any) -> Any:
        time.sleep(step_ms / 1e3)
        return extend(self, batch)

    NativeEngine.extend = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "host":
        slow_down(float(sys.argv[2]))
        host.main()
    else:
        local.HOST_COMMAND = (sys.executable, __file__, "host", sys.argv[1])  # type: ignore[assignment]
        sys.exit(main(["serve", *sys.argv[2:]]))
