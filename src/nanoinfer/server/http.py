"""The little of HTTP that the routes need: bodies, responses, and refusals in OpenAI's or in Anthropic's shape."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from nanoinfer.entrypoints.async_engine import CLOSED
from nanoinfer.errors import NanoinferError, QueueFull, escaped
from nanoinfer.protocols.errors import anthropic_error, error_body, error_object, status_code
from nanoinfer.protocols.fields import ANTHROPIC, TABLES
from nanoinfer.utils.files import decode_utf8, parse_json
from nanoinfer.utils.json_pieces import json_bytes, json_pieces, json_strings
from nanoinfer.utils.workers import Workers

T = TypeVar("T")

JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"
LARGE_BYTES = 1 << 16  # of a body that is read in a thread, because it takes more than a few milliseconds
LARGE_VALUES = 1 << 12  # numbers and strings of a response that is written in a thread
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 1 << 16
_NOT_BRACKETS = re.compile(rb'"[^"]*"|[^][{}"]+')


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

    async def respond(self, send: Send, make: Callable[[], Any], num_values: int) -> None:
        """Send a document as JSON.

        Args:
            send: of the request.
            make: returns the document, for `json_strings`; in a thread, if it is large.
            num_values: about how many numbers and strings it has.
        """
        if num_values <= LARGE_VALUES:
            return await respond_json(send, make())
        strings = json_strings(await self.write(make))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", JSON)]})
        await self.send(send, strings)
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
    text = decode_utf8(body, "the body")
    _check_json(body)
    found = parse_json(text, "the body is not JSON")
    if not isinstance(found, dict):
        raise NanoinferError("the body is not a JSON object: send {'model': ...}")
    return found


def _check_json(body: bytes) -> None:
    """Check the lists and objects of JSON in UTF-8 before it is parsed. Brackets in strings do not count.

    Raises:
        NanoinferError: they nest deeper than MAX_JSON_DEPTH, or there are more than MAX_JSON_CONTAINERS.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _NOT_BRACKETS.sub(b"", body)
    count = brackets.count(b"[") + brackets.count(b"{")
    if count > MAX_JSON_CONTAINERS:
        raise NanoinferError(f"the body has {count} lists and objects; the limit is {MAX_JSON_CONTAINERS}: send fewer")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            raise NanoinferError(f"the body is not JSON of at most {MAX_JSON_DEPTH} levels: it nests deeper")


class SentResponse:
    """Passes a response on, and records what was sent. It runs for each token: no coroutine of its own.

    Args:
        send: of the request.
        headers: added to those of the response.
    """

    def __init__(self, send: Send, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._send, self._headers = send, [*headers]
        self.status = 0
        """Of the response; 0: it has not begun."""
        self.is_stream = self.is_complete = False

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send a message."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), *self._headers]
            message = {**message, "headers": headers}
            types = [value for name, value in headers if name.lower() == b"content-type"]
            self.status, self.is_stream = message["status"], any(t.startswith(b"text/event-stream") for t in types)
        elif not message.get("more_body", False):
            self.is_complete = True
        return self._send(message)


async def respond(
    send: Send,
    body: bytes,
    status: int = 200,
    *,
    content_type: bytes = JSON,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Send a whole response."""
    about_body = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*about_body, *headers]})
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, document: Any, status: int = 200) -> None:
    """Send a small document as JSON."""
    await respond(send, json_bytes(document), status)


log = logging.getLogger("nanoinfer.server")

RETRY_AFTER_SEC = 1
_OF_V1 = {*TABLES, "/v1/models"}
"""Paths that clients may miss whose base URL does not end with /v1."""


@dataclass(frozen=True)
class Refusal:
    """An error response.

    Args:
        status: the HTTP status.
        message: one line that may be shown to the client.
        param: name of the request's field.
        code: OpenAI's code, which clients compare.
        headers: further headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def content(self, scope: Scope | None = None) -> bytes:
        """Return the body in ASCII: a message may have characters that UTF-8 cannot represent.

        Args:
            scope: of the request, whose path determines the shape; None: it is not parsed.
        """
        body = error_object(self.message, self.status, self.param, self.code)
        if scope is not None and scope["path"] in ANTHROPIC:
            body = anthropic_error(self.message, self.status, scope.get("state", {}).get("request_id"))
        return json.dumps(body).encode()

    def event(self, scope: Scope) -> bytes:
        """Return the error as an event of a stream whose status has been sent."""
        name = b"event: error\n" if scope["path"] in ANTHROPIC else b""
        return name + b"data: " + self.content(scope) + b"\n\n"

    async def send(self, send: Send, scope: Scope) -> None:
        """Send it as the whole response."""
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
        await respond(send, self.content(scope), self.status, headers=raw)


def too_many(message: str) -> Refusal:
    """Return the response to a request that may succeed later."""
    return Refusal(429, message, code="rate_limit_exceeded", headers=(("retry-after", str(RETRY_AFTER_SEC)),))


def headers_too_large(limit: int) -> Refusal:
    """Return the response to a request whose headers have more than `limit` bytes."""
    return Refusal(431, f"the request's line and headers have more than max_header_bytes={limit} bytes: send less")


def unexpected(error: Exception, scope: Scope) -> Refusal:
    """Log an exception on one line, without its message, which may contain a prompt. The response has neither."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "" if at is None else f" at {at.tb_frame.f_globals.get('__name__')}:{at.tb_lineno}"
    log.error(
        "request %s: %s%s (--log-level debug shows the traceback)",
        scope.get("state", {}).get("request_id", "-"),
        type(error).__name__,
        where,
        exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
    )
    return Refusal(500, "internal error: the server's log has the reason under this response's X-Request-Id")


def refusal_of(error: Exception, scope: Scope) -> Refusal:
    """Return the response to a request for which an exception was raised. Logs one that is not expected."""
    if isinstance(error, HTTPException):  # Starlette's router: an unknown path or method
        message = f"{scope['method']} {escaped(scope['path'])}: {error.detail}"
        if (path := f"/v1{scope['path']}") in _OF_V1:
            message += f": the path is {path}"
        return Refusal(error.status_code, message, headers=tuple((error.headers or {}).items()))
    if isinstance(error, QueueFull):
        return too_many(str(error))
    if not isinstance(error, NanoinferError):
        return unexpected(error, scope)
    if str(error) == CLOSED:
        return Refusal(503, "the server is shutting down", headers=(("retry-after", str(RETRY_AFTER_SEC)),))
    body = error_body(error)["error"]
    return Refusal(status_code(error), body["message"], body["param"], body["code"])
