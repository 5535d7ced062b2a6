"""Responses to requests that are refused or fail: in OpenAI's shape, or in Anthropic's on the paths that have it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from starlette.types import Scope, Send

from nanoinfer import anthropic_protocol, openai_protocol
from nanoinfer.entrypoints.async_engine import CLOSED
from nanoinfer.errors import NanoinferError, QueueFull
from nanoinfer.server.http import respond

log = logging.getLogger("nanoinfer.server")

RETRY_AFTER_SEC = 1


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
        body = openai_protocol.error_object(self.message, self.status, self.param, self.code)
        if scope is not None and scope["path"] in anthropic_protocol.TABLES:
            body = anthropic_protocol.error_object(self.message, self.status, scope.get("state", {}).get("request_id"))
        return json.dumps(body).encode()

    def event(self, scope: Scope) -> bytes:
        """Return the error as an event of a stream whose status has been sent."""
        name = b"event: error\n" if scope["path"] in anthropic_protocol.TABLES else b""
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


def internal_error() -> Refusal:
    """Return the response to a request that has failed unexpectedly. The response does not expose the exception."""
    return Refusal(500, "internal error: the server's log has the reason under this response's X-Request-Id")


def unexpected(error: Exception, scope: Scope) -> Refusal:
    """Log an exception on one line, without its message, which may contain a prompt; return the response to it."""
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
    return internal_error()


def refusal_of(error: Exception) -> Refusal:
    """Return the response to a request for which an exception was raised."""
    if isinstance(error, QueueFull):
        return too_many(str(error))
    if not isinstance(error, NanoinferError):
        return internal_error()
    if str(error) == CLOSED:
        return Refusal(503, "the server is shutting down", headers=(("retry-after", str(RETRY_AFTER_SEC)),))
    body = openai_protocol.error_body(error)["error"]
    return Refusal(openai_protocol.status_code(error), body["message"], body["param"], body["code"])
