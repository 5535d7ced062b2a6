"""`nanoinfer serve --ray local`: replicas as deployments of Ray Serve, which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the extra test is not installed")

import helpers.ray_cluster  # noqa: E402, F401  # before ray, which reads the environment that it sets
from helpers.replica_servers import TIMEOUT, metric, until  # noqa: E402
from helpers.server_process import ServerProcess, serving  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.openai_protocol import COMPLETIONS  # noqa: E402

pytest.importorskip("ray.serve", reason="the extra cluster is not installed")
LONG: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "temperature": 1.0, "seed": 3}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="replicas are looked up in /proc")]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("shakespeare", "--ray", "local", "--replicas", "2") as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("shakespeare")


def processes(server: ServerProcess, name: str) -> list[int]:
    """Return the processes below a server whose command begins so."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue

    def is_below(pid: int) -> bool:
        while pid > 1 and pid != server.process.pid:
            pid = parents.get(pid, 0)
        return pid == server.process.pid

    return [pid for pid, command in commands.items() if name in command and is_below(pid)]


def replicas(server: ServerProcess) -> list[int]:
    return processes(server, "ray::ServeReplica")


def both(server: ServerProcess) -> list[int]:
    until(lambda: metric(server, "nanoinfer:replicas{") == 2 and len(replicas(server)) == 2)
    return replicas(server)


def complete(server: ServerProcess, prompt: str, **fields: Any) -> str:
    response = httpx.post(server.url + COMPLETIONS, json={"prompt": prompt, **fields}, timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def expected(llm: LLM, prompts: list[str], **fields: Any) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(prompts, [SamplingParams(**fields)] * len(prompts))]


def test_answers_are_the_librarys_and_all_replicas_take_part(server: ServerProcess, llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 5, "temperature": 1.0}
    prompts = [f"{i} to be" for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: complete(server, p, **fields), prompts))
    assert found == expected(llm, prompts, **fields)
    lines = httpx.get(server.url + "/metrics", timeout=TIMEOUT).text.splitlines()
    counts = [float(x.rpartition(" ")[2]) for x in lines if x.startswith("nanoinfer:replica_generation_tokens_total{")]
    assert len(counts) == 2
    assert min(counts) > 0


def test_it_says_one_line(server: ServerProcess) -> None:
    assert len(server.lines) == 1, server.lines
    assert "(model: shakespeare; replicas: 2; connections: " in server.lines[0]


def test_every_port_is_on_loopback(server: ServerProcess) -> None:
    found = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("ss is not installed")
    ours = {*processes(server, ""), server.process.pid}
    listening = [line.split() for line in found.stdout.splitlines() if any(f"pid={pid}," in line for pid in ours)]
    assert len(listening) > 5
    addresses = {fields[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for fields in listening}
    assert addresses <= {"127.0.0.1", "::1"}


def test_a_killed_replica_loses_no_request_and_is_replaced(server: ServerProcess, llm: LLM) -> None:
    before = both(server)
    prompts = [f"{i} so" for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(complete, server, prompt, **LONG) for prompt in prompts]
        until(lambda: metric(server, "nanoinfer:num_requests_running{") > 4 or all(w.done() for w in waiting))
        os.kill(before[0], signal.SIGKILL)
        assert [w.result() for w in waiting] == expected(llm, prompts, **LONG)
    assert before[0] not in both(server)


def test_a_stream_is_continued(server: ServerProcess, llm: LLM) -> None:
    both(server)
    text, killed = "", False
    body, headers = {"prompt": "O Romeo", "stream": True, **LONG}, {"X-Continue-Stream": "1"}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=TIMEOUT, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if not killed:
                    killed = True
                    for pid in replicas(server):
                        os.kill(pid, signal.SIGKILL)
    assert [text] == expected(llm, ["O Romeo"], **LONG)
    both(server)


def test_reloading_replaces_the_replicas_without_an_error(server: ServerProcess, llm: LLM) -> None:
    before = both(server)
    texts = []
    server.process.send_signal(signal.SIGHUP)
    with ThreadPoolExecutor(4) as pool:
        end = time.monotonic() + TIMEOUT
        while not any("was loaded again" in line for line in server.lines):
            assert time.monotonic() < end, server.lines
            texts += list(pool.map(lambda _: complete(server, "a", max_tokens=8, seed=1), range(4)))
    assert set(texts) == set(expected(llm, ["a"], max_tokens=8, seed=1))
    assert not set(before) & set(both(server))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shakespeare", "--max-replicas", "2"], "max_replicas=2 needs ray"),
        (["shakespeare", "--ray", "local", "--replicas", "3", "--max-replicas", "2"], "max_replicas=2 is less than"),
        (["shakespeare", "--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1 does not answer"),
        (["nothing/there.gguf", "--ray", "local"], "node 127.0.0.1"),
        (["shakespeare", "--ray", "local", "--replicas", "99"], "99 replicas of 1 CPUs do not fit into the cluster"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "nanoinfer", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
