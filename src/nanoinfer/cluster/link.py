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
from collections.abc import Callable
from typing import Any, cast

HELLO, REQUEST, TAKEN, CANCEL, START, BODY, END, ABORT = range(8)
MAX_FRAME_BYTES = 256 << 20
"""Bodies of requests are limited by the server, and those of responses are in parts."""
MAX_HELLO_BYTES = 1 << 16
WINDOW_BYTES = 1 << 18
"""Bytes of a response that may be on their way: a replica waits before it sends more to a client that reads slowly."""
COUNT = struct.Struct("<I")
COUNTS = struct.Struct("<II")
_HEAD = struct.Struct("<IIB")

CONNECT_SEC = 30.0

Receive = Callable[["Link", int, int, bytes], None]
Address = str | tuple[str, int]


class Link(asyncio.Protocol):
    """One end of a connection.

    Args:
        receive: is called with each frame: this link, the exchange, the kind and the payload.
        lost: is called once, when the connection has ended.
        max_bytes: of a frame; a longer one ends the connection.
    """

    def __init__(self, receive: Receive, lost: Callable[[Link], None], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._receive, self._lost, self.max_bytes = receive, lost, max_bytes
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received, self._written = bytearray(), bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have another base class
        self._transport.set_write_buffer_limits(high=MAX_FRAME_BYTES)  # WINDOW_BYTES bounds what each exchange adds

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end. Called by the event loop."""
        self._transport = None
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        """Pass on the frames that are complete. Called by the event loop."""
        buffer = self._received
        buffer += data
        at = 0
        while len(buffer) - at >= _HEAD.size:
            size, exchange, kind = _HEAD.unpack_from(buffer, at)
            if size > self.max_bytes:
                return self.close()
            if len(buffer) - at < (end := _HEAD.size + size):
                break
            payload = bytes(buffer[at + _HEAD.size : at + end])
            at += end
            self._receive(self, exchange, kind, payload)
        del buffer[:at]

    def send(self, exchange: int, kind: int, *parts: bytes) -> None:
        """Send a frame at the end of this turn of the event loop. Without a connection it is dropped."""
        if self._transport is None:
            return
        if not self._written:
            self.loop.call_soon(self._flush)
        self._written += _HEAD.pack(sum(map(len, parts)), exchange, kind)
        for part in parts:
            self._written += part

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(bytes(self._written))
        self._written.clear()

    def close(self) -> None:
        """Send what was written, and end the connection."""
        if self._transport is not None:
            self._flush()
            self._transport.close()


async def connect(address: Address, receive: Receive, lost: Callable[[Link], None]) -> Link:
    """Return a connection to a front.

    Args:
        address: the path of a socket, or host and port.
        receive, lost: as for `Link`.

    Raises:
        OSError, asyncio.TimeoutError: the front does not listen there.
    """
    loop = asyncio.get_running_loop()
    connecting: Any = (
        loop.create_unix_connection(lambda: Link(receive, lost), address)
        if isinstance(address, str)
        else loop.create_connection(lambda: Link(receive, lost), *address)
    )
    _, link = await asyncio.wait_for(connecting, CONNECT_SEC)
    return cast(Link, link)


def with_head(head: dict[str, Any], body: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the parts of a payload of JSON and bytes."""
    encoded = json.dumps(head).encode()
    return COUNT.pack(len(encoded)), encoded, body


def split_head(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the JSON and the bytes of a payload from `with_head`."""
    end = COUNT.size + COUNT.unpack_from(payload)[0]
    return json.loads(payload[COUNT.size : end]), payload[end:]
