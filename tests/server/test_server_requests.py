"""Requests through the whole server: keys on every route, memory after a disconnect, failures, bounds."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from starlette.types import ASGIApp

from helpers.asgi import Response, call, post, serve, until
from helpers.models import CHARS
from nanoinfer import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nanoinfer.server import page_routes
from nanoinfer.server.access import PUBLIC
from nanoinfer.server.app import ROUTES
from nanoinfer.speculative.speculator import Speculator

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "To be", "max_tokens": 1_000_000, "overflow": "slide", "slide_stride": 16, "temperature": 0}
SHORT = {"prompt": "To be", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), engine="native", max_num_seqs=4, max_num_queued=2)


def text(found: Response) -> str:
    assert found.status == 200, found.content
    answer: str = json.loads(found.content)["choices"][0]["text"]
    return answer


def test_every_route_needs_a_key_but_health(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        routes = [(route.method, route.path) for route in ROUTES]
        routes += [("GET", route.path) for route in page_routes.routes()]
        assert len(routes) >= 15
        for method, path in routes:
            path = re.sub(r"\{.*\}", "x", path)
            status = (await call(app, method, path, body=b"{}")).status
            assert (status == 401) == (path not in PUBLIC), path
            key = {"authorization": "Bearer a-key"}
            assert (await call(app, method, path, headers=key, body=b"{}")).status not in (401, 500), path
        assert {path for _, path in routes} >= PUBLIC

    serve(llm, main, api_key=("a-key",))


def test_keys_do_not_share_prefixes(llm: LLM) -> None:
    """The prompt of one key is not in the cache of another one: times would tell."""

    async def main(app: ASGIApp, model: AsyncLLM) -> list[int]:
        stats, hits = llm.core.scheduler.stats, []
        for key, salt in (("a", None), ("b", None), ("a", None), ("a", "s"), ("b", "s"), ("b", "s")):
            before = stats.num_shared_tokens
            body = SHORT | {"prompt": "O Romeo, Romeo!"} | ({} if salt is None else {"cache_salt": salt})
            text(await post(app, body, headers={"authorization": f"Bearer {key}"}))
            hits.append(stats.num_shared_tokens - before)
        return hits

    hits = serve(llm, main, api_key=("a", "b"))
    assert [count > 0 for count in hits] == [False, False, True, False, False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_memory_within_a_step(llm: LLM, stream: bool) -> None:
    """One step that has begun may end; no step of the request begins after the client has left."""
    steps: list[int] = []
    extend = llm.core.engine.extend

    def count(batch: Any) -> Any:
        steps.append(len(batch.handles))
        return extend(batch)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        gone = asyncio.Event()
        task = asyncio.create_task(post(app, LONG | {"n": 3, "stream": stream}, disconnect=gone))
        await until(lambda: len(steps) > 5)
        gone.set()
        await asyncio.wait_for(task, 5)
        at_end = len(steps)
        await until(lambda: not llm.core.scheduler.unfinished)
        assert len(steps) <= at_end + 1
        assert llm.core.scheduler.running == []
        assert model.num_unfinished_requests == 0

    llm.core.engine.extend = count  # type: ignore[method-assign]
    llm.core.scheduler.cache.enabled = False  # what has ended is closed, not kept
    serve(llm, main)
    assert list(llm.core.engine.handles) == []


async def test_a_disconnect_while_a_request_waits_or_is_prepared_frees_it(
    llm: LLM, app: ASGIApp, model: AsyncLLM
) -> None:
    gone, left = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(post(app, LONG | {"n": 4}, disconnect=gone))
    await until(lambda: len(llm.core.scheduler.running) == 4)
    waiting = asyncio.create_task(post(app, SHORT, disconnect=left))
    await until(lambda: llm.core.scheduler.num_waiting == 1)
    left.set()
    await asyncio.wait_for(waiting, 5)
    await until(lambda: llm.core.scheduler.num_waiting == 0)
    prepared = asyncio.create_task(post(app, SHORT, disconnect=left))
    await asyncio.wait_for(prepared, 5)
    await until(lambda: model.num_unfinished_requests == 1)
    gone.set()
    await asyncio.wait_for(running, 5)
    await until(lambda: not llm.core.scheduler.unfinished)


async def test_a_full_queue_is_429(llm: LLM, app: ASGIApp) -> None:
    gone = asyncio.Event()
    tasks = [asyncio.create_task(post(app, LONG | {"n": 4}, disconnect=gone))]
    await until(lambda: len(llm.core.scheduler.running) == 4)
    tasks += [asyncio.create_task(post(app, SHORT, disconnect=gone)) for _ in range(2)]
    await until(lambda: llm.core.scheduler.num_waiting == 2)
    refused = await post(app, SHORT)
    assert (refused.status, refused.headers["retry-after"], refused.error["code"]) == (
        429,
        "1",
        "rate_limit_exceeded",
    )
    gone.set()
    await asyncio.gather(*tasks)
    await until(lambda: not llm.core.scheduler.unfinished)
    assert (await post(app, SHORT)).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended_and_freed(llm: LLM, stream: bool) -> None:
    seconds = 2 if stream else 0.3  # a stream must have begun

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        found = await post(app, LONG | {"n": 3, "stream": stream})
        assert f"request_timeout_sec={seconds}".encode() in found.content
        assert found.status == (200 if stream else 504)
        assert found.complete
        await until(lambda: not llm.core.scheduler.unfinished)
        assert model.num_unfinished_requests == 0

    serve(llm, main, request_timeout_sec=seconds)


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_fail_one_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    bad = CHARS.index("Q")
    extend = llm.core.engine.extend
    fed: dict[int, list[int]] = {}

    def poison(batch: Any) -> Any:
        logits, at = extend(batch).copy(), 0
        for i, (handle, count) in enumerate(zip(batch.handles, batch.num_new, strict=True)):
            fed.setdefault(handle, []).extend(batch.token_ids[at : at + count])
            at += count
            if bad in fed[handle] and len(fed[handle]) > 4:
                logits[i] = math.nan
        return logits

    expected = llm.generate("To be", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text
    llm.reset_prefix_cache()

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        good, failed = await asyncio.gather(post(app, SHORT), post(app, LONG | {"prompt": "Q", "stream": stream}))
        assert text(good) == expected
        if failed.status == 200:  # a stream, whose first tokens were sent
            assert stream
            error = json.loads(failed.content.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        else:
            assert failed.status == 500
            error = failed.error
        assert error["type"] == "server_error"
        assert "nan" in error["message"]

    monkeypatch.setattr(llm.core.engine, "extend", poison)
    serve(llm, main)


async def test_a_failing_drafter_fails_one_request_alone(llm: LLM, app: ASGIApp) -> None:
    from helpers.drafters import FailingDrafter

    prompts, params = ["abc", "bcd", "cde"], SamplingParams(temperature=0.0, max_tokens=6)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    llm.reset_prefix_cache()
    llm.core.speculator = Speculator(FailingDrafter(), speculate_k=2)
    body = {"max_tokens": 6, "temperature": 0}
    first, failed, last = await asyncio.gather(*(post(app, body | {"prompt": prompt}) for prompt in prompts))
    assert [text(first), text(last)] == expected[::2]
    assert (failed.status, failed.error["type"]) == (500, "server_error")


def test_grammars_that_take_long_to_compile_delay_no_other_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    llm = LLM(str(folder), engine="native")
    may_compile, compile_grammar = threading.Event(), llm.requests._grammars.compile

    def slow(wanted: StructuredOutputsParams) -> Any:
        assert may_compile.wait(30)
        return compile_grammar(wanted)

    monkeypatch.setattr(llm.requests._grammars, "compile", slow)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        body = SHORT | {"structured_outputs": {"choice": ["a"]}}
        slow_ones = [asyncio.ensure_future(post(app, body)) for _ in range(8)]
        await until(lambda: model.num_unfinished_requests == 8)
        try:
            text(await asyncio.wait_for(post(app, SHORT), 10))
        finally:
            may_compile.set()
        assert [text(found) for found in await asyncio.gather(*slow_ones)] == ["a"] * 8

    serve(llm, main)


def test_bounds_of_a_request_are_400_with_the_field(llm: LLM) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "a" * 33}, "prompt"),  # the engine's context length
        ({"n": 129}, "n"),
        ({"n": 5}, "n"),  # max_num_seqs
        ({"n": 3, "prompt": ["a"] * 4}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 300}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"unknown\ud800": 1}, "unknown\ud800"),
    ]

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        for change, param in cases:
            found = await post(app, SHORT | change)
            assert (found.status, found.error["param"]) == (400, param), (change, found.content)
        deep = b'{"prompt":' + b"[" * 70 + b"]" * 70 + b"}"
        assert "at most 64 levels" in (await call(app, "POST", COMPLETIONS, body=deep)).error["message"]
        assert (await call(app, "POST", COMPLETIONS, body=b"x" * 20_001)).status == 413

    serve(llm, main, max_sequences=8, max_logprobs=5, max_body_bytes=20_000)


async def test_unknown_paths_and_methods_are_errors_in_openai_shape(app: ASGIApp, model: AsyncLLM) -> None:
    assert (await call(app, "GET", "/v1/unknown")).error["type"] == "not_found_error"
    wrong = await call(app, "GET", COMPLETIONS)
    assert (wrong.status, wrong.error["type"]) == (405, "invalid_request_error")
    assert "POST" in wrong.headers["allow"]
    assert (await post(app, SHORT | {"model": "other"})).status == 404


def test_no_file_is_opened_because_of_a_request(llm: LLM) -> None:
    """Names that look like files and URLs are only strings."""
    opened: list[str] = []
    watching = [False]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching[0] and event in ("open", "os.open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen"):
            opened.append(f"{event} {arguments[0]}")

    sys.addaudithook(hook)  # it cannot be removed; `watching` turns it off
    names = ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "../../secret"]

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        assert (await post(app, SHORT)).status == 200  # what is imported at the first request
        await call(app, "GET", "/metrics")
        watching[0] = True
        try:
            for name in names:
                for body in ({"prompt": name}, {"model": name}, {"user": name}, {"stop": name}, {"suffix": name}):
                    await post(app, SHORT | body)
                image = {"type": "image_url", "image_url": {"url": name}}
                chat = {"messages": [{"role": "user", "content": [image]}]}
                await post(app, chat, "/v1/chat/completions")
                await call(app, "GET", f"/{name}")
                await call(app, "GET", f"/v1/models/{name}")
                await call(app, "GET", "/", headers={"x-request-id": name, "referer": name})
        finally:
            watching[0] = False

    serve(llm, main)
    assert opened == []


# A process -----------------------------------------------------------------------------------------------


@contextmanager
def process(folder: Path, *options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `nanoinfer serve`; yield the process and its URL."""
    command = [sys.executable, "-m", "nanoinfer", "serve", str(folder), "--engine", "native", "--port", str(port)]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            for line in running.stderr:
                if found := re.search(r"http://\S+", line):
                    break
            else:
                raise AssertionError("the server has ended")
            yield running, found[0]
        finally:
            running.kill()


