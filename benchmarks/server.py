"""Measure a server under load: output tokens/s, time to first token and gaps between tokens, with many streams.

    python benchmarks/server.py [MODEL] [--rounds N] [--streams 64] [--peer "COMMAND ..."]

It starts `nanoinfer serve MODEL` (random:gpt2 in int8 unless given; a GGUF file runs as it is), sends the same traffic
to it and to the library in this process, and compares their rates. Prompts are of 16 to 128 random tokens, outputs of
32 to 96. The client is this process: for the server it is one of its own. --peer is the command of another
OpenAI-compatible server on port 8123, for example llama.cpp's `llama-server -m MODEL --port 8123 -np 64 -c 16384`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanoinfer import LLM, SamplingParams

PEER_PORT = 8123


def options_for(model: str) -> dict[str, str]:
    """Return the engine's options: a GGUF file runs in the bits it has."""
    return {"engine": "native"} | ({} if model.endswith(".gguf") else {"dtype": "float32", "quantization": "int8"})


@dataclass
class Stream:
    """When the chunks of one stream arrived, and how many tokens it has."""

    start: float = 0.0
    chunks: list[float] = field(default_factory=list)
    num_tokens: int = 0


def traffic(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Return (prompt, number of output tokens) of each request."""
    rng = np.random.default_rng(seed)
    shapes = zip(rng.integers(16, 129, count), rng.integers(32, 97, count), strict=True)
    return [(rng.integers(0, 49000, n).tolist(), int(m)) for n, m in shapes]


async def one(host: str, port: int, model: str, prompt: list[int], max_tokens: int) -> Stream:
    """Send one streaming request over a connection of its own and read its events."""
    stream = Stream(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("choices"):
                stream.chunks.append(time.perf_counter())
            if event.get("usage"):
                stream.num_tokens = event["usage"]["completion_tokens"]
    writer.close()
    if stream.num_tokens != max_tokens:
        raise SystemExit(f"a stream has {stream.num_tokens} tokens, {max_tokens} were asked for")
    return stream


async def load(port: int, model: str, requests: list[tuple[list[int], int]]) -> tuple[float, list[Stream]]:
    """Send all requests at once; return the seconds until all have ended, and their streams."""
    start = time.perf_counter()
    streams = await asyncio.gather(*(one("127.0.0.1", port, model, *r) for r in requests))
    return time.perf_counter() - start, streams


def report(name: str, seconds: float, streams: list[Stream]) -> float:
    """Print one line; return output tokens/s."""
    ttft = np.array([s.chunks[0] - s.start for s in streams]) * 1e3
    gaps = np.concatenate([np.diff(s.chunks) for s in streams]) * 1e3
    rate = sum(s.num_tokens for s in streams) / seconds
    (t50, t99), (g50, g99) = (np.percentile(x, [50, 99]) for x in (ttft, gaps))
    print(
        f"{name}: {rate:,.0f} tokens/s; TTFT {t50:,.0f} ms (p99 {t99:,.0f}), gap {g50:.0f} ms (p99 {g99:.0f}, most"
        f" {gaps.max():.0f})",
        flush=True,
    )
    return rate


@contextmanager
def ours(model: str, streams: int) -> Iterator[int]:
    """Start `nanoinfer serve` and yield its port."""
    options = [f"--{name}={value}" for name, value in options_for(model).items()]
    command = [sys.executable, "-m", "nanoinfer", "serve", model, "--port=0", f"--max-num-seqs={streams}", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)) is not None:
                yield int(found[1])
                return
        raise SystemExit("nanoinfer serve did not start")
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def peer(command: str) -> Iterator[int]:
    """Start another server and yield its port when it answers."""
    process = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                asyncio.run(load(PEER_PORT, "model", [([1, 2, 3], 2)]))
                break
            except (OSError, SystemExit):
                time.sleep(0.1)
        yield PEER_PORT
    finally:
        process.terminate()
        process.wait(60)


def library(llm: LLM, requests: list[tuple[list[int], int]]) -> float:
    """Return the library's output tokens/s with the same traffic."""
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(o.check().outputs[0].token_ids) for o in outputs) / seconds


def main() -> None:
    """Print one line for each round and server, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--peer")
    given = parser.parse_args()
    options: dict[str, Any] = options_for(given.model)
    llm = LLM(given.model, max_num_seqs=min(given.streams, 64), **options)
    rates: dict[str, list[float]] = {}
    for i in range(given.rounds):
        requests = traffic(given.streams, seed=i)
        rates.setdefault("library", []).append(library(llm, requests))
        print(f"library: {rates['library'][-1]:,.0f} tokens/s", flush=True)
        with ours(given.model, min(given.streams, 64)) as port:
            asyncio.run(load(port, given.model, [([1], 2)]))
            rates.setdefault("server", []).append(report("server", *asyncio.run(load(port, given.model, requests))))
        if given.peer:
            with peer(given.peer) as port:
                rates.setdefault("peer", []).append(report("peer", *asyncio.run(load(port, "model", requests))))
    for name in rates.keys() - {"server"}:
        ratios = [a / b for a, b in zip(rates["server"], rates[name], strict=True)]
        print(f"server / {name}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
