"""Connections of the server, with raw sockets and uvicorn: slow senders, slow readers, idle and vanishing clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `server` is not installed")

import uvicorn
from starlette.types import Receive, Scope, Send

from nanoinfer.server.config import ServerConfig
from nanoinfer.server.connections import BoundedServer, uvicorn_options
from nanoinfer.server.limits import BoundRequests

LIMITS = ("header_timeout_sec", "body_timeout_sec", "send_timeout_sec", "keep_alive_sec")
TIMES = dict.fromkeys(LIMITS, 30.0)
"""Those that a test is not about: longer than it may have to wait for a CPU."""
SOON = 20.0  # of what takes a moment: it fails before the limits above
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


class Served:
    """A server in a thread, with a toy application."""

    def __init__(self, limits: ServerConfig) -> None:
        self.events: list[str] = []
        self.bounds = BoundRequests(self._app, limits)
        config = uvicorn.Config(self.bounds, lifespan="off", **uvicorn_options(limits))
        self.server = BoundedServer(config)
        bound = socket.create_server(("127.0.0.1", 0))
        self.port = bound.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([bound],))
        self.thread.start()
        self.until(lambda: self.server.started)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/: echo. /large: 64 MiB. /stream: events without end. /sleep: no answer."""
        body = (await receive())["body"]
        self.events.append(scope["path"])
        try:
            await send_answer(scope["path"], body, send)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SOON)

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    def until(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not is_true():
            assert time.monotonic() < end
            time.sleep(0.005)


async def send_answer(path: str, body: bytes, send: Send) -> None:
    if path == "/sleep":
        await asyncio.sleep(60)
    kind = b"text/event-stream" if path == "/stream" else b"text/plain"
    if path == "/large":
        body = b"x" * (1 << 26)
    headers = [(b"content-type", kind)]
    if path != "/stream":
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while path == "/stream":
        await send({"type": "http.response.body", "body": b"data: " + b"x" * 5000 + b"\n\n", "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(**limits: Any) -> Iterator[Served]:
    served = Served(ServerConfig(**{"max_connections": 100, **TIMES, **limits}))
    try:
        yield served
        served.until(lambda: served.num_connections == 0)
        served.until(lambda: served.bounds.num_in_flight == 0)
    finally:
        served.server.should_exit = served.server.force_exit = True
        served.thread.join(SOON)
    assert not served.thread.is_alive()


def response(client: socket.socket) -> tuple[int, bytes]:
    """Read one response with a content-length or an end; return its status and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while lengths and len(body) < int(lengths[0]):
        body += client.recv(65536)
    return int(head.split()[1]), body


def closed(client: socket.socket, began: float | None = None) -> float:
    """Wait until the server closes the connection; return how long that took from `began`, or now, on."""
    began = time.monotonic() if began is None else began
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


def cut_off(client: socket.socket, parts: list[bytes]) -> float:
    """Send parts slowly until the server closes the connection; return how long that took."""
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        send_slowly(client, parts)
    return time.monotonic() - began


def send_slowly(client: socket.socket, parts: list[bytes]) -> None:
    for part in parts:
        client.sendall(part)
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [b"", b"P", b"POST / HTTP/1.1\r\nhost: localh", HEAD])
def test_a_slow_head_is_cut_off(sent: bytes) -> None:
    began = time.monotonic()
    with serving(header_timeout_sec=0.4) as served, served.connect() as client:
        with suppress(ConnectionError):  # cut off already
            client.sendall(sent)
        assert 0.3 < closed(client, began) < SOON
        assert served.events == []


def test_a_head_that_comes_byte_by_byte_is_cut_off() -> None:
    began = time.monotonic()
    with serving(header_timeout_sec=0.4) as served, served.connect() as client:
        cut_off(client, [bytes([byte]) for byte in HEAD * 12])
        assert 0.3 < time.monotonic() - began < SOON


@pytest.mark.slow
def test_a_second_slow_head_on_a_connection_is_cut_off() -> None:
    with serving(header_timeout_sec=1) as served, served.connect() as client:
        client.sendall(HEAD + b"content-length: 2\r\n\r\nhi")
        assert response(client) == (200, b"hi")
        began = time.monotonic()
        client.sendall(b"POST")  # uvicorn ends its timer of idle connections here
        assert 0.9 < closed(client, began) < SOON


@pytest.mark.slow
def test_an_idle_connection_is_closed_and_a_used_one_is_not() -> None:
    with serving(keep_alive_sec=1.5) as served, served.connect() as client:
        for _ in range(4):
            client.sendall(HEAD + b"content-length: 2\r\n\r\nhi")
            assert response(client) == (200, b"hi")
            time.sleep(0.5)
        assert closed(client) < SOON


def test_a_slow_body_gets_408() -> None:
    with serving(body_timeout_sec=0.4) as served, served.connect() as client:
        client.sendall(HEAD + b"content-length: 100\r\n\r\nx")
        status, body = response(client)
        assert status == 408
        assert "body_timeout_sec" not in body.decode()
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert closed(client) < SOON  # the rest of the body does not come either
        assert served.events == []


def test_a_large_body_is_refused_and_the_rest_of_it_discarded_for_a_while() -> None:
    with serving(max_body_bytes=1000, body_timeout_sec=1) as served, served.connect() as client:
        client.sendall(HEAD + b"content-length: 200000\r\n\r\n" + b"x" * 200_000)
        assert response(client)[0] == 413
        client.sendall(HEAD + b"content-length: 2\r\n\r\nhi")  # the connection is usable
        assert response(client) == (200, b"hi")
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000 + b"\r\n")
        assert response(client)[0] == 413
        assert cut_off(client, [b"5\r\nxxxxx\r\n"] * 500) < SOON


def test_a_reader_that_does_not_read_is_cut_off_and_its_request_cancelled() -> None:
    with serving(send_timeout_sec=0.4) as served, served.connect() as client:
        client.sendall(HEAD.replace(b"/ ", b"/stream ", 1) + b"\r\n")
        served.until(lambda: served.events == ["/stream", "cancelled"])


def test_the_end_of_a_response_that_is_not_read_does_not_keep_the_connection() -> None:
    with serving(send_timeout_sec=0.4) as served, served.connect() as client:
        client.sendall(HEAD.replace(b"/ ", b"/large ", 1) + b"\r\n")
        served.until(lambda: served.events == ["/large"])


@pytest.mark.slow
def test_a_slow_reader_that_reads_enough_gets_everything() -> None:
    with serving(send_timeout_sec=1.5) as served, served.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        client.sendall(HEAD.replace(b"/ ", b"/large ", 1) + b"connection: close\r\n\r\n")
        num_bytes, began = 0, time.monotonic()
        while part := client.recv(1 << 20):
            num_bytes += len(part)
            if time.monotonic() - began < 3:  # twice the limit
                time.sleep(0.1)
        assert num_bytes > 1 << 26


@pytest.mark.parametrize("path", [b"/stream", b"/sleep"])
def test_a_client_that_vanishes_cancels_its_request(path: bytes) -> None:
    with serving(send_timeout_sec=30) as served:
        client = served.connect()
        client.sendall(HEAD.replace(b"/ ", path + b" ", 1) + b"\r\n")
        served.until(lambda: served.events != [])
        client.close()
        served.until(lambda: "cancelled" in served.events)


@pytest.mark.parametrize("sent", [b"", b"PO", HEAD, HEAD + b"content-length: 100\r\n\r\nxx", HEAD + b"\r\n"])
def test_a_client_that_vanishes_at_any_stage_leaves_nothing(sent: bytes) -> None:
    limits = dict.fromkeys(TIMES, 30)
    with serving(**limits) as served:
        for hard in (False, True):
            client = served.connect()
            if hard:  # a reset instead of an orderly end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.sendall(sent)
            client.close()


def test_headers_that_are_too_large_get_431() -> None:
    with serving(max_header_bytes=1000) as served:
        for more in (b"x: " + b"y" * 2000, b"x: " + b"y" * 2000 + b"\r\n\r\n", b"x: y\r\n" * 300 + b"\r\n"):
            with served.connect() as client:
                client.sendall(HEAD + more)
                status, body = response(client)
                assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")
        assert served.events == []


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", HEAD + HEAD])
def test_what_is_not_http_gets_400(sent: bytes) -> None:
    with serving() as served, served.connect() as client:
        client.sendall(sent + b"\r\n\r\n")
        status, body = response(client)
        assert (status, json.loads(body)["error"]["message"]) == (400, "the request is not HTTP/1.1")
        assert closed(client) < SOON


def test_content_length_beside_transfer_encoding_gets_400_and_ends_the_connection() -> None:
    smuggled = b"4\r\nbody\r\n0\r\n\r\n" + HEAD + b"\r\n"
    with serving() as served, served.connect() as client:
        client.sendall(HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + smuggled)
        status, body = response(client)
        assert (status, "send one of them" in json.loads(body)["error"]["message"]) == (400, True)
        assert closed(client) < SOON
        assert served.events == []


def test_a_malformed_second_request_ends_the_connection_alone() -> None:
    with serving() as served, served.connect() as other, served.connect() as client:
        other.sendall(HEAD.replace(b"/ ", b"/sleep ", 1) + b"\r\n")
        client.sendall(HEAD.replace(b"/ ", b"/sleep ", 1) + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n")
        closed(client)
        assert served.num_connections == 1


def test_refused_connections_do_not_stay_open() -> None:
    with serving(max_connections=1, header_timeout_sec=30) as served, served.connect() as first:
        served.until(lambda: served.num_connections == 1)
        others = [served.connect() for _ in range(20)]
        assert [response(client)[0] for client in others] == [503] * len(others)

        served.until(lambda: served.num_connections == 1)
        first.sendall(HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nhi")
        assert response(first) == (200, b"hi")
        for client in others:
            client.close()


def test_connections_above_the_maximum_get_503() -> None:
    with serving(max_connections=2, header_timeout_sec=30) as served:
        first, second = served.connect(), served.connect()
        served.until(lambda: served.num_connections == 2)
        with served.connect() as third:
            status, body = response(third)
            assert (status, "max_connections=2" in json.loads(body)["error"]["message"]) == (503, True)
            assert closed(third) < SOON
        first.close()
        served.until(lambda: served.num_connections == 1)
        with served.connect() as third:
            third.sendall(HEAD + b"content-length: 2\r\nconnection: close\r\n\r\nhi")
            assert response(third) == (200, b"hi")
        second.close()
