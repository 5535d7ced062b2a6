"""The connection between the front and a replica: a UNIX socket on which the replica listens, and one request on each.

    front -> replica   lengths of the head and of the body; the head, an ASGI scope as JSON; the body
    replica -> front   length of the head; the head, [status, headers] as JSON; parts of the body
    a part             its length, and whether more follow; its bytes; after the last one, counts of tokens

The front's end of a connection is the end of the request: the client has left. Where the replica's end comes before the
last part, the replica has ended. A response that a client reads slowly waits in the replica: the socket is full.

A request goes to the replica that holds the longest prefix of its prompt, unless that one is overloaded (`choose`). The
front has no tokenizer and does not know the content of a replica's cache, so it estimates it: the text of a request
is divided into blocks, and the hash of a block covers those before it. A table for each replica has the blocks of its
requests, as many as its cache has room for; the least recently used are dropped first. This is the idea of SGLang's
cache-aware router and of Ray Serve's PrefixCacheAffinityRouter, with hashes in the place of a tree.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_LENGTHS, _HEAD, _PART = struct.Struct("<II"), struct.Struct("<I"), struct.Struct("<I?")
_COUNTS = struct.Struct("<II")  # tokens of the prompts and of the outputs
BACKLOG = 4096
"""Connections that may wait in a socket: a connection beyond them would be one to a lost replica."""
_KEYS = (b"authorization", b"x-api-key", b"cookie")


class ReplicaLost(Exception):
    """The replica has ended before the whole response was received."""


class Answer:
    """The response to one request. Its methods raise ReplicaLost."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.num_tokens = (0, 0)
        """Tokens of the prompts and of the outputs, after the last part."""

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return status and headers."""
        status, headers = json.loads(await self._read(*await self._unpack(_HEAD)))
        return status, _encoded(headers)

    async def part(self) -> tuple[bytes, bool]:
        """Return the next part of the body, and whether more follow."""
        size, more = await self._unpack(_PART)
        content = await self._read(size)
        if not more:
            prompts, outputs = await self._unpack(_COUNTS)
            self.num_tokens = prompts, outputs
        return content, more

    async def _unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(await self._read(form.size))

    async def _read(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            raise ReplicaLost from None


class Remote:
    """A replica, as the front sees it.

    Args:
        name: of the replica among those of its model.
        path: of the socket on which it listens.
        max_num_seqs, max_num_tokens: limits of its engine: sequences that run, and tokens in its KV cache.
    """

    def __init__(self, name: str, path: str, max_num_seqs: int, max_num_tokens: int) -> None:
        self.name, self._path, self.max_num_seqs = name, path, max_num_seqs
        self.prefixes = PrefixTable(max_num_tokens // TOKENS_PER_BLOCK)
        self.num_in_flight = 0
        """Number of requests that it answers."""

    @asynccontextmanager
    async def request(self, head: Mapping[str, Any], body: bytes) -> AsyncIterator[Answer]:
        """Send a request, which ends with the context. Args: head: from `head_of`. Raises ReplicaLost."""
        self.num_in_flight += 1
        try:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                raise ReplicaLost from None
            try:
                encoded = json.dumps(head).encode()
                writer.write(_LENGTHS.pack(len(encoded), len(body)) + encoded + body)
                yield Answer(reader)
            finally:
                writer.close()
        finally:
            self.num_in_flight -= 1

    async def get(self, path: str) -> bytes:
        """Return the body of the response to a GET of the front's own. Raises ReplicaLost; also if it is an error."""
        content, more = b"", True
        async with self.request(head_of({"method": "GET", "path": path, "headers": [], "state": {}}), b"") as answer:
            if (await answer.head())[0] != 200:
                raise ReplicaLost
            while more:
                part, more = await answer.part()
                content += part
        return content


