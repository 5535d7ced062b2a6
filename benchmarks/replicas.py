"""Measure several replicas of a model behind one port: cache hits, recovery, memory.

    python benchmarks/replicas.py hits        prefix hits of 2 replicas, beside those of 1
    python benchmarks/replicas.py recovery    seconds until the requests of a killed replica are answered by another
    python benchmarks/replicas.py memory      private memory of each replica

`server.py --options="--replicas 2"` compares the rate with that of one process; scaling.py has more of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

NUM_SHARED, NUM_REQUESTS, CONCURRENCY = 50, 1000, 8
READY = re.compile(r"listening on (http://\S+)")


@contextmanager
def server(command: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Start a server; yield its URL and its process id."""
    process = subprocess.Popen([sys.executable, *command, "--port=0", *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := READY.search(line):
                yield found[1], process.pid
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


SERVE = ("-m", "nanoinfer", "serve")


async def send(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> float:
    """Send requests, so many at a time; return the seconds until all are answered."""
    waiting = iter(bodies)
    start = time.perf_counter()

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for body in waiting:
            response = await client.post(url + "/v1/completions", json=body)
            response.raise_for_status()

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(concurrency)))
    return time.perf_counter() - start


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def hits() -> None:
    """Print the share of prompt tokens that are found in the cache."""
    rng = random.Random(0)
    words = ["the", "king", "and", "queen", "of", "a", "far", "land", "came", "to", "speak", "with", "their", "people"]
    shared = [" ".join(rng.choices(words, k=60)) for _ in range(NUM_SHARED)]
    prompts = [f"{rng.choice(shared)}. {' '.join(rng.choices(words, k=6))}" for _ in range(NUM_REQUESTS)]
    bodies = [{"prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in prompts]
    base = 0.0
    print(f"{NUM_REQUESTS} requests of {NUM_SHARED} shared prefixes, {CONCURRENCY} at a time")
    for replicas in (1, 2):
        options = [f"--replicas={replicas}", "--cores-per-replica=1"]
        with server((*SERVE, "shakespeare"), options) as (url, _):
            asyncio.run(send(url, bodies, CONCURRENCY))
            share = metric(url, "nanoinfer:prefix_cache_hits_total") / metric(
                url, "nanoinfer:prefix_cache_queries_total"
            )
        base = base or share
        print(f"{replicas} replicas: {share:.1%} of the prompt tokens, {share / base:.3f} of one replica's")


def replicas_of(pid: int) -> list[int]:
    """Return the processes of the replicas of a server."""
    return [r for host in _children(pid) for r in _children(host)]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def recovery() -> None:
    """Kill a replica while it answers 16 requests; print how much later they end than without."""
    body = {"prompt": "To be", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    late = []
    with server((*SERVE, "shakespeare"), ["--replicas=2"]) as (url, pid):
        for _ in range(5):
            usual = asyncio.run(send(url, [body] * 16, 16))

            async def disturbed(usual: float = usual) -> float:
                sending = asyncio.create_task(send(url, [body] * 16, 16))
                await asyncio.sleep(usual / 2)
                os.kill(replicas_of(pid)[0], signal.SIGKILL)
                return await sending

            late.append(asyncio.run(disturbed()) - usual)
            while metric(url, "nanoinfer:replicas") < 2:
                time.sleep(0.05)
    print(f"later by {statistics.median(late):.2f} s (median of {len(late)}; most {max(late):.2f} s)")


def memory() -> None:
    """Print the private memory of each replica after requests."""
    body = {"prompt": "To be", "max_tokens": 64, "temperature": 0}
    options = ["--replicas=2", "--quantization=int8", "--kv-cache-memory=64MiB"]
    with server((*SERVE, "random:gpt2"), options) as (url, pid):
        body["prompt"] = [1, 2, 3]  # type: ignore[assignment]
        asyncio.run(send(url, [body] * 16, 8))
        for i, replica in enumerate(replicas_of(pid)):
            lines = Path(f"/proc/{replica}/smaps_rollup").read_text().splitlines()
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
            private, resident = kib["Private_Dirty"] + kib["Private_Clean"], kib["Rss"]
            print(
                f"replica {i}: private {private / 1024:.0f} MiB (KV cache up to 64), resident {resident / 1024:.0f} MiB"
            )


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {"hits": hits, "recovery": recovery, "memory": memory}
    parser.add_argument("what", choices=runs)
    runs[parser.parse_args().what]()


if __name__ == "__main__":
    main()
