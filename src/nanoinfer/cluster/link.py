"""The connection between the front and a replica: frames of many exchanges, each a request and its response.

A frame is its payload's length, the number of its exchange, its kind, and the payload:

    front -> replica   REQUEST: what an ASGI scope has, as JSON, and the body
                       TAKEN: how many bytes of the response the client has taken since the last TAKEN
                       CANCEL: the client has left
    replica -> front   HELLO: who connects, as JSON, in exchange 0; the first frame
                       START: status and headers, as JSON
                       BODY: a part of the response's body
                       END: counts of tokens and the last part of the body
                       ABORT: the response ends in the middle

HTTP between the two would cost a parser and a system call for each token of each stream. What the exchanges write in
one turn of the event loop is sent together here, so a step of the engine costs one system call, whatever the number
of streams.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

from nanoinfer.cluster.routing import TOKENS_PER_BLOCK, PrefixTable

HELLO, REQUEST, TAKEN, CANCEL, START, BODY, END, ABORT = range(8)
MAX_FRAME_BYTES = 256 << 20
"""Bodies of requests are limited by the server, and those of responses are in parts."""
MAX_HELLO_BYTES = 1 << 16
WINDOW_BYTES = 1 << 18
"""Bytes of a response that may be on their way: a replica waits before it sends more to a client that reads slowly."""
CONNECT_SEC = 30.0
_COUNT, _COUNTS, _HEAD = struct.Struct("<I"), struct.Struct("<II"), struct.Struct("<IIB")
_KEYS = (b"authorization", b"x-api-key", b"cookie")


class Link:
    """The sending side of a connection. Args: writer: of the connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._written = writer, bytearray()
        self._loop = asyncio.get_running_loop()

    def send(self, exchange: int, kind: int, *parts: bytes) -> None:
        """Send a frame at the end of this turn of the event loop. After the end of the connection it is dropped."""
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written += _HEAD.pack(sum(map(len, parts)), exchange, kind)
        for part in parts:
            self._written += part

    def _flush(self) -> None:
        # Nothing waits for the writer: WINDOW_BYTES bounds what each exchange adds.
        if self._written and not self._writer.is_closing():
            self._writer.write(bytes(self._written))
        self._written.clear()

    def close(self) -> None:
        """Send what was written, and end the connection."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """End the connection at once, as the end of a process does."""
        self._writer.transport.abort()


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> tuple[int, int, bytes] | None:
    """Return exchange, kind and payload of the next frame; None: the connection has ended, or the frame is longer."""
    with suppress(asyncio.IncompleteReadError, OSError):
        size, exchange, kind = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if size <= max_bytes:
            return exchange, kind, await reader.readexactly(size)
    return None


# The front's side ----------------------------------------------------------------------------------------


class ReplicaLost(Exception):
    """The replica has ended, or the response to a request has ended in the middle."""


class Answer:
    """The response to one request. Args: remote: the replica; number: of the exchange."""

    def __init__(self, remote: Remote, number: int) -> None:
        self.remote, self._number = remote, number
        self._changed = asyncio.Event()
        self._num_taken = 0
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.parts = bytearray()
        """Bytes of the body that were received and not taken."""
        self.num_tokens: tuple[int, int] | None = None
        """Tokens of the prompts and of the outputs; None: the response has not ended."""
        self.lost = False

    def receive(self, kind: int, payload: bytes) -> None:
        """Receive a frame."""
        if kind == START:
            self.status, headers = json.loads(payload)
            self.headers = [(name, value) for name, value in headers]
        elif kind == END:
            self.num_tokens = _COUNTS.unpack_from(payload)
            self.parts += payload[_COUNTS.size :]
        elif kind == ABORT:
            self.lost = True
        else:
            self.parts += payload
        self._changed.set()

    async def wait(self) -> None:
        """Wait until a part of the body or the end is there. Raises ReplicaLost: the rest will not come."""
        while not (self.parts or self.num_tokens is not None):
            if self.lost:
                raise ReplicaLost
            self._changed.clear()
            await self._changed.wait()

    def take(self) -> bytes:
        """Return the part of the body that was received since the last call."""
        part = bytes(self.parts)
        self.parts.clear()
        self._num_taken += len(part)
        if self._num_taken >= WINDOW_BYTES // 4:
            self.remote.link.send(self._number, TAKEN, _COUNT.pack(self._num_taken))
            self._num_taken = 0
        return part

    def close(self) -> None:
        """End the exchange: nothing more is received. Without the whole response, the request is cancelled."""
        del self.remote.answers[self._number]
        if self.num_tokens is None and not self.lost:
            self.remote.link.send(self._number, CANCEL)


class Remote:
    """A replica that has connected.

    Args:
        link: to it.
        who: the content of its HELLO.
    """

    def __init__(self, link: Link, who: dict[str, Any]) -> None:
        self.link, self.who = link, who
        self.name = str(who["replica"])
        """Name of the replica among those of its model."""
        self.max_num_seqs: int = who["max_num_seqs"]
        self.prefixes = PrefixTable(who["max_num_tokens"] // TOKENS_PER_BLOCK)
        self.answers: dict[int, Answer] = {}
        """Those that are received now, by the number of their exchange."""
        self._last_number = 0

    @property
    def num_in_flight(self) -> int:
        """Number of requests that it answers."""
        return len(self.answers)

    def ask(self, head: dict[str, Any], body: bytes) -> Answer:
        """Send a request. Args: head: from `head_of`."""
        number = self._last_number = self._last_number % 0xFFFFFFFF + 1
        answer = self.answers[number] = Answer(self, number)
        encoded = json.dumps(head).encode()
        self.link.send(number, REQUEST, _COUNT.pack(len(encoded)), encoded, body)
        return answer

    async def get(self, path: str) -> bytes:
        """Return the body of the response to a GET of the front's own. Raises ReplicaLost; also if it is an error."""
        answer, body = self.ask(head_of({"method": "GET", "path": path, "headers": [], "state": {}}), b""), bytearray()
        try:
            while answer.num_tokens is None:
                await answer.wait()
                body += answer.take()
        finally:
            answer.close()
        if answer.status != 200:
            raise ReplicaLost
        return bytes(body)


