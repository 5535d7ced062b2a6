"""Calls an ASGI application in the tests, as a server would, and records what it sends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from nanoinfer import LLM, AsyncLLM
from nanoinfer.protocols.fields import COMPLETIONS
from nanoinfer.server.access_log import AccessLog
from nanoinfer.server.app import build_app
from nanoinfer.server.config import ServerConfig

HOST = {"host": "localhost:8000"}


@dataclass
class Response:
    """What an application has sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False
    scope: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body."""
        return b"".join(self.parts)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape, all of whose fields are there."""
        assert self.headers["content-type"] == "application/json"
        assert int(self.headers["content-length"]) == len(self.content)
        found: dict[str, Any] = json.loads(self.content)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert "\n" not in found["message"]
        return found


def serve(
    llm: LLM,
    main: Callable[[ASGIApp, AsyncLLM], Coroutine[Any, Any, Any]],
    log: AccessLog | None = None,
    **options: Any,
) -> Any:
    """Run a program with the server's application and its model. `options` are those of ServerConfig."""

    async def run() -> Any:
        async with AsyncLLM.from_llm(llm) as model:
            return await asyncio.wait_for(main(build_app(model, ServerConfig(**options), log), model), 60)

    return asyncio.run(run())


async def call(
    app: ASGIApp,
    method: str = "GET",
    path: str = "/health",
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = HOST,
    body: bytes | Iterable[bytes | float] = b"",
    disconnect: asyncio.Event | None = None,
) -> Response:
    """Send one request. `body` is bytes, or chunks between which there are pauses in seconds; without a last empty
    chunk the rest never comes. A mapping of headers adds Host. `disconnect` is set when the client leaves."""
    chunks = iter([body, b""] if isinstance(body, bytes) else body)
    found, gone = Response(), disconnect or asyncio.Event()
    pairs = list({**HOST, **headers}.items()) if isinstance(headers, Mapping) else list(headers)
    found.scope = {
        "type": "http", "method": method, "path": path, "query_string": b"", "client": ("127.0.0.1", 1), "state": {},
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs],
    }  # fmt: skip

    async def receive() -> Message:
        for chunk in chunks:
            if isinstance(chunk, bytes):
                return {"type": "http.request", "body": chunk, "more_body": chunk != b""}
            await asyncio.sleep(chunk)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not found.status
            found.status = message["status"]
            found.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            assert found.status
            found.parts.append(message["body"])
            found.complete = not message.get("more_body", False)

    await app(found.scope, receive, send)
    return found


async def post(app: ASGIApp, body: dict[str, Any], path: str = COMPLETIONS, **options: Any) -> Response:
    return await call(app, "POST", path, body=json.dumps(body).encode(), **options)


async def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)
