"""The replica's side of a link: answers the requests of a front with the server's routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from nanoinfer.cluster.link import (
    ABORT,
    BODY,
    CANCEL,
    COUNT,
    COUNTS,
    END,
    HELLO,
    REQUEST,
    START,
    TAKEN,
    WINDOW_BYTES,
    Address,
    Link,
    connect,
    split_head,
)
from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.server.app import build_routes
from nanoinfer.server.config import ServerConfig

_KEYS = (b"authorization", b"x-api-key", b"cookie")


class _Exchange:
    """A request that is answered."""

    def __init__(self) -> None:
        self.left = asyncio.Event()  # is set when the client has left, or the front has ended
        self.room = asyncio.Event()  # is set when the client has taken some of what was sent
        self.num_unread = 0
        """Bytes of the response that the client has not taken yet."""


class Replica:
    """Answers requests of one front.

    Args:
        app: the routes, which get the whole body of a request (`build_routes`).
        who: the content of HELLO.
    """

    def __init__(self, app: ASGIApp, who: Mapping[str, Any]) -> None:
        self._app, self._who = app, who
        self._exchanges: dict[int, _Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._link: Link | None = None
        self._ended = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether the front has the connection."""
        return self._link is not None and not self._ended.is_set()

    async def run(self, address: Address) -> None:
        """Connect to a front and answer until it ends the connection. Arguments and errors: see `connect`."""
        self._link = await connect(address, self._receive, self._lost)
        self._link.send(0, HELLO, json.dumps(self._who).encode())
        await self._ended.wait()
        for exchange in self._exchanges.values():
            exchange.left.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _lost(self, link: Link) -> None:
        self._ended.set()

    def _receive(self, link: Link, number: int, kind: int, payload: bytes) -> None:
        if kind == REQUEST:
            task = asyncio.create_task(self.answer(number, *split_head(payload)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (exchange := self._exchanges.get(number)) is None:
            return  # it has ended, which the front does not know yet
        elif kind == CANCEL:
            exchange.left.set()
        elif kind == TAKEN:
            exchange.num_unread -= COUNT.unpack(payload)[0]
            exchange.room.set()

    async def answer(self, number: int, head: dict[str, Any], body: bytes) -> None:
        """Answer a request over the link. Args: number: of the exchange; head: from `head_of`."""
        link, bodies, scope = self._link, [body], _scope(head)
        assert link is not None
        exchange = self._exchanges[number] = _Exchange()

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                return link.send(number, START, json.dumps([message["status"], headers]).encode())
            part = message.get("body", b"")
            if message.get("more_body", False):
                exchange.num_unread += len(part)
                link.send(number, BODY, part)
            else:
                counts = scope["state"].get("num_tokens", (0, 0))
                link.send(number, END, COUNTS.pack(*counts), part)
                del self._exchanges[number]
            while exchange.num_unread > WINDOW_BYTES and not exchange.left.is_set():
                exchange.room.clear()
                await exchange.room.wait()

        try:
            await self._app(scope, receive, send)
        finally:
            if self._exchanges.pop(number, None) is not None:
                link.send(number, ABORT)


def head_of(scope: Scope) -> dict[str, Any]:
    """Return what a replica receives of a request's scope: no API key, which the front has checked."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _KEYS]
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query_string": scope.get("query_string", b"").decode("latin-1"),
        "headers": [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
        "client": scope.get("client"),
        "state": {name: scope["state"][name] for name in ("request_id", "cache_salt") if name in scope["state"]},
    }


def _scope(head: dict[str, Any]) -> Scope:
    """Return the scope of a request from `head_of`."""
    return {
        **head,
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "server": None,
        "root_path": "",
        "raw_path": head["path"].encode(),
        "query_string": head["query_string"].encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]],
    }


def describe(llm: AsyncLLM, names: Sequence[str]) -> dict[str, Any]:
    """Return the description of a model for HELLO. Args: names: of the model in requests."""
    limits = llm.llm.core.engine.limits
    return {"names": names, "max_num_seqs": limits.max_num_seqs, "max_num_tokens": limits.max_num_cached_tokens}


async def run_replica(llm: AsyncLLM, config: ServerConfig, address: Address, who: Mapping[str, Any]) -> None:
    """Answer requests with a model until the front ends the connection. Raises as `connect`."""
    app, service = build_routes(llm, config)
    await Replica(app, {**who, **describe(llm, service.names)}).run(address)
