"""Bounds of connections that no ASGI middleware can hold: slow heads, idle ones, slow readers, and their number.

uvicorn's protocol closes a connection that is idle after a response, and no other. This one looks at what a connection
waits for, a few times in each time limit, and aborts it when that takes longer than its limit:

    head       from the connection's first byte, or its opening, to the end of the request's headers
    body       that the application no longer reads, because it has refused the request; it is discarded
    unread     the response: the client must take 16 KiB in send_timeout_sec while the transport's buffer is full
    closing    the same after the connection's end; then it is reset
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoinfer.errors import NanoinferError
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Refusal, headers_too_large

log = logging.getLogger("nanoinfer.server")

MAX_CONNECTIONS = 1024
RESERVE = 48
"""Number of descriptors that are kept for what is opened later: 3 for the event loop, 2 for each of the processes of
templates and grammars and 6 more while one starts, and a few that are accepted; the rest for libraries."""


def with_max_connections(config: ServerConfig) -> ServerConfig:
    """Raise the soft limit of open files to the hard one, and return a configuration whose connections fit into it.

    Args:
        config: if it has no max_connections, the result has as many as fit, at most MAX_CONNECTIONS.

    Raises:
        NanoinferError: the connections do not fit.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        with suppress(OSError, ValueError):  # macOS refuses more than its own maximum
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            limit = hard
    others = len(os.listdir("/dev/fd")) + RESERVE
    fitting = MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else limit - others
    count = config.max_connections or max(1, min(MAX_CONNECTIONS, fitting))
    if limit != resource.RLIM_INFINITY and count > fitting:
        raise NanoinferError(
            f"max_connections={count} requires {count + others} open files and the limit is {limit}:"
            " lower --max-connections or raise the limit (ulimit -Hn)"
        )
    return replace(config, max_connections=count)


CONNECTION = "nanoinfer.connection"  # in scope["extensions"]: a ChunkedConnection
_MIN_READ_BYTES = 1 << 14  # that a client must take in send_timeout_sec
_BACKLOG = 2048  # connections that wait to be accepted; the operating system's limit is usually 4096
_CHECKS = 4  # in the shortest time limit
_HEADERS_TOO_LARGE = 431


def bounded_protocol(config: ServerConfig) -> type[H11Protocol]:
    """Return the protocol class for uvicorn.Config(http=...) that holds these bounds."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"bounds": config})


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Return the options of uvicorn.Config that hold the limits and keep uvicorn from doing more than HTTP."""
    return {
        "http": bounded_protocol(config),
        "h11_max_incomplete_event_size": config.max_header_bytes,
        "backlog": 1,  # of BoundedServer
        "timeout_keep_alive": math.ceil(config.keep_alive_sec),
        "ws": "none",
        "proxy_headers": False,  # no header changes the client's address
        "server_header": False,
        "access_log": False,  # access_log.py
        "log_config": None,
    }


class BoundedServer(uvicorn.Server):
    """uvicorn's server, which accepts one connection in each turn of the event loop.

    asyncio accepts as many as the backlog before the first of them is counted, refused or closed: a burst of clients
    could take all file descriptors. So the backlog is 1 while asyncio looks at it, and then enlarged.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)


class ChunkedConnection:
    """Writes parts of a response's body without a coroutine for each: an extension of ASGI for HTTP/1.1.

    It may be used between the first part of a body without a length, which must be sent by `send`, and the last one.

    Args:
        protocol: of the connection.
    """

    def __init__(self, protocol: H11Protocol) -> None:
        self._transport, self._flow, self._cycle = protocol.transport, protocol.flow, protocol.cycle

    def is_writable(self) -> bool:
        """Return whether the client is there and has read what was written before, but for the transport's buffer."""
        return not (self._flow.write_paused or self._cycle.disconnected or self._transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body, which must not be empty, as `h11` would."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _BoundedProtocol(H11Protocol):
    bounds: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._application, self.app = self.app, self._run
        config = self.bounds
        assert config.max_connections is not None  # descriptors.py
        self._max_connections = config.max_connections
        self._time_limits = {
            "head": config.header_timeout_sec,
            "idle": config.keep_alive_sec,
            "body": config.body_timeout_sec,
            "unread": config.send_timeout_sec,
            "closing": config.send_timeout_sec,
        }
        self._interval = min(1.0, min(self._time_limits.values()) / _CHECKS)
        self._phase, self._since, self._num_unread = ("", 0), 0.0, 0
        self._num_requests = 0
        self._timer: asyncio.TimerHandle | None = None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy may read the other of the two, and see another end of the body than h11.
            message = "the request has Content-Length and Transfer-Encoding: send one of them"
            return await Refusal(400, message, headers=(("connection", "close"),)).send(send, scope)
        if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {**scope.get("extensions", {}), CONNECTION: ChunkedConnection(self)}
        await self._application(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            message = f"the server has max_connections={self._max_connections} open connections: try again later"
            refusal = Refusal(503, message, headers=(("retry-after", "1"),))
            transport.write(_plain_response(refusal))
            transport.close()
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def on_response_complete(self) -> None:
        self._num_requests += 1
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request. Called by uvicorn in the handler of the exception."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # malformed bytes after a request that is being answered
            return
        error = sys.exc_info()[1]
        refusal = Refusal(400, "the request is not HTTP/1.1")
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == _HEADERS_TOO_LARGE:
            refusal = headers_too_large(self.bounds.max_header_bytes)
        self.transport.write(_plain_response(refusal))
        self.transport.close()

    def _check(self) -> None:
        """Abort the connection if what it waits for has taken too long; else look again later."""
        now, phase = self.loop.time(), (self._waits_for(), self._num_requests)
        num_unread = self.transport.get_write_buffer_size()
        progress = phase[0] in ("unread", "closing") and num_unread <= self._num_unread - _MIN_READ_BYTES
        if phase != self._phase or progress:
            self._phase, self._since, self._num_unread = phase, now, num_unread
        elif now - self._since >= self._time_limits.get(phase[0], float("inf")):
            log.debug("a connection is closed: %s took %g seconds", phase[0], now - self._since)
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self._interval, self._check)

    def _waits_for(self) -> str:
        if self.transport.is_closing():
            return "closing"
        if self.flow.write_paused:
            return "unread"
        if self.cycle is not None and not self.cycle.response_complete:
            return "response"  # config.py bounds it
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        begun = self._num_requests == 0 or self.conn.trailing_data[0]
        return "head" if begun else "idle"


def _plain_response(refusal: Refusal) -> bytes:
    """Return a whole HTTP response to a request that is not parsed."""
    content = refusal.content()
    head = [f"HTTP/1.1 {refusal.status} Refused", "content-type: application/json", "connection: close"]
    head += [f"content-length: {len(content)}", *(f"{name}: {value}" for name, value in refusal.headers)]
    return "\r\n".join([*head, "", ""]).encode() + content