class Joined(Protocol):
    """The replicas of one model: what `Remotes` calls of a `Group`."""

    def join(self, remote: Remote) -> None:
        """Add a replica that has connected. Raises ValueError to refuse it."""

    def leave(self, remote: Remote) -> None:
        """Remove a replica whose connection has ended."""


class Remotes:
    """Accepts connections of replicas. Args: groups: the models. A replica says to which it belongs."""

    def __init__(self, groups: Sequence[Joined]) -> None:
        self._groups = groups

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the frames of a connection until its end. For `asyncio.start_unix_server`."""
        link = Link(writer)
        try:
            frame = await read_frame(reader, MAX_HELLO_BYTES)
            if frame is None or frame[1] != HELLO:
                raise ValueError
            who: dict[str, Any] = json.loads(frame[2])
            group, remote = self._groups[who["model"]], Remote(link, who)
            group.join(remote)
        except (ValueError, LookupError, TypeError, RecursionError):  # it is no replica
            return link.close()
        try:
            while (frame := await read_frame(reader)) is not None:
                if (answer := remote.answers.get(frame[0])) is not None:  # else it was cancelled
                    answer.receive(*frame[1:])
        finally:
            link.close()
            for answer in remote.answers.values():
                answer.receive(ABORT, b"")
            group.leave(remote)


# The replica's side --------------------------------------------------------------------------------------


class _Exchange:
    """A request that is answered."""

    def __init__(self) -> None:
        self.left = asyncio.Event()  # is set when the client has left, or the front has ended
        self.room = asyncio.Event()  # is set when the client has taken some of what was sent
        self.num_unread = 0
        """Bytes of the response that the client has not taken yet."""


class Replica:
    """Answers requests of one front.

    Args:
        app: the routes, which get the whole body of a request (`build_routes`).
        who: the content of HELLO.
    """

    def __init__(self, app: ASGIApp, who: Mapping[str, Any]) -> None:
        self._app, self._who = app, who
        self._exchanges: dict[int, _Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, path: str) -> None:
        """Connect to a front and answer until it ends the connection.

        Args:
            path: of the front's socket.

        Raises:
            OSError, asyncio.TimeoutError: the front does not listen there.
        """
        reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(path), CONNECT_SEC)
        link = Link(writer)
        link.send(0, HELLO, json.dumps(self._who).encode())
        while (frame := await read_frame(reader)) is not None:
            number, kind, payload = frame
            if kind == REQUEST:
                task = asyncio.create_task(self._answer(link, number, payload))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif (exchange := self._exchanges.get(number)) is None:
                continue  # it has ended, which the front does not know yet
            elif kind == CANCEL:
                exchange.left.set()
            elif kind == TAKEN:
                exchange.num_unread -= _COUNT.unpack(payload)[0]
                exchange.room.set()
        link.close()
        for exchange in self._exchanges.values():
            exchange.left.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, link: Link, number: int, payload: bytes) -> None:
        end = _COUNT.size + _COUNT.unpack_from(payload)[0]
        scope, bodies = _scope(json.loads(payload[_COUNT.size : end])), [payload[end:]]
        exchange = self._exchanges[number] = _Exchange()

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                return link.send(number, START, json.dumps([message["status"], _decoded(message["headers"])]).encode())
            part = message.get("body", b"")
            if message.get("more_body", False):
                exchange.num_unread += len(part)
                link.send(number, BODY, part)
            else:
                link.send(number, END, _COUNTS.pack(*scope["state"].get("num_tokens", (0, 0))), part)
                del self._exchanges[number]
            while exchange.num_unread > WINDOW_BYTES and not exchange.left.is_set():
                exchange.room.clear()
                await exchange.room.wait()

        try:
            await self._app(scope, receive, send)
        finally:
            if self._exchanges.pop(number, None) is not None:
                link.send(number, ABORT)


def head_of(scope: Scope) -> dict[str, Any]:
    """Return what a replica receives of a request's scope: no API key, which the front has checked."""
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query_string": scope.get("query_string", b"").decode("latin-1"),
        "headers": _decoded([(name, value) for name, value in scope["headers"] if name not in _KEYS]),
        "client": scope.get("client"),
        "state": {name: scope["state"][name] for name in ("request_id", "cache_salt") if name in scope["state"]},
    }


def _decoded(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _scope(head: dict[str, Any]) -> Scope:
    """Return the scope of a request from `head_of`."""
    return {
        **head,
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "server": None,
        "root_path": "",
        "raw_path": head["path"].encode(),
        "query_string": head["query_string"].encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]],
    }
