"""The headers Host and Origin: middleware against web pages that call a server of their visitor's machine.

A page of another site can send requests to a server on localhost, and read the answers if its own name resolves to
127.0.0.1 (DNS rebinding). So the name in Host must be one that this server is known by. A request that has an effect,
which is any but GET, HEAD and OPTIONS, must come from a page of this server or of an allowed origin, or from a program,
which sends no Origin. Only allowed origins get the headers (CORS) that let a page read the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.server.errors import Refusal
from nanoinfer.utils.checks import show

_WILDCARDS = ("0.0.0.0", "::", "")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_MAX_AGE_SEC = 600
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE | re.ASCII)


class CheckOrigins:
    """ASGI middleware: responds with 403 to a foreign Host or Origin, with 400 to a malformed Host or several of one.

    Responses to allowed origins get CORS headers.

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
        self._hosts = {_normal(name) for name in ("localhost", host, *allowed_hosts)}
        self._any_address = host in _WILDCARDS  # an address in Host cannot be the result of DNS rebinding
        self._origins = {origin.lower() for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if its Host and Origin are known."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or len(origins) > 1:
            message = f"{len(hosts)} Host and {len(origins)} Origin headers: send one Host and at most one Origin"
            return await Refusal(400, message).send(send, scope)
        host, origin = hosts[0], origins[0] if origins else None
        place = parse_host(host)
        if place is None:
            message = f"the Host header {show(host)} is not of the form NAME[:PORT]"
            return await Refusal(400, message).send(send, scope)
        if not self._knows(place[0]):
            message = f"the Host header {show(host)} is not a name of this server: start it with --allowed-host NAME"
            return await Refusal(403, message).send(send, scope)
        allowed = origin is not None and (origin.lower() in self._origins or "*" in self._origins)
        foreign = origin is not None and not allowed and parse_host(origin.partition("://")[2]) != place
        if foreign and scope["method"] not in _SAFE_METHODS:
            message = f"the Origin {show(origin)} is not allowed: start the server with --allowed-origin {origin}"
            return await Refusal(403, message).send(send, scope)
        if not allowed:
            return await self.app(scope, receive, send)
        assert origin is not None
        headers = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS" and _values(scope, b"access-control-request-method"):
            asked = ", ".join(_values(scope, b"access-control-request-headers") or ["authorization, content-type"])
            headers += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", asked.encode("latin-1")),
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


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return the values of a header."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def parse_host(text: str) -> tuple[str, int | None] | None:
    """Return the name and the port of a Host header, in a form that is compared; None if it is malformed.

    "LOCALHOST:8000" -> ("localhost", 8000); "[::0:1]" -> ("::1", None); "localhost:80@evil.example" -> None
    """
    if (match := _HOST.fullmatch(text)) is None:
        return None
    address, name, port = match.groups()
    try:
        found = _normal(name) if address is None else str(IPv6Address(address))
    except ValueError:
        return None
    number = None if port is None else int(port)
    return None if (number or 0) > 65535 else (found, number)


def _normal(name: str) -> str:
    """ "LOCALHOST" -> "localhost"; "FD00:0::1" -> "fd00::1"."""
    try:
        return str(ip_address(name))
    except ValueError:
        return name.lower()
