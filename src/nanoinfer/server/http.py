"""The little of HTTP that the routes need: bodies and responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar

from nanoinfer.errors import NanoinferError
from nanoinfer.openai_protocol import FieldError
from nanoinfer.server.limits import check_json
from nanoinfer.utils.files import parse_json
from nanoinfer.utils.json_pieces import json_bytes, json_pieces, json_strings
from nanoinfer.utils.workers import Workers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
LARGE_BYTES = 1 << 16  # of a body that is read in a thread, because it takes more than a few milliseconds
LARGE_VALUES = 1 << 12  # numbers and strings of a response that is written in a thread


class Bodies:
    """Reads and writes the JSON of requests and responses. What is large is read and written in threads.

    There is one thread for each, because Python runs one at a time: more of them would delay the event loop.
    """

    def __init__(self) -> None:
        self._reading = Workers("nanoinfer-read", 1)
        self._writing = Workers("nanoinfer-write", 1)

    async def read(self, receive: Receive, convert: Callable[[dict[str, Any]], T]) -> T:
        """Return what `convert` makes of the JSON object in the body of a request, which `BoundRequests` has received.

        Args:
            receive: of the request.
            convert: reads and checks the object.

        Raises:
            NanoinferError: the body is not such an object; or from `convert`.
        """
        body: bytes = (await receive())["body"]
        if len(body) <= LARGE_BYTES:
            return convert(_parse(body))
        return await self._reading.run(lambda: _without_frames(lambda: convert(_parse(body))))

    async def write(self, make: Callable[[], T]) -> T:
        """Return the result of a call that prepares a large response, which runs in a thread."""
        return await self._writing.run(make)

    async def respond(self, send: Send, document: Any, num_values: int) -> None:
        """Send a document as JSON.

        Args:
            send: of the request.
            document: for `json_strings`.
            num_values: about how many numbers and strings it has.
        """
        if num_values <= LARGE_VALUES:
            return await respond_json(send, document)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", JSON)]})
        await self.send(send, json_strings(document))
        await send({"type": "http.response.body", "body": b""})

    async def send(self, send: Send, strings: Iterable[str]) -> None:
        """Send a part of a body in pieces. Each is made when the client has read most of those before."""
        pieces = iter(json_pieces(strings))
        while (piece := await self._writing.run(lambda: next(pieces, None))) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})


def _without_frames(call: Callable[[], T]) -> T:
    """Return the result of a call. Its errors do not refer to its frames, which hold all that was parsed."""
    try:
        return call()
    except NanoinferError as e:
        error = e.with_traceback(None)
    raise error


def _parse(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode()
    except UnicodeDecodeError as e:
        raise FieldError(f"the body is not UTF-8 (byte {e.start}: {e.reason}): convert it", None) from None
    check_json(body)
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
    """Send a small document as JSON."""
    await respond(send, json_bytes(document), status)