async def serve(app: ASGIApp, listener: socket.socket) -> asyncio.Server:
    """Answer the requests of a front in this event loop.

    Args:
        app: the routes, which get the whole body of a request (`build_routes`).
        listener: a UNIX socket that listens.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, OSError):  # the front has ended the connection
                await _answer(app, reader, writer)
        finally:
            writer.close()

    return await asyncio.start_unix_server(answer, sock=listener, backlog=BACKLOG)


async def _answer(app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    scope = _scope(json.loads(await reader.readexactly(head)))
    bodies = [await reader.readexactly(body)]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await reader.read(1)  # returns at the end of the connection: nothing follows the body
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            encoded = json.dumps([message["status"], _decoded(message["headers"])]).encode()
            return writer.write(_HEAD.pack(len(encoded)) + encoded)
        part, more = message.get("body", b""), message.get("more_body", False)
        end = b"" if more else _COUNTS.pack(*scope["state"].get("num_tokens", (0, 0)))
        writer.write(_PART.pack(len(part), more) + part + end)
        with suppress(OSError):  # the front has ended the connection, which `receive` returns, too
            await writer.drain()

    await app(scope, receive, send)


def head_of(scope: Scope) -> dict[str, Any]:
    """Return what a replica receives of a request's scope: no API key, which the front has checked."""
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query_string": scope.get("query_string", b"").decode("latin-1"),
        "headers": _decoded([(name, value) for name, value in scope["headers"] if name not in _KEYS]),
        "client": scope.get("client"),
        "state": {name: scope["state"][name] for name in ("request_id", "cache_salt") if name in scope["state"]},
    }


def _decoded(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _encoded(headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _scope(head: dict[str, Any]) -> Scope:
    """Return the scope of a request from `head_of`."""
    return {
        **head, "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "scheme": "http", "server": None, "root_path": "", "raw_path": head["path"].encode(),
        "query_string": head["query_string"].encode("latin-1"), "headers": _encoded(head["headers"]),
    }  # fmt: skip


BLOCK_CHARS = 64  # about as many as 16 tokens have, a block of the KV cache
MAX_BLOCKS = 512  # of a prompt: 32,768 characters tell the prompts of a server apart
TOKENS_PER_BLOCK = 16
_BEFORE = ("cache_salt", "tools", "instructions", "system")
_PROMPTS = ("messages", "prompt", "input", "query")


class PrefixTable:
    """The blocks of the prompts that went to a replica.

    Args:
        max_blocks: that it remembers.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_matched(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are there."""
        for i, block in enumerate(blocks):
            if block not in self._blocks:
                return i
        return len(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt that goes to the replica."""
        for block in reversed(blocks):  # the last is dropped first: without those before it, a block is not found
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def prefix_blocks(document: Mapping[str, Any], salt: str | None) -> list[int]:
    """Return the hashes of the blocks of a request's prompt; each covers those before it.

    Args:
        document: the body of the request. What is not a prompt of a known form has no blocks.
        salt: of the request's API key: prompts of different keys share nothing.
    """
    prompt = next((document[name] for name in _PROMPTS if name in document), None)
    if prompt is None:
        return []
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False)
    before = [document.get(name) for name in _BEFORE]
    blocks, last = [], hash((salt, json.dumps(before) if any(before) else "", repr(document.get("model"))))
    for at in range(0, min(len(prompt), MAX_BLOCKS * BLOCK_CHARS), BLOCK_CHARS):
        last = hash((last, prompt[at : at + BLOCK_CHARS]))
        blocks.append(last)
    return blocks


def choose(replicas: Sequence[Remote], blocks: Sequence[int]) -> Remote:
    """Return the replica for a request, and remember the request's blocks for it.

    It is the replica with the longest match, unless that one answers more requests than the least loaded one by a
    quarter of the sequences that it can run; then, and without a match, it is the least loaded one.

    Args:
        replicas: one or more.
        blocks: from `prefix_blocks`.
    """
    chosen = min(replicas, key=lambda r: (r.num_in_flight, len(r.prefixes)))
    best = max(replicas, key=lambda r: (r.prefixes.num_matched(blocks), -r.num_in_flight))
    is_overloaded = best.num_in_flight > chosen.num_in_flight + max(1, best.max_num_seqs // 4)
    if best.prefixes.num_matched(blocks) and not is_overloaded:
        chosen = best
    chosen.prefixes.add(blocks)
    return chosen