def ask(url: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    request = Request(url + COMPLETIONS, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        with urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except HTTPError as e:
        return e.code, json.load(e)


@pytest.mark.slow
def test_a_server_that_was_killed_starts_again_on_its_port(folder: Path) -> None:
    with process(folder) as (running, url):
        status, first = ask(url, SHORT)
        assert status == 200
        running.send_signal(signal.SIGKILL)
        running.wait(10)
        with process(folder, port=int(url.rsplit(":", 1)[1])) as (_, again):
            assert again == url
            status, second = ask(url, SHORT)
            assert (status, second["choices"]) == (200, first["choices"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_for_logs_does_not_end_requests(folder: Path) -> None:
    with process(folder, "--access-log", "/dev/full", "--log-level", "debug") as (running, url):
        for _ in range(3):
            assert ask(url, SHORT)[0] == 200
        assert ask(url, SHORT | {"n": 0})[0] == 400
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


def test_keys_are_not_visible_in_the_list_of_processes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-secret-key\n")
    with process(folder, "--api-key-file", str(tmp_path / "keys")) as (running, url):
        assert ask(url, SHORT)[0] == 401
        assert ask(url, SHORT, authorization="Bearer a-secret-key")[0] == 200
        if (command := Path(f"/proc/{running.pid}/cmdline")).exists():
            assert b"a-secret-key" not in command.read_bytes()
