"""Asks /health again and again over one connection until standard input ends, and prints the latencies as JSON.

A process of its own, so that no other thread of a client delays it:

    python tests/helpers/health_probe.py 127.0.0.1 8000

The first line of its output says that it is connected.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from contextlib import suppress

PAUSE_SEC = 0.01
NUM_WORST = 10


def main(host: str, port: int) -> None:
    """Ask until standard input ends."""
    request = f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    connection: socket.socket | None = None
    found: list[tuple[float, float]] = []
    num_lost = 0
    while not select.select([sys.stdin], [], [], PAUSE_SEC)[0]:
        if connection is None:
            connection = socket.create_connection((host, port), timeout=120)
        at, began = time.time(), time.perf_counter()
        answer = b""
        with suppress(ConnectionError):
            connection.sendall(request)
            while not answer.endswith(b"\r\n\r\n") and (part := connection.recv(4096)):
                answer += part
        found.append((time.perf_counter() - began, at))
        if len(found) == 1:
            print("connected", flush=True)
        if not answer.startswith(b"HTTP/1.1 200 "):
            num_lost += 1
            connection.close()
            connection = None
    print(json.dumps({"num": len(found), "num_lost": num_lost, **quantiles([latency for latency, _ in found]),
                      "worst": sorted(found)[: -NUM_WORST - 1 : -1]}))  # fmt: skip


def quantiles(latencies: list[float]) -> dict[str, float]:
    """Return quantiles over the moments at which a client may ask: one in each PAUSE_SEC.

    An answer that takes a second stands for the hundred that would have been asked for meanwhile.
    """
    every = sorted(latency - k * PAUSE_SEC for latency in latencies for k in range(int(latency / PAUSE_SEC) + 1))
    return {f"p{100 * q:g}_sec": every[int(q * len(every))] for q in (0.5, 0.99, 0.999)}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
