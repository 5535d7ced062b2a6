"""Measure the CPU time that the server's event loop takes for a token of a stream, and for a request.

    python benchmarks/event_loop.py [MODEL] [--streams 64] [--rounds 5] [--python OTHER/bin/python]

The engine sleeps 10 ms in each step (slow_server.py), so that little else runs. In each round, all streams have SHORT
and then LONG tokens: the difference is that of the tokens, the rest that of the requests. The kernel counts the time of
the loop's thread, system calls included. --python is that of another environment, whose package is measured in turn.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from server import Request, load

SHORT, LONG = 40, 200
STEP_MS = 10


@contextmanager
def serving(python: str, model: str, streams: int) -> Iterator[tuple[int, int]]:
    """Start a server with an engine that sleeps; yield its process id, which is that of the loop's thread, and port."""
    script = Path(__file__).with_name("slow_server.py")
    options = ("--engine=native", "--threads=1", "--port=0", f"--max-num-seqs={streams}")
    command = [python, str(script), str(STEP_MS), "0", model, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)) is not None:
                yield process.pid, int(found[1])
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


def cpu_us(thread: int) -> float:
    """Return the CPU time of a process's main thread in microseconds."""
    return int(Path(f"/proc/{thread}/task/{thread}/schedstat").read_text().split()[0]) / 1e3


def main() -> None:
    """Print microseconds per token and per request of each round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="shakespeare")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", action="append", default=[])
    given = parser.parse_args()
    pythons = [sys.executable, *given.python]
    found: list[list[float]] = [[] for _ in pythons]

    def requests(num_tokens: int) -> list[Request]:
        return [([1 + i, 2, 3], num_tokens) for i in range(given.streams)]

    with ExitStack() as stack:
        servers = [stack.enter_context(serving(python, given.model, given.streams)) for python in pythons]
        for _, port in servers:
            load(port, given.model, requests(SHORT))
        for _ in range(given.rounds):
            for i, (thread, port) in enumerate(servers):
                times = [cpu_us(thread)]
                for num_tokens in (SHORT, LONG):
                    load(port, given.model, requests(num_tokens))
                    times.append(cpu_us(thread))
                short, long = times[1] - times[0], times[2] - times[1]
                found[i].append((long - short) / (given.streams * (LONG - SHORT)))
                of_request = short / given.streams - SHORT * found[i][-1]
                print(f"{pythons[i]}: {found[i][-1]:.1f} us a token, {of_request:.0f} us a request", flush=True)
    for python, values in zip(pythons, found, strict=True):
        print(f"{python}: {statistics.median(values):.1f} us a token ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
