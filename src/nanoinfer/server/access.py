"""Who may use the server: middleware for API keys, and against web pages that call a server of their visitor's machine.

A page of another site can send requests to a server on localhost, and read the answers if its own name resolves to
127.0.0.1 (DNS rebinding). So the name in Host must be one that this server is known by. A request that has an effect,
which is any but GET, HEAD and OPTIONS, must come from a page of this server or of an allowed origin, or from a program,
which sends no Origin. Only allowed origins get the headers (CORS) that let a page read the answer.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.server import page_routes
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Refusal
from nanoinfer.utils import environment
from nanoinfer.utils.files import read_limited

PUBLIC = page_routes.paths() | {"/health"}
"""Paths that need no key: a load balancer has none, and the page must load before a key can be entered into it. They
answer GET with constant files, which depend on neither the model nor its requests."""
MAX_KEY_FILE_BYTES = 1 << 16


def with_keys(config: ServerConfig) -> ServerConfig:
    """Return a configuration with all keys: those given, those of NANOINFER_API_KEY, and those of the file.

    Raises:
        NanoinferError: the file cannot be read, or has no key; or a key has characters that a header cannot carry.
    """
    keys = [*config.api_key, *environment.api_keys()]
    if config.api_key_file is not None:
        file = Path(config.api_key_file)
        lines = read_limited(file, MAX_KEY_FILE_BYTES, "a list of API keys").decode("utf-8", "replace").split("\n")
        keys_of_file = [line.strip() for line in lines if line.strip()]
        if not keys_of_file:
            raise NanoinferError(f"{escaped(file)} has no API key: write one in each line")
        keys += keys_of_file
    for i, key in enumerate(keys):
        if not re.fullmatch(r"[!-~]{1,512}", key):  # the message does not show it
            raise NanoinferError(f"API key {i + 1} of {len(keys)} is not 1 to 512 ASCII characters without spaces")
    return replace(config, api_key=tuple(dict.fromkeys(keys)), api_key_file=None)


def combined_salt(scope: Scope, salt: str | None) -> str | None:
    """Return the `cache_salt` of a prompt: that of the request's key, and the one that the request gives itself.

    Requests of different keys never share prefixes, whatever salt they give.
    """
    of_key: str | None = scope.get("state", {}).get("cache_salt")
    return salt if of_key is None else f"{of_key}:{salt or ''}"


class RequireKey:
    """ASGI middleware: responds with 401 unless a request has one of the keys. Without keys it does nothing.

    It stores the salt of the key for `combined_salt` in the scope. The time of a comparison depends neither on which
    key matches nor on how many characters do: the digests of all keys are compared.

    Args:
        app: the application.
        keys: from `with_keys`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._salts = [sha256(b"cache_salt" + digest).hexdigest()[:16] for digest in self._digests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it has a key."""
        if scope["type"] != "http" or not self._digests:
            return await self.app(scope, receive, send)
        key = _given_key(scope)
        digest = b"" if key is None else sha256(key).digest()
        matches = [hmac.compare_digest(known, digest) for known in self._digests]
        if any(matches):
            scope.setdefault("state", {})["cache_salt"] = self._salts[matches.index(True)]
        elif scope["method"] not in ("GET", "HEAD") or scope["path"] not in PUBLIC:
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            refusal = Refusal(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
            return await refusal.send(send, scope)
        await self.app(scope, receive, send)


def _given_key(scope: Scope) -> bytes | None:
    """Return the key of a request: that of Authorization; without this header that of x-api-key, as Anthropic has it.

    None if there is none, or a header is there twice.
    """
    headers = [
        [value for name, value in scope["headers"] if name == header] for header in (b"authorization", b"x-api-key")
    ]
    bearer, plain = headers
    if not bearer:
        return plain[0].strip() if len(plain) == 1 else None
    scheme, _, key = bearer[0].partition(b" ")
    return key.strip() if len(bearer) == 1 and scheme.lower() == b"bearer" else None


_WILDCARDS = ("0.0.0.0", "::", "")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
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
        self._shared = CORSMiddleware(
            app,
            allow_origin_regex=".*",  # of the requests that it gets
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
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
        await (self._shared if allowed else self.app)(scope, receive, send)

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
        normal = _normal(name) if address is None else str(IPv6Address(address))
    except ValueError:
        return None
    number = None if port is None else int(port)
    return None if (number or 0) > 65535 else (normal, number)


def _normal(name: str) -> str:
    """ "LOCALHOST" -> "localhost"; "FD00:0::1" -> "fd00::1"."""
    try:
        return str(ip_address(name))
    except ValueError:
        return name.lower()
