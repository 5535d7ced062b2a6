"""API keys: middleware that requires one, and the salt that keeps the prefix caches of different keys apart."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.errors import NanoinferError
from nanoinfer.server import page_routes
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.errors import Refusal
from nanoinfer.utils import environment
from nanoinfer.utils.files import escaped, read_limited

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
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise NanoinferError(f"{escaped(file)} has no API key: write one in each line")
        keys += found
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
        found = self._find(b"" if key is None else sha256(key).digest())
        if found is not None:
            scope.setdefault("state", {})["cache_salt"] = self._salts[found]
        elif scope["method"] not in ("GET", "HEAD") or scope["path"] not in PUBLIC:
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            refusal = Refusal(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
            return await refusal.send(send, scope)
        await self.app(scope, receive, send)

    def _find(self, digest: bytes) -> int | None:
        """Return the number of a key. Compares with all of them, each in constant time."""
        found = None
        for i, known in enumerate(self._digests):
            if hmac.compare_digest(known, digest):
                found = i
        return found


def _given_key(scope: Scope) -> bytes | None:
    """Return the key of a request: that of Authorization; without this header that of x-api-key, as Anthropic has it.

    None if there is none, or a header is there twice.
    """
    given = [
        [value for name, value in scope["headers"] if name == header] for header in (b"authorization", b"x-api-key")
    ]
    bearer, plain = given
    if not bearer:
        return plain[0].strip() if len(plain) == 1 else None
    scheme, _, key = bearer[0].partition(b" ")
    return key.strip() if len(bearer) == 1 and scheme.lower() == b"bearer" else None
