"""The little of HTTP that the routes need: bodies, responses, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nanoinfer.files import parse_json
from nanoinfer.openai_protocol import FieldError, json_bytes
from nanoinfer.server.limits import check_depth

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
LARGE = 1 << 16  # bytes of JSON that are parsed or built in a thread, because it takes more than a millisecond


class ClientDisconnected(Exception):
    """The client has closed the connection: there is nobody to answer."""


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request. Raises ClientDisconnected. A middleware limits its size."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_object(receive: Receive) -> dict[str, Any]:
    """Return the JSON object in the body of a request. Raises FieldError if it is none."""
    body = await read_body(receive)
    if len(body) > LARGE:
        return await asyncio.to_thread(_parse, body)
    return _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode()
    except UnicodeDecodeError as e:
        raise FieldError(f"the body is not UTF-8 (byte {e.start}: {e.reason}): convert it", None) from None
    check_depth(body)
    found = parse_json(text, "the body is not JSON")
    if not isinstance(found, dict):
        raise FieldError("the body is not a JSON object: send {'model': ...}", None)
    return found


async def respond(
    send: Send,
    body: bytes,
    status: int = 200,
    *,
    content_type: bytes = JSON,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Send a whole response."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), length, *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, document: Any, status: int = 200) -> None:
    """Send a document as JSON."""
    await respond(send, json_bytes(document), status)


class DisconnectWatch:
    """A context in which a call is made when the client disconnects.

    Args:
        receive: of the request, whose body has been read.
        call: what to do.
    """

    def __init__(self, receive: Receive, call: Callable[[], None]) -> None:
        self._receive, self._call = receive, call

    async def __aenter__(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._call()
