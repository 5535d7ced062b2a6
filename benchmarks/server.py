"""Measure a server under load: output tokens/s, time to first token and gaps between tokens, with many streams.

    python benchmarks/server.py [MODEL] [--rounds N] [--streams 64] [--options="--replicas 2"] ...
        [--peer "COMMAND ..."] ...

It starts `nanoinfer serve MODEL`, sends the same traffic to it and to the library in this process, and compares tokens
and rates. Each gets other traffic of the same kind first, so that it has used the memory of its caches before. MODEL is
random:gpt2 in int8 unless given; a GGUF file runs as it is, a folder in bfloat16. Prompts are of 16 to 128 random
tokens, outputs of 32 to 96. The client is this process, for each server one of its own; it takes what has arrived once
a millisecond and reads the events after the measurement, so that it takes little of the cores that decode. --options
are those of another `nanoinfer serve`, which gets the same traffic. --peer is the command of another OpenAI-compatible
server that serves the same model as `model` on port 8123, for example

    llama-server -m MODEL --port 8123 -np 64 -c 16384
    vllm serve MODEL --port 8123 --served-model-name model --dtype bfloat16 --max-model-len 512
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer import LLM, SamplingParams

PEER_PORT = 8123
START_SEC = 300  # that a peer may take to start
POLL_SEC = 0.001  # between two looks at the connections: waking up for each chunk would interrupt the server's threads

Request = tuple[list[int], int]


def options_for(model: str) -> dict[str, str]:
    """Return the engine's options for a model."""
    if model.endswith(".gguf"):
        return {"engine": "native"}
    if Path(model).is_dir():
        return {"engine": "native", "dtype": "bfloat16"}
    return {"engine": "native", "dtype": "float32", "quantization": "int8"}


@dataclass
class Stream:
    """The response to one request: what was received when, and what it means, which is read after the measurement."""

    start: float
    received: list[tuple[float, bytes]] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)  # when chunks arrived that have a choice
    token_ids: list[int] = field(default_factory=list)  # if the server sends them
    num_tokens: int = 0

    def read(self) -> None:
        """Read the events."""
        left = b""
        for at, data in self.received:
            *lines, left = (left + data).split(b"\n")
            for event in (json.loads(line[6:]) for line in lines if line.startswith(b"data: {")):
                if event.get("choices"):
                    self.chunks.append(at)
                    self.token_ids += event["choices"][0].get("token_ids") or []
                self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)


def traffic(count: int, seed: int) -> list[Request]:
    """Return (prompt, number of output tokens) of each request."""
    rng = np.random.default_rng(seed)
    shapes = zip(rng.integers(16, 129, count), rng.integers(32, 97, count), strict=True)
    return [(rng.integers(0, 49000, n).tolist(), int(m)) for n, m in shapes]


def send(port: int, model: str, prompt: list[int], max_tokens: int) -> tuple[socket.socket, Stream]:
    """Send one streaming request over a connection of its own, which the server closes at its end."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    stream = Stream(time.perf_counter())
    connection.sendall(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    return connection, stream


def load(port: int, model: str, requests: list[Request]) -> tuple[float, list[Stream]]:
    """Send all requests at once; return the seconds until all have ended, and their streams."""
    start = time.perf_counter()
    sent = [send(port, model, *request) for request in requests]
    with selectors.DefaultSelector() as selector:
        for connection, stream in sent:
            selector.register(connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            time.sleep(POLL_SEC)
            for key, _ in selector.select(0):
                assert isinstance(key.fileobj, socket.socket)
                if data := key.fileobj.recv(1 << 16):
                    key.data.received.append((time.perf_counter(), data))
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    seconds = time.perf_counter() - start
    for (_, stream), (_, max_tokens) in zip(sent, requests, strict=True):
        stream.read()
        if stream.num_tokens != max_tokens:
            raise SystemExit(f"a stream has {stream.num_tokens} tokens, {max_tokens} were asked for")
    return seconds, [stream for _, stream in sent]


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
def ours(model: str, streams: int, more: str = "") -> Iterator[int]:
    """Start `nanoinfer serve` with `more` options and yield its port."""
    options = [*(f"--{name}={value}" for name, value in options_for(model).items()), *shlex.split(more)]
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
        until = time.monotonic() + START_SEC
        while True:
            try:
                load(PEER_PORT, "model", [([1, 2, 3], 2)])
                break
            except (OSError, SystemExit):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"no answer on port {PEER_PORT} from: {command}") from None
                time.sleep(0.1)
        yield PEER_PORT
    finally:
        process.terminate()
        process.wait(60)


def library(llm: LLM, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Return the library's output tokens/s with the same traffic, and the tokens."""
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = [o.check().outputs[0].token_ids for o in outputs]
    return sum(map(len, tokens)) / seconds, tokens


def main() -> None:
    """Print one line for each round and server, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--options", action="append", default=[])
    parser.add_argument("--peer", action="append", default=[])
    given = parser.parse_args()
    options: dict[str, Any] = options_for(given.model)
    llm = LLM(given.model, max_num_seqs=min(given.streams, 64), **options)
    first = traffic(given.streams, seed=given.rounds)
    library(llm, first)
    rates: dict[str, list[float]] = {}
    num_seqs = min(given.streams, 64)
    with ExitStack() as stack:
        servers = {"server": stack.enter_context(ours(given.model, num_seqs))}
        for more in given.options:
            servers[f"server {more}"] = stack.enter_context(ours(given.model, num_seqs, more))
        for port in servers.values():
            load(port, given.model, first)
        for i in range(given.rounds):
            requests = traffic(given.streams, seed=i)
            rate, expected = library(llm, requests)
            rates.setdefault("library", []).append(rate)
            print(f"library: {rate:,.0f} tokens/s", flush=True)
            for name, port in servers.items():
                seconds, streams = load(port, given.model, requests)
                if [stream.token_ids for stream in streams] != expected:
                    raise SystemExit(f"the tokens of {name} are not the library's")
                rates.setdefault(name, []).append(report(name, seconds, streams))
            for command in given.peer:
                name = Path(shlex.split(command)[0]).name
                with peer(command) as peer_port:
                    load(peer_port, "model", first)
                    rates.setdefault(name, []).append(report(name, *load(peer_port, "model", requests)))
    for name, rate_of in rates.items():
        if name != "server":
            ratios = [a / b for a, b in zip(rates["server"], rate_of, strict=True)]
            if name.startswith("server "):
                ratios = [1 / ratio for ratio in ratios]
                print(f"{name} / server", end=": ")
            else:
                print(f"server / {name}", end=": ")
            print(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
