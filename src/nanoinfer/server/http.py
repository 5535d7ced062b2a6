"""The little of HTTP that the routes need: bodies and responses."""

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


async def read_object(receive: Receive) -> dict[str, Any]:
    """Return the JSON object in the body of a request, which `BoundRequests` has received. Raises FieldError."""
    body: bytes = (await receive())["body"]
    return await asyncio.to_thread(_parse, body) if len(body) > LARGE else _parse(body)


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
