"""`nanoinfer serve` as a process: its start, its end, clients that disconnect, and errors of one line."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")

from dataclasses import replace  # noqa: E402

from helpers.models import TINY, make_folder  # noqa: E402
from helpers.server_process import ServerProcess, serving, wait_until  # noqa: E402
from nanoinfer import LLM, AsyncLLM, SamplingParams  # noqa: E402
from nanoinfer.cli import main  # noqa: E402
from nanoinfer.protocols.fields import COMPLETIONS  # noqa: E402
from nanoinfer.server.app import build_app  # noqa: E402
from nanoinfer.server.config import ServerConfig  # noqa: E402

ENDLESS: dict[str, Any] = {
    "prompt": "a",
    "max_tokens": 10**9,
    "overflow": "slide",
    "ignore_eos": True,
    "temperature": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("process") / "tiny", replace(TINY, block_size=512))


# The start ----------------------------------------------------------------------------------------------------


def test_a_process_answers_and_ends_with_0(folder: Path) -> None:
    with serving(folder) as server:
        about = re.escape(f"(model: tiny, {folder}; connections: ") + r"\d+\)"
        assert re.fullmatch(rf"nanoinfer: listening on http://127\.0\.0\.1:\d+ {about}\n", server.lines[0])
        (expected,) = LLM(str(folder)).generate("To be", SamplingParams(max_tokens=16, seed=3))
        response = httpx.post(server.url + COMPLETIONS, json={"prompt": "To be", "seed": 3})
        assert response.json()["choices"][0]["text"] == expected.outputs[0].text
        assert "server" not in response.headers
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert len(server.lines) == 1


def test_serving_imports_no_pytorch(folder: Path) -> None:
    code = (
        "import sys; from nanoinfer.server import run; from nanoinfer import AsyncLLM;"
        f"from nanoinfer.server.config import ServerConfig; run.build_app(AsyncLLM({str(folder)!r}), ServerConfig());"
        "print([m for m in sys.modules if m.startswith('torch.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0)


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["nanoinfer", "serve", *arguments])
    with pytest.raises(SystemExit) as e:
        main()
    return int(e.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["no-such-model-x/"], ["no-such-model-x"]),
        (["shakespeare", "--host", "no.such.host.invalid"], ["no.such.host.invalid:8000 cannot be", "--host"]),
        (["shakespeare", "--host", "x" * 300], ["cannot be listened on"]),
        (["shakespeare", "--port", "65536"], ["port=65536 is not an integer in [0, 65535]"]),
        (["shakespeare", "--shutdown-timeout", "-1"], ["shutdown_timeout=-1"]),
        (["shakespeare", "--served-model-name", ""], ["served_model_name=''"]),
        (["shakespeare", "--default-max-tokens", "0"], ["default_max_tokens=0 is not an integer >= 1"]),
    ],
)
def test_a_start_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    code, err = call(monkeypatch, capsys, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert all(word in err for word in words)


def test_a_port_in_use_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, err = call(monkeypatch, capsys, "no-such-model/", "--port", str(port))
    assert (code, err) == (
        2,
        f"nanoinfer: error: 127.0.0.1:{port} cannot be listened on: Address already in use:"
        " choose another --host or --port (0: a free one)\n",
    )


# The end ------------------------------------------------------------------------------------------------------


def post(server: ServerProcess, **body: Any) -> Any:
    return httpx.post(server.url + COMPLETIONS, json={**ENDLESS, **body}, timeout=60)


def begun(server: ServerProcess, **body: Any) -> tuple[Any, Any]:
    """Return an HTTP client and a stream whose first chunk has come."""
    client = httpx.Client(timeout=60)
    response = client.send(
        client.build_request("POST", server.url + COMPLETIONS, json={**ENDLESS, **body, "stream": True}), stream=True
    )
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return client, lines


def num_running(server: ServerProcess) -> float:
    """Return the number of requests that the engine runs."""
    found = re.search(r"^nanoinfer:num_requests_running\{.*\} (\S+)$", httpx.get(server.url + "/metrics").text, re.M)
    return float(found[1]) if found else 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_what_runs_is_finished_and_what_comes_is_refused(folder: Path, number: signal.Signals) -> None:
    with serving(folder) as server:
        client, lines = begun(server, max_tokens=3000)
        server.process.send_signal(number)
        wait_until(lambda: not connects(server))
        rest = [line for line in lines if line]
        client.close()
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def connects(server: ServerProcess) -> bool:
    host, port = server.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_the_shutdown_has_a_time_limit(folder: Path) -> None:
    with serving(folder, "--shutdown-timeout", "0.5") as server, ThreadPoolExecutor() as pool:
        client, lines = begun(server)
        whole = pool.submit(post, server)
        wait_until(lambda: num_running(server) == 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        client.close()
        assert (whole.result().status_code, whole.result().json()["error"]["type"]) == (503, "server_error")
        assert "2 requests were ended after shutdown_timeout=0.5 seconds" in server.lines[1]
        assert len(server.lines) == 2


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(folder: Path) -> None:
    with serving(folder) as server:
        client, _ = begun(server)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not connects(server))
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130
        client.close()


# Clients that disconnect --------------------------------------------------------------------------------------


class Connection:
    """A request to an application in this process, over a connection that the test breaks."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.gone, self.num_chunks = asyncio.Event(), 0
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
                 "headers": [(b"host", b"127.0.0.1")],
                 "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
        self._body: bytes | None = json.dumps(body).encode()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.num_chunks += message["type"] == "http.response.body"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(folder), engine="native", max_num_seqs=8)
    yield made
    made.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{}, {"n": 4}, {"prompt": ["a", "b", "c"], "n": 2}, {"prompt": ["a"] * 20}], ids=str)
async def test_a_client_that_disconnects_ends_all_its_requests(
    llm: AsyncLLM, body: dict[str, Any], stream: bool
) -> None:
    connection = Connection(build_app(llm, ServerConfig()), COMPLETIONS, {**ENDLESS, **body, "stream": stream})
    scheduler, prompts = llm.llm.core.scheduler, body.get("prompt", "a")
    while not scheduler.running or (stream and connection.num_chunks < 3):
        await asyncio.sleep(0.01)
    assert llm.num_unfinished_requests == (len(prompts) if isinstance(prompts, list) else 1)
    connection.gone.set()
    await connection.task
    assert llm.num_unfinished_requests == 0
    while scheduler.unfinished:
        await asyncio.sleep(0.001)


@pytest.mark.slow
def test_a_client_that_is_killed_ends_its_request(folder: Path) -> None:
    with serving(folder, "--max-num-seqs", "1") as server:
        client, _ = begun(server)
        client.close()
        assert post(server, max_tokens=4).json()["usage"]["completion_tokens"] == 4  # there is one slot
