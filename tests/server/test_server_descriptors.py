"""The server's file descriptors: connections leave enough for the rest, and a server that has none waits for some."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
if not Path("/proc/self/fd").exists():
    pytest.skip("there is no /proc", allow_module_level=True)

from helpers.models import TINY, make_folder
from helpers.server_process import ServerProcess, serving
from nanoinfer import NanoinferError
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from nanoinfer.server import connections
from nanoinfer.server.app import ROUTES
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.connections import MAX_CONNECTIONS, RESERVE, with_max_connections

HI = [{"role": "user", "content": "a"}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/tokenize": [{"prompt": "abc"}, {"messages": HI}, {"prompt": "a" * 100_000}],
    "/detokenize": [{"tokens": [1, 2]}],
    MESSAGES: [{"model": "tiny", "messages": HI, "max_tokens": 4, "stream": stream} for stream in (False, True)],
    COUNT_TOKENS: [{"model": "tiny", "messages": HI, "system": "b"}],
    EMBEDDINGS: [{"input": ["a", "b" * 100]}, {"input": "a", "encoding_format": "base64"}],
    "/page/markdown": [{"text": "*a* [b](https://c)"}],
    "/page/explain": [{"prompt": "a", "max_tokens": 3}],
    CHAT: [{"messages": HI, "max_tokens": 4, "logprobs": True, "stream": stream} for stream in (False, True)],
    RESPONSES: [{"input": "a", "max_output_tokens": 4, "stream": stream} for stream in (False, True)],
    COMPLETIONS: [
        {"prompt": "a"},
        {"prompt": ["a", "b"], "n": 2, "best_of": 3, "logprobs": 2, "echo": True},
        {"prompt": "a", "stream": True, "logprobs": 2, "stop": ["z"], "top_p": 0.9, "min_p": 0.1, "top_k": 9},
        {"prompt": "a", "max_tokens": 300, "overflow": "slide", "repetition_penalty": 1.2, "logit_bias": {"1": 2}},
        {"prompt": "a", "structured_outputs": {"regex": "[a-z]+"}},
        {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}},
        {"prompt": 5},
        {"prompt": "a", "response_format": {"type": "json_object"}},  # no token has a brace
        {"prompt": "a", "structured_outputs": {"regex": "("}},
    ],
}
REFUSED = 3  # the last ones of COMPLETIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("descriptors") / "tiny", replace(TINY, block_size=512))
    (made / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return made


def connect(server: ServerProcess) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.connect()
    return connection


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> int:
    """Return the status of a response; its body is JSON unless it is a success."""
    connection.request(method, path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    content = response.read()
    assert response.status == 200 or set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
    return response.status


def every_request() -> Iterator[tuple[str, str, Any]]:
    for route in ROUTES:
        path = route.path.replace("{model:path}", "tiny")
        for body in BODIES[path] if route.method == "POST" else [None]:
            yield route.method, path, body


def cpu_sec(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_allowed(server: ServerProcess) -> int:
    found = re.search(r"connections: (\d+)", server.lines[0])
    assert found is not None
    return int(found[1])


def test_no_request_imports_anything(folder: Path) -> None:
    with serving(folder, "--served-model-name", "tiny", python=("-X", "importtime")) as server:
        ready = next(i for i, line in enumerate(server.lines) if "listening on" in line)
        connection = connect(server)
        statuses = [ask(connection, *request) for request in every_request()]
        connection.close()
        server.process.terminate()
        assert server.wait() == 0
    assert (statuses.count(200), statuses.count(400)) == (len(statuses) - REFUSED, REFUSED)
    assert server.lines[ready + 1 :] == []


def test_connections_leave_descriptors_for_every_request(folder: Path) -> None:
    with (
        serving(folder, "--served-model-name", "tiny", limits="ulimit -Sn 64; ulimit -Hn 128") as server,
        ExitStack() as stack,
    ):
        number = num_allowed(server)
        assert 128 - RESERVE - 16 < number < 128 - RESERVE  # the soft limit was raised
        first = connect(server)
        assert ask(first, "GET", "/health") == 200
        others = [stack.enter_context(socket.create_connection((first.host, first.port))) for _ in range(number + 50)]
        time.sleep(0.1)
        spent = cpu_sec(server.process.pid)
        time.sleep(1)
        assert cpu_sec(server.process.pid) - spent < 0.4  # a loop that tries to accept takes 0.7
        for other in others[number:]:
            head, _, body = other.recv(4096).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert f"max_connections={number} " in json.loads(body)["error"]["message"]
        statuses = [ask(first, *request) for request in every_request()]
        assert (statuses.count(200), statuses.count(400)) == (len(statuses) - REFUSED, REFUSED)
        first.close()
        assert len(server.lines) == 1


@pytest.mark.slow
def test_clients_wait_while_no_descriptor_is_free(folder: Path) -> None:
    with serving(folder) as server:
        first, pid = connect(server), server.process.pid
        assert ask(first, "GET", "/health") == 200
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), before[1]))
        waiting = [connect(server) for _ in range(20)]
        spent = cpu_sec(pid)
        time.sleep(1.3)  # asyncio tries again after a second
        assert cpu_sec(pid) - spent < 0.5
        assert ask(first, "GET", "/health") == 200
        assert len(server.lines) <= 4  # asyncio's, one a second
        assert all("out of system resource" in line for line in server.lines[1:])
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert [ask(connection, "GET", "/health") for connection in waiting] == [200] * 20
        for connection in (first, *waiting):
            connection.close()


@pytest.mark.parametrize(
    ("limits", "given", "number"),
    [
        ((100, 4096), None, MAX_CONNECTIONS),
        ((100, 1024), None, 1024 - 10 - RESERVE),
        ((100, 128), 30, 30),
        ((100, 128), 128 - 10 - RESERVE, 128 - 10 - RESERVE),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, MAX_CONNECTIONS),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 5000, 5000),
    ],
)
def test_as_many_connections_as_fit(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], given: int | None, number: int
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: made.append(both))
    monkeypatch.setattr(connections.os, "listdir", lambda path: [""] * 10)
    assert with_max_connections(ServerConfig(max_connections=given)).max_connections == number
    assert made == ([] if limits[0] == limits[1] else [(limits[1], limits[1])])


@pytest.mark.parametrize(("limit", "given"), [(128, 128 - 10 - RESERVE + 1), (128, 4000), (50, None)])
def test_connections_that_do_not_fit_are_an_error(
    monkeypatch: pytest.MonkeyPatch, limit: int, given: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr(connections.os, "listdir", lambda path: [""] * 10)
    with pytest.raises(NanoinferError) as caught:
        with_max_connections(ServerConfig(max_connections=given))
    wanted = given or 1
    assert str(caught.value) == (
        f"max_connections={wanted} requires {wanted + 10 + RESERVE} open files and the limit is {limit}:"
        " lower --max-connections or raise the limit (ulimit -Hn)"
    )


@pytest.mark.slow
def test_connections_that_do_not_fit_are_an_error_before_the_model_is_loaded() -> None:
    with pytest.raises(AssertionError, match="did not start") as caught:
        ServerProcess("no-such-model/", "--max-connections", "100", limits="ulimit -n 128")
    assert "max_connections=100 requires" in str(caught.value)
    assert "no-such-model" not in str(caught.value)
    assert sys.platform != "linux" or "the limit is 128" in str(caught.value)
