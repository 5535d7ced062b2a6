"""How long a process takes from its start to the first token of the built-in model, by engine.

    python benchmarks/start.py

The clock starts before the process and stops at its first byte of output; medians of several rounds, interleaved.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ENGINES = ("static", "native")
ROUNDS = 5


def first_byte_sec(engine: str) -> float:
    """Return the seconds until `nanoinfer generate` prints something."""
    call = "from nanoinfer.cli import main; main()"
    command = [sys.executable, "-c", call, "generate", "ROMEO:", "--engine", engine, "--max-tokens", "1"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
    if not first or process.returncode:
        raise SystemExit(f"engine {engine} printed nothing (exit code {process.returncode})")
    return seconds


def main() -> None:
    """Print the medians."""
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for _ in range(ROUNDS):
        for engine in ENGINES:
            seconds[engine].append(first_byte_sec(engine))
    for engine, values in seconds.items():
        print(f"{engine:8} {statistics.median(values):.2f} s  (from {min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
