"""The headers Host and Origin: middleware against web pages that call a server of their visitor's machine.

A page of another site can send requests to a server on localhost, and read the answers if its own name resolves to
127.0.0.1 (DNS rebinding). So the name in Host must be one that this server is known by. A request that has an effect,
which is any but GET, HEAD and OPTIONS, must come from a page of this server or of an allowed origin, or from a program,
which sends no Origin. Only allowed origins get the headers (CORS) that let a page read the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.checks import show
from nanoinfer.server.errors import Refusal

_WILDCARDS = ("0.0.0.0", "::", "")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_MAX_AGE_SEC = 600


class CheckOrigins:
    """ASGI middleware: responds with 403 to a foreign Host or Origin, and adds CORS headers for allowed origins.

    Args:
        app: the application.
        host: the address that the server is bound to.
        allowed_hosts: further names in Host, without port; "*" allows every name.
        allowed_origins: origins of pages that may use this server; "*" allows every one.
    """

    def __init__(
        self, app: ASGIApp, host: str, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = ()
    ) -> None:
        self.app = app
        self._hosts = {name.lower() for name in ("localhost", host, *allowed_hosts)}
        self._any_address = host in _WILDCARDS  # an address in Host cannot be the result of DNS rebinding
        self._origins = {origin.lower() for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if its Host and Origin are known."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        host, origin = _only(scope, b"host"), _only(scope, b"origin")
        if host is None or not self._knows(_name(host)):
            message = f"the Host header {show(host)} is not a name of this server: start it with --allowed-host NAME"
            return await Refusal(403, message).send(send)
        allowed = origin is not None and (origin.lower() in self._origins or "*" in self._origins)
        foreign = origin is not None and not allowed and origin.lower().partition("://")[2] != host.lower()
        if foreign and scope["method"] not in _SAFE_METHODS:
            message = f"the Origin {show(origin)} is not allowed: start the server with --allowed-origin {origin}"
            return await Refusal(403, message).send(send)
        if not allowed:
            return await self.app(scope, receive, send)
        assert origin is not None
        headers = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS" and _only(scope, b"access-control-request-method") is not None:
            asked = (_only(scope, b"access-control-request-headers") or "authorization, content-type").encode("latin-1")
            headers += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", asked),
                (b"access-control-max-age", str(_MAX_AGE_SEC).encode()),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            return await send({"type": "http.response.body", "body": b""})

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = (b"access-control-expose-headers", b"x-request-id, retry-after")
                message = {**message, "headers": [*message.get("headers", []), *headers, exposed]}
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _knows(self, name: str) -> bool:
        if name in self._hosts or "*" in self._hosts:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback


def _only(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header; None if there is none, or several."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _name(host: str) -> str:
    """ "LOCALHOST:8000" -> "localhost"; "[::1]:8000" -> "::1"."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name.lower() if not port or port.startswith(":") else ""
    return host.partition(":")[0].lower()
