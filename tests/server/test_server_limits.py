"""The server's middleware, with a toy application: keys, Host and Origin, limits of size, number and time, failures."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the extra `server` is not installed")

from starlette.types import Message, Receive, Scope, Send

from helpers.asgi import HOST, call
from nanoinfer import NanoinferError, ResultError, SamplingParams
from nanoinfer.entrypoints.async_engine import CLOSED
from nanoinfer.errors import QueueFull, TokensExcluded
from nanoinfer.protocols.fields import FieldError
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.server.access import CheckOrigins, RequireKey, combined_salt, parse_host, with_keys
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Bodies
from nanoinfer.server.limits import BoundRequests, Quotas, TokenBounds, check_request

KEYS = ("first-key", "second-key")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 20))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def raising(error: Exception, after: tuple[Message, ...] = ()) -> Callable[..., Any]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in after:
            await send(message)
        raise error

    return app


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# Keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("third-key"), bearer("first-ke"), bearer("first-keyy"), bearer(""),
     {"authorization": "Basic first-key"}, {"authorization": "first-key"}, {"x-api-key": "first-ke"}, {"x-api-key": ""},
     {"x-api-key": "Bearer first-key"}, bearer("third-key") | {"x-api-key": "first-key"},
     [*HOST.items(), *bearer("first-key").items(), *bearer("first-key").items()],
     [*HOST.items(), ("x-api-key", "first-key"), ("x-api-key", "first-key")]],
)  # fmt: skip
def test_a_request_without_a_valid_key_is_refused(headers: Any) -> None:
    found = run(call(RequireKey(echo, KEYS), "POST", "/v1/completions", headers, b"{}"))
    assert found.status == 401
    assert found.headers["www-authenticate"] == "Bearer"
    assert (found.error["type"], found.error["code"]) == ("authentication_error", "invalid_api_key")
    assert "first" not in found.error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/info", "/health/", "//health", "/page.html", "/unknown"])
def test_every_other_path_needs_a_key(path: str) -> None:
    assert run(call(RequireKey(echo, KEYS), "GET", path)).status == 401


@pytest.mark.parametrize("path", ["/health", "/", "/page/page.css", "/page/page.js"])
def test_constant_files_and_health_need_no_key_to_be_read(path: str) -> None:
    assert run(call(RequireKey(echo, KEYS), "GET", path)).status == 200
    assert run(call(RequireKey(echo, KEYS), "POST", path)).status == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["authorization: Bearer", "authorization: bearer", "x-api-key:"])
def test_each_key_is_accepted(key: str, header: str) -> None:
    name, _, before = header.partition(":")
    headers = {name: f"{before} {key}".strip()}
    found = run(call(RequireKey(echo, KEYS), "POST", "/v1/completions", headers, b"{}"))
    assert (found.status, found.content) == (200, b"{}")


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    app = RequireKey(echo, KEYS)
    for headers in (*map(bearer, (*KEYS, "another")), *({"x-api-key": key} for key in (*KEYS, "another"))):
        compared.clear()
        run(call(app, "GET", "/info", headers))
        assert len(compared) == len(KEYS)
        assert {len(x) for pair in compared for x in pair} == {32}  # digests: no length to learn


def test_the_salt_of_the_prefix_cache_is_that_of_the_key() -> None:
    app = RequireKey(echo, KEYS)
    given = (bearer(KEYS[0]), {"x-api-key": KEYS[0]}, bearer(KEYS[1]))
    first, again, second = (run(call(app, "GET", "/info", headers)).scope for headers in given)
    open_server = run(call(RequireKey(echo, ()), "GET", "/info")).scope
    assert combined_salt(first, None) == combined_salt(again, None) != combined_salt(second, None)
    assert combined_salt(first, "mine") != combined_salt(second, "mine")
    assert combined_salt(first, "mine") == combined_salt(again, "mine") != combined_salt(first, None)
    assert (combined_salt(open_server, None), combined_salt(open_server, "mine")) == (None, "mine")
    # A request cannot name the salt of another key, and the key cannot be derived from it.
    assert combined_salt(first, str(combined_salt(second, "x"))) != combined_salt(second, "x")
    assert KEYS[0] not in str(combined_salt(first, None))


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("in-file\n\n  second \r\n")
    monkeypatch.setenv("NANOINFER_API_KEY", "of-env other-env")
    expected = ("given", "of-env", "other-env", "in-file", "second")
    config = with_keys(ServerConfig(api_key=("given", "given"), api_key_file=str(tmp_path / "keys")))
    assert (config.api_key, config.api_key_file) == (expected, None)
    assert "given" not in repr(config)
    monkeypatch.delenv("NANOINFER_API_KEY")
    assert with_keys(ServerConfig()).api_key == ()
    (tmp_path / "empty").write_text("\n \n")
    for bad in (["with space"], [""], ["ä-key"], ["x" * 513]):
        with pytest.raises(NanoinferError, match="API key 1 of 1 is not") as caught:
            with_keys(ServerConfig(api_key=tuple(bad)))
        assert not bad[0] or bad[0] not in str(caught.value)
    for file in ("empty", "missing"):
        with pytest.raises(NanoinferError, match=file):
            with_keys(ServerConfig(api_key_file=str(tmp_path / file)))


# Host and Origin -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "bound", "allowed", "status"),
    [
        ("localhost:8000", "127.0.0.1", (), 200),
        ("LOCALHOST", "127.0.0.1", (), 200),
        ("127.0.0.1:8000", "127.0.0.1", (), 200),
        ("[::1]:8000", "127.0.0.1", (), 200),
        ("evil.example", "127.0.0.1", (), 403),
        ("evil.example:8000", "127.0.0.1", (), 403),
        ("localhost.evil.example", "127.0.0.1", (), 403),
        ("localhost@evil.example", "127.0.0.1", (), 400),
        ("localhost:80@evil.example", "127.0.0.1", (), 400),
        ("localhost:80:80", "127.0.0.1", (), 400),
        ("localhost:65536", "127.0.0.1", (), 400),
        ("localhost:", "127.0.0.1", (), 400),
        ("localhost:+80", "127.0.0.1", (), 400),
        ("localhost:\u00b2", "127.0.0.1", (), 400),
        ("localhost/path", "127.0.0.1", (), 400),
        ("localhost, evil.example", "127.0.0.1", (), 400),
        ("http://localhost", "127.0.0.1", (), 400),
        ("::1", "127.0.0.1", (), 400),
        ("[127.0.0.1]", "127.0.0.1", (), 400),
        ("[:::1]", "127.0.0.1", (), 400),
        ("[0:0::1]:8000", "127.0.0.1", (), 200),
        ("[FD00:0::1]", "fd00::1", (), 200),
        ("[fd00::2]", "fd00::1", (), 403),
        ("[fd00::2]", "fd00::1", ("FD00::2",), 200),
        ("192.168.1.5", "127.0.0.1", (), 403),
        ("192.168.1.5:8000", "192.168.1.5", (), 200),
        ("192.168.1.5:8000", "0.0.0.0", (), 200),
        ("[fd00::1]:8000", "::", (), 200),
        ("evil.example", "0.0.0.0", (), 403),
        ("[::1]evil.example", "127.0.0.1", (), 400),
        ("box.local:8000", "0.0.0.0", ("box.local",), 200),
        ("other.local", "0.0.0.0", ("box.local",), 403),
        ("anything", "127.0.0.1", ("*",), 200),
        ("an/y", "127.0.0.1", ("*",), 400),
        ("", "127.0.0.1", (), 400),
    ],
)
def test_the_host_header_must_name_this_server(host: str, bound: str, allowed: tuple[str, ...], status: int) -> None:
    found = run(call(CheckOrigins(echo, bound, allowed), "GET", "/v1/models", {"host": host}))
    assert found.status == status
    if status != 200:
        assert ("--allowed-host" if status == 403 else "NAME[:PORT]") in found.error["message"]


@given(
    st.text("[]:@/.-_?# \t\\%lo1af\u00e9\x00", max_size=12) | st.from_regex(r"[a-z0-9._-]+(:\d{1,5})?", fullmatch=True)
)
def test_a_host_header_is_a_name_or_an_address_and_a_port_or_refused(host: str) -> None:
    """What is accepted is what a URL of that host means for a browser."""
    found = parse_host(host)
    status = run(
        call(CheckOrigins(echo, "127.0.0.1", ("*",)), "GET", "/", {"host": host.encode().decode("latin-1")})
    ).status
    assert status == (400 if found is None else 200)
    if found is not None:
        url = urlsplit(f"http://{host}/")
        name = url.hostname or ""
        assert (str(ip_address(name)) if host.startswith("[") else name, url.port) == found
        assert (url.username, url.password, url.path, url.query, url.fragment) == (None, None, "/", "", "")


@given(st.text("[]:@/.-_?# \t\\%lo1af", max_size=12))
def test_no_odd_host_is_taken_for_this_server(rest: str) -> None:
    for host in (f"localhost{rest}", f"{rest}localhost", f"[::1]{rest}", f"127.0.0.1{rest}"):
        found = run(call(CheckOrigins(echo, "127.0.0.1"), "GET", "/", {"host": host}))
        name = urlsplit(f"http://{host}/").hostname if found.status == 200 else "localhost"
        assert name == "localhost" or ip_address(name).is_loopback


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "localhost"), ("host", "localhost")],
        [("host", "localhost"), ("origin", "http://evil.example"), ("origin", "http://evil.example")],
        [("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil.example")],
        [("host", "localhost"), ("origin", ""), ("origin", "http://evil.example")],
    ],
)
def test_a_missing_host_and_several_hosts_or_origins_are_refused(method: str, headers: list[tuple[str, str]]) -> None:
    for allowed in ((), ("http://evil.example",), ("*",)):
        found = run(call(CheckOrigins(echo, "127.0.0.1", (), allowed), method, "/", [("accept", "*/*"), *headers], b""))
        assert (found.status, "access-control-allow-origin" in found.headers) == (400, False)
        assert "send one Host" in found.error["message"]


@pytest.mark.parametrize(
    ("origin", "method", "allowed", "status"),
    [
        (None, "POST", (), 200),
        ("http://localhost:8000", "POST", (), 200),
        ("https://localhost:8000", "POST", (), 200),  # behind a proxy that ends TLS
        ("http://LOCALHOST:8000", "POST", (), 200),
        ("http://localhost:8000@evil.example", "POST", (), 403),
        ("http://localhost:8000, http://evil.example", "POST", (), 403),
        ("localhost:8000", "POST", (), 403),
        ("http://localhost:3000", "POST", (), 403),
        ("http://evil.example", "POST", (), 403),
        ("null", "POST", (), 403),
        ("", "POST", (), 403),
        ("http://evil.example", "DELETE", (), 403),
        ("http://evil.example", "GET", (), 200),  # no effect, and the page cannot read the answer
        ("http://ui.example", "POST", ("http://ui.example",), 200),
        ("http://ui.example:81", "POST", ("http://ui.example",), 403),
        ("http://any.example", "POST", ("*",), 200),
    ],
)
def test_a_request_with_an_effect_must_come_from_an_allowed_origin(
    origin: str | None, method: str, allowed: tuple[str, ...], status: int
) -> None:
    headers = {} if origin is None else {"origin": origin}
    found = run(call(CheckOrigins(echo, "127.0.0.1", (), allowed), method, "/v1/completions", headers, b"{}"))
    assert found.status == status
    shared = found.headers.get("access-control-allow-origin")
    assert shared == (origin if allowed and status == 200 else None)


def test_preflight_requests_are_answered_for_allowed_origins_only() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}
    app = CheckOrigins(RequireKey(echo, KEYS), "127.0.0.1", (), ("https://ui.example",))
    allowed = run(call(app, "OPTIONS", "/v1/completions", {"origin": "https://ui.example", **asked}))
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert allowed.headers["vary"].startswith("Origin")
    foreign = run(call(app, "OPTIONS", "/v1/completions", {"origin": "https://evil.example", **asked}))
    assert foreign.status == 401
    assert not any(name.startswith("access-control") for name in foreign.headers)


@pytest.mark.parametrize("origin", ["ui.example", "https://ui.example/", "https://", "://x", "https://a,https://b"])
def test_a_malformed_allowed_origin_is_an_error(origin: str) -> None:
    with pytest.raises(NanoinferError, match="allowed_origin="):
        ServerConfig(allowed_origin=(origin,))


# Size and number -----------------------------------------------------------------------------------------


def bounded(app: Any = echo, **limits: Any) -> BoundRequests:
    return BoundRequests(app, ServerConfig(**limits))


@pytest.mark.parametrize("chunks", [[b"x" * 100, b""], [b"x" * 60, b"x" * 40, b""]])
def test_a_body_of_the_maximum_size_passes(chunks: list[bytes]) -> None:
    assert run(call(bounded(max_body_bytes=100), "POST", body=chunks)).content == b"x" * 100


@pytest.mark.parametrize(
    ("headers", "chunks"),
    [
        ({"content-length": "101"}, []),  # refused before any of it is read
        ({"content-length": "9" * 5000}, []),
        ({"content-length": "-1"}, []),
        ({"transfer-encoding": "chunked"}, [b"x" * 60, b"x" * 41]),  # and the rest is not waited for
    ],
)
def test_a_larger_body_is_refused(headers: dict[str, str], chunks: list[bytes]) -> None:
    found = run(call(bounded(max_body_bytes=100), "POST", headers=headers, body=chunks))
    assert found.status == 413
    assert "max_body_bytes=100" in found.error["message"]


async def test_more_requests_in_flight_get_429_until_one_has_ended() -> None:
    go, app = asyncio.Event(), bounded(waiting(asyncio.Event()), max_requests_in_flight=2)
    app.app = waiting(go)
    running = [asyncio.create_task(call(app, "POST")) for _ in range(2)]
    await asyncio.sleep(0.02)
    refused = await call(app, "POST")
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert (refused.error["type"], refused.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    go.set()
    assert [found.status for found in await asyncio.gather(*running)] == [200, 200]
    assert (await call(app, "POST")).status == 200
    assert app.num_in_flight == 0


def waiting(go: asyncio.Event) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await echo(scope, receive, send)

    return app


# Time, and clients that leave ----------------------------------------------------------------------------


def test_a_slow_sender_gets_408() -> None:
    app = bounded(body_timeout_sec=0.1)
    began = time.monotonic()
    found = run(call(app, "POST", body=[b"{", 0.07, b"x", 0.07, b"x", 10.0, b""]))
    assert found.status == 408
    assert time.monotonic() - began < 5
    assert app.num_in_flight == 0


def test_a_request_that_takes_too_long_gets_504_and_is_cancelled() -> None:
    cancelled = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(scope["path"])
            raise

    found = run(call(bounded(slow, request_timeout_sec=0.05), "POST", "/v1/completions"))
    assert found.status == 504
    assert "request_timeout_sec=0.05" in found.error["message"]
    assert found.headers["x-should-retry"] == "false"  # openai-python would send it twice more
    assert cancelled == ["/v1/completions"]


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
EVENT = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send(dict(START))
        await send(dict(EVENT))
        await asyncio.sleep(10)

    found = run(call(bounded(slow, request_timeout_sec=0.05), "POST"))
    assert (found.status, found.complete) == (200, True)
    first, second, rest = found.content.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert "request_timeout_sec" in json.loads(second.removeprefix(b"data: "))["error"]["message"]


@pytest.mark.parametrize("when", ["body", "answer"])
async def test_a_client_that_leaves_cancels_its_request(when: str) -> None:
    ended, gone, waits = [], asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        waits.set()
        try:
            await receive()  # an application that waits for a disconnect itself is cancelled as well
        finally:
            ended.append(True)

    app = bounded(slow)
    body = [b"{", b""] if when == "answer" else [b"{"]
    task = asyncio.create_task(call(app, "POST", body=body, disconnect=gone))
    await (waits.wait() if when == "answer" else asyncio.sleep(0.02))
    assert not task.done()
    gone.set()
    found = await asyncio.wait_for(task, 15)
    assert (found.status, app.num_in_flight) == (0, 0)
    assert ended == ([True] if when == "answer" else [])


async def test_what_an_application_does_after_its_response_is_not_cancelled() -> None:
    gone, ended = asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        gone.set()  # a server reports a disconnect once the response is complete
        await asyncio.sleep(0.05)
        ended.append(True)

    await call(bounded(app), "POST", disconnect=gone)
    assert ended == [True]


# Failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (QueueFull("3 requests wait"), 429, "rate_limit_error", "3 requests wait"),
        (ResultError("the logits are not finite"), 500, "server_error", "the logits are not finite"),
        (TokensExcluded(), 400, "invalid_request_error", TokensExcluded.MESSAGE),
        (ResultError("the largest logit is -inf"), 500, "server_error", "the largest logit is -inf"),
        (FieldError("n=0 is not allowed", "n"), 400, "invalid_request_error", "n=0 is not allowed"),
        (NanoinferError("temperature=-1 is not"), 400, "invalid_request_error", "temperature=-1 is not"),
        (NanoinferError(CLOSED), 503, "server_error", "the server is shutting down"),
        (KeyError("a secret prompt"), 500, "server_error", "internal error: the server's log has the reason"),
    ],
)  # fmt: skip
def test_an_exception_is_a_response_in_openai_shape(error: Exception, status: int, kind: str, message: str) -> None:
    found = run(call(bounded(raising(error)), "POST"))
    assert (found.status, found.error["type"]) == (status, kind)
    assert found.error["message"].startswith(message)
    assert ("retry-after" in found.headers) == (status in (429, 503))
    assert b"secret" not in found.content


def test_an_exception_in_a_stream_is_its_last_event() -> None:
    found = run(call(bounded(raising(KeyError("a secret prompt"), (dict(START), dict(EVENT)))), "POST"))
    assert found.complete
    assert b"internal error" in found.content
    assert b"secret" not in found.content


def test_an_exception_in_another_response_cuts_it_off() -> None:
    start = {**START, "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ConnectionAbortedError):  # the server closes the connection
        run(call(bounded(raising(KeyError(), (start, dict(EVENT)))), "POST"))


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_an_unexpected_exception_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture, level: str) -> None:
    caplog.set_level(level, logger="nanoinfer.server")
    run(call(bounded(raising(KeyError("a secret prompt"))), "POST"))
    (record,) = caplog.records
    assert "KeyError at test_server_limits:" in record.getMessage()
    assert "secret" not in record.getMessage()
    assert (record.exc_info is not None) == (level == "DEBUG")


def test_refused_input_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nanoinfer.server")
    run(call(bounded(raising(NanoinferError("n=0 is not allowed"))), "POST"))
    assert caplog.records == []


# JSON ----------------------------------------------------------------------------------------------------


def parsed(body: bytes) -> Any:
    return run(Bodies().read(receiving(body), dict))


def receiving(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    return receive


def test_json_objects_are_read() -> None:
    assert parsed(b'{"prompt": "[[[[{{\\"[\\\\", "n": 1}') == {"prompt": '[[[[{{"[\\', "n": 1}
    assert parsed(json.dumps({"prompt": "[" * 100_000}).encode())["prompt"] == "[" * 100_000
    deep = b'{"a":' * 63 + b"1" + b"}" * 63
    assert parsed(b'{"x": [' + b"[]," * 200 + b"1]}")["x"][-1] == 1
    assert parsed(deep)["a"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is not a JSON object"),
        (b'{"n": 1, "n": 2}', "the key 'n' is duplicated"),
        (b'{"n": 1' + b"0" * 1001 + b"}", "a number of 1002 characters; the limit is 1000"),
        (b'{"x": "\xff"}', "the body is not UTF-8"),
        ('{"x": 1}'.encode("utf-16"), "the body is not UTF-8"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "not JSON of at most 64 levels"),
        (b'{"a":' + b"[" * 65_000, "not JSON of at most 64 levels"),
        (b'{"a":[' + b"{}," * 65_535 + b"1]}", "the body has 65537 lists and objects; the limit is 65536"),
        (b'{"a\\"":' + b"[" * 65 + b"]" * 65 + b"}", "not JSON of at most 64 levels"),
        (b'{"a\\\\":' + b"[" * 65 + b"]" * 65 + b"}", "not JSON of at most 64 levels"),
    ],
)
def test_other_json_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(NanoinferError, match=message) as caught:
        parsed(body)
    assert "\n" not in str(caught.value)


SIZE = ServerConfig().max_body_bytes
HEAVY = {
    "lists": b'{"x":[' + b"[]," * (SIZE // 3) + b"1]}",
    "objects": b'{"x":[' + b"{}," * (SIZE // 3) + b"1]}",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(SIZE // 10)) + b"}",
    "integers": b'{"x":[' + b"1," * (SIZE // 2) + b"1]}",
    "digits": b'{"x":[' + (b"9" * 1000 + b",") * (SIZE // 1001) + b"1]}",
    "escapes": b'{"x":"' + b"\\u0041" * (SIZE // 6) + b'"}',
    "quotes": b'{"x":[' + b'"",' * (SIZE // 3) + b"[]]" + b"}",
    "backslashes": b'{"x":"' + b"\\\\" * (SIZE // 2) + b'"}',
}


@pytest.mark.parametrize("name", HEAVY)
def test_json_of_the_maximum_size_is_parsed_in_bounded_time(name: str) -> None:
    async def main() -> float:
        began = time.process_time()  # of all threads
        with suppress(NanoinferError):  # too many lists and objects
            await Bodies().read(receiving(HEAVY[name]), dict)
        return time.process_time() - began

    assert run(main()) < 6  # 0.2 s; 0.6 s on a busy machine


# What a request asks for ---------------------------------------------------------------------------------


def request(num_prompts: int = 1, **params: Any) -> GenerationRequest:
    return GenerationRequest(SamplingParams(**params), [{"prompt": "a"}] * num_prompts)


SMALL = ServerConfig(max_sequences=8, max_logprobs=5)
IDS = list(range(1024))


@pytest.mark.parametrize(
    "allowed",
    [request(8), request(2, n=4), request(2, n=2, best_of=4, logprobs=5), request(logprobs=-1),
     request(stop=["x" * 256] * 16), request(logit_bias=dict.fromkeys(IDS, 1)), request(stop_token_ids=IDS),
     request(bad_words=["x" * 256] * 128), request(allowed_token_ids=IDS)],
)  # fmt: skip
def test_what_is_within_the_limits_is_allowed(allowed: GenerationRequest) -> None:
    check_request(allowed, SMALL, block_size=4, vocab_size=5)


@pytest.mark.parametrize(
    ("refused", "param", "limit"),
    [
        (request(9), "prompt", "max_sequences=8"),
        (request(n=9), "n", "max_sequences=8"),
        (request(n=1, best_of=9), "best_of", "max_sequences=8"),
        (request(3, n=3), "prompt", "max_sequences=8"),
        (request(logprobs=6), "logprobs", "max_logprobs is 5"),
        (request(stop=["a"] * 17), "stop", "the number of items in stop is 17; the server's limit is 16"),
        (request(stop=["x" * 257]), "stop", "the length of a string in stop is 257; the server's limit is 256"),
        (request(logit_bias=dict.fromkeys([*IDS, 1024], 1)), "logit_bias", "limit is 1024"),
        (request(stop_token_ids=[*IDS, 1024]), "stop_token_ids", "limit is 1024"),
        (request(allowed_token_ids=[*IDS, 1024]), "allowed_token_ids", "limit is 1024"),
        (request(logprobs=-1), "logprobs", "logprobs=-1, the whole vocabulary, is 6; the server's max_logprobs is 5"),
        (request(bad_words=["a"] * 129), "bad_words", "limit is 128"),
    ],
)
def test_what_is_above_a_limit_is_refused(refused: GenerationRequest, param: str, limit: str) -> None:
    with pytest.raises(FieldError, match=limit) as caught:
        check_request(refused, SMALL, block_size=4, vocab_size=6)
    assert caught.value.param == param


def test_names_and_addresses_may_be_allowed() -> None:
    ServerConfig(allowed_host=("*", "a.example", "10.0.0.1", "::1", "FD00::1"))


def test_requests_share_quotas_until_they_are_released() -> None:
    config = ServerConfig(max_logprob_entries=40)
    quotas = Quotas(config)

    def begin() -> TokenBounds:
        return TokenBounds(request(logprobs=1, max_tokens=20), (2048, 99), config, quotas)

    running = [begin() for _ in range(4)]
    for one in running:
        one.check(1)
    with pytest.raises(QueueFull, match="40 log-probabilities, with 160 of other requests, are above 160"):
        begin().check(1)
    running.pop().release()
    running.append(begin())
    running[-1].check(1)
    abandoned = begin()
    abandoned.release()
    abandoned.check(1)  # its prompt was tokenized meanwhile: it holds nothing
    for one in running:
        one.release()
        one.release()
    quotas.entries.add(160)


@pytest.mark.parametrize("bad", [{"max_body_bytes": 0}, {"send_timeout_sec": 0}, {"keep_alive_sec": float("nan")},
                                 {"max_logprobs": -1}, {"log_level": "loud"}, {"max_connections": True},
                                 {"allowed_host": ("a:80",)}, {"allowed_host": ("[::1]:80",)},
                                 {"allowed_host": ("http://a",)}, {"allowed_host": ("",)}])  # fmt: skip
def test_limits_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(NanoinferError, match=next(iter(bad))):
        ServerConfig(**bad)
