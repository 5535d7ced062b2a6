"""Streams of a server on a Ray cluster of several nodes, while replicas and nodes are killed at random moments."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the extra test is not installed")

from helpers.ray_cluster import NODE, children, cluster, until  # noqa: E402  # before ray
from helpers.replica_servers import metric  # noqa: E402
from helpers.server_process import ServerProcess, serving  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.openai_protocol import COMPLETIONS  # noqa: E402

pytest.importorskip("ray.serve", reason="the extra cluster is not installed")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replicas are looked up in /proc")
FIELDS: dict[str, Any] = {"max_tokens": 48, "temperature": 1.0, "seed": 7, "ignore_eos": True}
CONCURRENCY = 16


def replicas(made: Any) -> list[int]:
    """Return the processes of the replicas on all nodes."""
    found = []
    for node in (made.head_node, *made.worker_nodes):
        for pid in children(node.all_processes["raylet"][0].process.pid):
            with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if file.read().startswith(b"ray::ServeReplica"):
                    found.append(pid)
    return found


def num_replicas(server: ServerProcess) -> float:
    return metric(server, "nanoinfer:replicas{")


async def stream(client: Any, url: str, prompt: str, texts: list[str], i: int) -> None:
    """Append what arrives to texts[i]."""
    body, headers = {"prompt": prompt, "stream": True, **FIELDS}, {"X-Continue-Stream": "1"}
    async with client.stream("POST", url + COMPLETIONS, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                texts[i] += event["choices"][0]["text"]


async def streams(url: str, prompts: list[str], texts: list[str]) -> None:
    """Read the texts of streams, CONCURRENCY at a time."""
    waiting = iter(enumerate(prompts))

    async def one_after_another(client: Any) -> None:
        for i, prompt in waiting:
            await stream(client, url, prompt, texts, i)

    async with httpx.AsyncClient(timeout=240) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(CONCURRENCY)))


@pytest.mark.nightly_if(lambda seed: seed > 0)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_streams_are_those_of_an_undisturbed_run(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [f"{i} {rng.choice(('king', 'queen', 'fool'))}" for i in range(500 if seed else 100)]
    params = [SamplingParams(**FIELDS)] * len(prompts)
    expected = [o.outputs[0].text for o in LLM("shakespeare").generate(prompts, params)]
    with (
        cluster(0, 1, 1) as made,
        serving("shakespeare", "--ray", made.address, "--replicas", "2") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        texts, before = [""] * len(prompts), 0
        running = pool.submit(asyncio.run, streams(server.url, prompts, texts))
        while not running.done():
            with suppress(TimeoutError):
                running.result(rng.uniform(1.0, 3.0))
                break
            if (received := sum(map(len, texts))) > before:  # a busy machine may need long to start a replica
                before = received
                disturb(made, rng)  # in the main thread: a node sets a handler of signals
        running.result()
        assert texts == expected
        until(lambda: num_replicas(server) == 2, "the replicas do not come back")


def disturb(made: Any, rng: random.Random) -> None:
    """Kill a replica or a node, and start another node in its place."""
    found = replicas(made)
    if found and rng.random() < 0.7:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)
        time.sleep(0.1)
    elif len(made.worker_nodes) == 2:
        made.remove_node(rng.choice(sorted(made.worker_nodes, key=lambda node: node.unique_id)), allow_graceful=False)
        made.add_node(**NODE, num_cpus=1)


@pytest.mark.slow
def test_the_replicas_end_when_the_front_is_killed() -> None:
    with cluster(0, 1, 1) as made:
        with serving("shakespeare", "--ray", made.address, "--replicas", "2") as server:
            assert num_replicas(server) == 2
            server.process.kill()
            server.wait()
        until(lambda: not replicas(made), "the replicas go on")
        with serving("shakespeare", "--ray", made.address, "--replicas", "2") as server:  # their CPUs are free
            assert num_replicas(server) == 2
