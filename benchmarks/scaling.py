"""A model of the throughput of many replicas: checked with engines of a given speed, and what it says for many nodes.

    python benchmarks/scaling.py check                 1, 2 and 4 replicas of an engine that sleeps, beside the model
    python benchmarks/scaling.py predict [--front-us US] [--call-ms MS]    10, 100 and 1,000 nodes (docs/scaling.md)

A request has P prompt tokens, a share h of which is in the cache, and N output tokens. A step takes a ms, and b ms for
each of its tokens; S sequences decode together. A replica ends after M seconds on average and is back after L seconds.
Its S streams are sent again: their prompts are computed, and on average half of their outputs generated, a second time.

    engine time of a request   t = (1 - h) P b + N (a / S + b)
    requests/s of a replica    r = 1/t * M / (M + L) * (1 - (S (P + N/2) b + a N/2) / M)
    requests/s of R replicas   min(R r, what the fronts pass on)

A front takes `front_us` of one core for each output token of a stream, and `call_ms` for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from replicas import metric, replicas_of, server

SECONDS = 15
WORDS = ["the", "king", "and", "queen", "of", "a", "far", "land", "came", "to", "speak", "with", "their", "people"]


@dataclass(frozen=True)
class Load:
    """Requests, and an engine that answers them. Times in ms, but for `lasts` and `loads` in seconds."""

    prompt: float = 32.0
    hits: float = 0.0
    output: int = 32
    step: float = 10.0
    token: float = 0.25
    sequences: int = 8
    lasts: float = float("inf")
    loads: float = 0.0
    front_us: float = 55.0
    call_ms: float = 0.5

    @property
    def request_ms(self) -> float:
        """Engine time of a request."""
        return (1 - self.hits) * self.prompt * self.token + self.output * (self.step / self.sequences + self.token)

    @property
    def replica_rate(self) -> float:
        """Requests/s of a replica."""
        seconds = self.request_ms / 1e3
        up = 1.0 if self.lasts == float("inf") else self.lasts / (self.lasts + self.loads)
        again = (
            self.sequences
            * (self.prompt * self.token + self.output / 2 * (self.step / self.sequences + self.token))
            / 1e3
        )
        return up * max(0.0, 1 - again / self.lasts) / seconds

    @property
    def front_rate(self) -> float:
        """Requests/s of a front, on one core."""
        return 1e3 / (self.call_ms + self.output * self.front_us / 1e3)

    def rate(self, replicas: int, fronts: int = 1) -> float:
        """Requests/s of several replicas behind several fronts."""
        return min(replicas * self.replica_rate, fronts * self.front_rate)


def prompts(count: int, shared: int) -> list[str]:
    """Return prompts of about 32 tokens; with `shared`, so many different beginnings of most of it."""
    rng = random.Random(0)
    starts = [" ".join(rng.choices(WORDS, k=24)) for _ in range(shared)]
    return [f"{rng.choice(starts) if shared else ' '.join(rng.choices(WORDS, k=24))} {rng.random():.3f}"
            for _ in range(count)]  # fmt: skip


async def run(url: str, texts: list[str], load: Load, concurrency: int) -> float:
    """Return requests/s of streams, so many at a time."""
    waiting = iter(texts)
    start = time.perf_counter()

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for text in waiting:
            body: dict[str, Any] = {"prompt": text, "max_tokens": load.output, "ignore_eos": True, "stream": True}
            is_whole = False
            while not is_whole:  # the stream of a replica that was killed ends with an error: it is sent again
                async with client.stream("POST", url + "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    is_whole = (await response.aread()).endswith(b"[DONE]\n\n")

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(concurrency)))
    return len(texts) / (time.perf_counter() - start)


def check() -> None:
    """Print measured and predicted requests/s."""
    print("| replicas | prompts | a replica is killed | h | requests/s | measured / model | front, us per token |")
    print("|--:|---|---|--:|--:|--:|--:|")
    for replicas in (1, 2, 4):
        for shared, kill_sec in ((0, 0.0), (16, 0.0), (0, 6.0)):
            if replicas > 1 or not kill_sec:
                measure(replicas, shared, kill_sec)


def measure(replicas: int, shared: int, kill_sec: float) -> None:
    """Print one row."""
    load = Load(lasts=kill_sec * replicas or float("inf"))
    slow = (str(Path(__file__).with_name("slow_server.py")), str(load.step), str(load.token), "shakespeare-draft")
    options = [f"--max-num-seqs={load.sequences}", "--kv-cache-memory=32MiB"]
    options += [f"--replicas={replicas}"] if replicas > 1 else ["--cores-per-replica=1"]
    texts = prompts(round(SECONDS * load.rate(replicas)), shared)
    with server(slow, options) as (url, pid):

        async def disturbed() -> float:
            running = asyncio.create_task(run(url, texts, load, 2 * load.sequences * replicas))
            rng = random.Random(1)
            while kill_sec and not running.done():
                await asyncio.wait([running], timeout=kill_sec)
                if not running.done() and (pids := replicas_of(pid)):
                    os.kill(rng.choice(pids), signal.SIGKILL)
            return await running

        before = cpu_sec(pid)
        rate = asyncio.run(disturbed())
        front_us = 1e6 * (cpu_sec(pid) - before) / (len(texts) * load.output)
        asked, found = (metric(url, f"nanoinfer:prefix_cache_{name}_total") for name in ("queries", "hits"))
    if not kill_sec:  # else the counters of those that ended are missing
        load = replace(load, hits=found / asked, prompt=asked / len(texts))
    kind = f"{shared} shared prefixes" if shared else "all different"
    print(
        f"| {replicas} | {kind} | {f'every {kill_sec:g} s' if kill_sec else ''} | {load.hits:.0%} | {rate:,.1f} |"
        f" {rate / load.rate(replicas):.2f} | {front_us:.0f} |",
        flush=True,
    )


def cpu_sec(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def predict(front_us: float, call_ms: float) -> None:
    """Print requests/s and the number of fronts for many nodes."""
    cases = {
        "chat: 500 + 200 tokens": Load(500, 0.6, 200, 8.0, 0.4, 32, 86400.0, 10.0, front_us, call_ms),
        "the same without prefix hits": Load(500, 0.0, 200, 8.0, 0.4, 32, 86400.0, 10.0, front_us, call_ms),
        "short outputs: 500 + 8": Load(500, 0.6, 8, 8.0, 0.4, 32, 86400.0, 10.0, front_us, call_ms),
        "chat, a node ends every hour": Load(500, 0.6, 200, 8.0, 0.4, 32, 3600.0, 60.0, front_us, call_ms),
    }
    print("| load | nodes | requests/s of the replicas | tokens/s | fronts | node hours per million requests |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, load in cases.items():
        for nodes in (10, 100, 1000):
            rate = nodes * load.replica_rate
            fronts = -(-rate // load.front_rate)
            print(
                f"| {name} | {nodes:,} | {rate:,.0f} | {rate * load.output:,.0f} | {fronts:.0f} |"
                f" {1e6 / load.replica_rate / 3600:,.0f} |"
            )


def main() -> None:
    """Check or predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "predict"))
    parser.add_argument("--front-us", type=float, default=Load.front_us)
    parser.add_argument("--call-ms", type=float, default=Load.call_ms)
    given = parser.parse_args()
    if given.what == "check":
        check()
    else:
        predict(given.front_us, given.call_ms)


if __name__ == "__main__":
    main()
