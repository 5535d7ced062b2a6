"""`nanoinfer serve --ray local`: models as applications of Ray Serve."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the extra test is not installed")

import helpers.ray_cluster  # noqa: E402, F401  # before ray, which reads the environment that it sets
from helpers.models import TINY, make_folder  # noqa: E402
from helpers.replica_servers import TIMEOUT, until  # noqa: E402
from helpers.server_process import ServerProcess, serving  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.protocols.fields import CHAT, COMPLETIONS  # noqa: E402
from nanoinfer.server.config import ClusterConfig, ServerConfig  # noqa: E402

if find_spec("ray") is None:  # ray.serve takes seconds to import
    pytest.skip("the extra cluster is not installed", allow_module_level=True)
FIELDS: dict[str, Any] = {"max_tokens": 24, "seed": 5, "temperature": 1.0, "ignore_eos": True}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("ray_serve") / "tiny", replace(TINY, block_size=256))


@pytest.fixture(scope="module")
def server(folder: Path, nodes: Any) -> Iterator[ServerProcess]:
    (folder.parent / "chat.jinja").write_text(TEMPLATE)
    template = f"shakespeare={folder.parent / 'chat.jinja'}"
    with serving(folder, "shakespeare", "--chat-template", template, "--ray", nodes.address) as server:
        yield server


def expected(model: str, prompt: str) -> str:
    return LLM(model).generate(prompt, SamplingParams(**FIELDS))[0].outputs[0].text


@pytest.mark.parametrize("interval_sec", [0.02, 60.0])
def test_parts_of_a_body_are_collected_in_their_order(interval_sec: float) -> None:
    """Until the interval ends, and at the latest with the end of the body."""
    from nanoinfer.cluster.ray_serve import _Collected

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def respond() -> None:
        collected = _Collected(send, interval_sec)
        await collected({"type": "http.response.start", "status": 200})
        for i in range(6):
            await collected({"type": "http.response.body", "body": b"%d" % i, "more_body": True})
        while interval_sec < 1 and len(sent) < 2:
            await asyncio.sleep(0.001)
        await collected({"type": "http.response.body", "body": b"6", "more_body": True})
        await collected({"type": "http.response.body", "body": b""})

    asyncio.run(respond())
    bodies = [message["body"] for message in sent[1:]]
    assert bodies == ([b"012345", b"6", b""] if interval_sec < 1 else [b"0123456", b""])
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]


@pytest.mark.slow
def test_each_model_has_a_prefix(server: ServerProcess, folder: Path) -> None:
    for name, model in (("tiny", str(folder)), ("shakespeare", "shakespeare")):
        response = httpx.post(f"{server.url}/{name}{COMPLETIONS}", json={"prompt": "To be", **FIELDS}, timeout=TIMEOUT)
        assert response.json()["choices"][0]["text"] == expected(model, "To be")
        assert response.headers["x-request-id"]
        assert next(m["id"] for m in httpx.get(f"{server.url}/{name}/v1/models").json()["data"]) == name
    assert len(server.lines) == 1, server.lines
    assert f"(Ray Serve: {folder} at /tiny, shakespeare at /shakespeare; replicas: 1)" in server.lines[0]


@pytest.mark.slow
def test_a_stream_is_the_whole_response(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "To be"}], "stream": True, **FIELDS}
    text = ""
    with httpx.stream("POST", f"{server.url}/shakespeare{CHAT}", json=body, timeout=TIMEOUT) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
        assert response.headers["content-type"].startswith("text/event-stream")
    assert text == expected("shakespeare", "To be")


@pytest.mark.slow
@pytest.mark.nightly
def test_sighup_loads_the_models_again(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGHUP)
    until(lambda: sum("was loaded again" in line for line in server.lines) == 2)
    url = f"{server.url}/shakespeare{COMPLETIONS}"
    response = httpx.post(url, json={"prompt": "To be", **FIELDS}, timeout=TIMEOUT)
    assert response.json()["choices"][0]["text"] == expected("shakespeare", "To be")


def test_the_options_of_the_deployment() -> None:
    from nanoinfer.cluster.ray_serve import deployment_options

    cluster = ClusterConfig(ray="local", replicas=2, max_replicas=5, target_requests=24, cores_per_replica=4)
    options = deployment_options(ServerConfig(shutdown_timeout=7, max_requests_in_flight=99), cluster)
    count = options["autoscaling_config"]
    assert (count["min_replicas"], count["max_replicas"], count["target_ongoing_requests"]) == (2, 5, 24)
    assert (options["ray_actor_options"], options["max_ongoing_requests"]) == ({"num_cpus": 4}, 99)
    assert options["graceful_shutdown_timeout_s"] == 7
    assert "num_replicas" not in options
    assert deployment_options(ServerConfig(), ClusterConfig(ray="local", replicas=2))["num_replicas"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shakespeare", "--max-replicas", "2"], "max_replicas=2 needs ray"),
        (["shakespeare", "--ray", "local", "--replicas", "3", "--max-replicas", "2"], "max_replicas=2 is less than"),
        (["shakespeare", "--ray", "local", "--access-log", "-"], "access_log is not supported with ray"),
        pytest.param(
            ["shakespeare", "--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1 does not answer", marks=pytest.mark.slow
        ),
        pytest.param(
            ["nothing/there.gguf", "--ray", "local"], "nothing/there.gguf: node 127.0.0.1 (", marks=pytest.mark.nightly
        ),
        pytest.param(
            ["shakespeare", "--ray", "local", "--replicas", "99"], "99 replicas of 1 CPUs do not fit into the cluster",
            marks=[pytest.mark.slow, pytest.mark.nightly],
        ),
    ],
)  # fmt: skip
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "nanoinfer", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, ""), done.stderr
    assert message in done.stderr
