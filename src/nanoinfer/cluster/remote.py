"""The front's side of links: the replicas that have connected, and the responses that they send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

from nanoinfer.cluster.link import (
    ABORT,
    CANCEL,
    COUNT,
    COUNTS,
    END,
    HELLO,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    REQUEST,
    START,
    TAKEN,
    WINDOW_BYTES,
    Link,
    with_head,
)
from nanoinfer.cluster.routing import TOKENS_PER_BLOCK, PrefixTable


class ReplicaLost(Exception):
    """The replica has ended, or the response to a request has ended in the middle."""


class Answers(dict[int, "Answer"]):
    """The responses that are received now, by the number of their exchange."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def number(self) -> int:
        """Return the number of a new exchange: 1 to 2**32 - 1, and from the beginning again."""
        self._last = self._last % 0xFFFFFFFF + 1
        return self._last


class Answer:
    """The response to one request.

    Args:
        answers: all that are received at the time; this one is among them until `close`.
        remote: the replica; None: it is known when the response begins.
    """

    def __init__(self, answers: Answers, remote: Remote | None = None) -> None:
        self._answers, self.remote = answers, remote
        self.number = answers.number()
        """Of the exchange."""
        answers[self.number] = self
        self._waiter: asyncio.Future[None] | None = None
        self._taken = 0
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.parts = bytearray()
        """Bytes of the body that were received and not taken."""
        self.num_tokens: tuple[int, int] | None = None
        """Tokens of the prompts and of the outputs; None: the response has not ended."""
        self.lost = False

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return "?" if self.remote is None else self.remote.name

    def receive(self, kind: int, payload: bytes) -> None:
        """Receive a frame."""
        if kind == START:
            self.status, headers = json.loads(payload)
            self.headers = [(name, value) for name, value in headers]
        elif kind == END:
            self.num_tokens = COUNTS.unpack_from(payload)
            self.parts += payload[COUNTS.size :]
        elif kind == ABORT:
            self.lost = True
        else:
            self.parts += payload
        self._wake()

    def lose(self) -> None:
        """Let `wait` raise ReplicaLost, unless the response has ended."""
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the status, a part of the body or the end is there.

        Raises:
            ReplicaLost: the rest will not come.
        """
        while not (self.parts or self.num_tokens is not None):
            if self.lost:
                raise ReplicaLost
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> bytes:
        """Return the part of the body that was received since the last call."""
        part = bytes(self.parts)
        self.parts.clear()
        self._taken += len(part)
        if self._taken >= WINDOW_BYTES // 4 and self.remote is not None:
            self.remote.link.send(self.number, TAKEN, COUNT.pack(self._taken))
            self._taken = 0
        return part

    def close(self) -> None:
        """End the exchange: nothing more is received. Without the whole response, the request is cancelled."""
        del self._answers[self.number]
        if self.num_tokens is None and not self.lost and self.remote is not None:
            self.remote.link.send(self.number, CANCEL)


class Remote:
    """A replica that has connected.

    Args:
        link: to it.
        who: the content of its HELLO.
    """

    def __init__(self, link: Link, who: dict[str, Any]) -> None:
        self.link, self.who = link, who
        self.max_num_seqs: int = who["max_num_seqs"]
        self.prefixes = PrefixTable(who["max_num_tokens"] // TOKENS_PER_BLOCK)
        self.answers = Answers()
        """Those that are received now; a group may have one for all of its replicas."""

    @property
    def name(self) -> str:
        """Name of the replica among those of its model."""
        return str(self.who["replica"])

    @property
    def num_in_flight(self) -> int:
        """Number of requests that it answers."""
        return len(self.answers)

    def ask(self, head: dict[str, Any], body: bytes) -> Answer:
        """Send a request. Args: head: from `replica.head_of`."""
        answer = Answer(self.answers, self)
        self.link.send(answer.number, REQUEST, *with_head(head, body))
        return answer

    async def get(self, path: str) -> bytes:
        """Return the body of the response to a GET of the front's own. Raises ReplicaLost; also if it is an error."""
        head: dict[str, Any] = {
            "method": "GET", "path": path, "query_string": "", "headers": [], "client": None, "state": {},
        }  # fmt: skip
        answer, body = self.ask(head, b""), bytearray()
        try:
            while answer.num_tokens is None:
                await answer.wait()
                body += answer.take()
        finally:
            answer.close()
        if answer.status != 200:
            raise ReplicaLost
        return bytes(body)

    def receive(self, number: int, kind: int, payload: bytes) -> None:
        """Pass a frame on to its exchange."""
        if (answer := self.answers.get(number)) is not None:  # else it was cancelled
            answer.remote = self
            answer.receive(kind, payload)

    def lose(self) -> None:
        """End the exchanges: the connection has ended."""
        for answer in self.answers.values():
            if answer.remote is self:
                answer.lose()


class Joined(Protocol):
    """The replicas of one model: what `Remotes` calls of a `Group`."""

    def join(self, remote: Remote) -> None:
        """Add a replica that has connected. Raises ValueError to refuse it."""

    def leave(self, remote: Remote) -> None:
        """Remove a replica whose connection has ended."""

    def fail(self, who: dict[str, Any]) -> None:
        """Record that a replica could not start. Raises ValueError to refuse the report."""


class Remotes:
    """Accepts connections of replicas.

    Args:
        groups: the models. A replica says to which it belongs.
    """

    def __init__(self, groups: Sequence[Joined]) -> None:
        self._groups = groups
        self._remotes: dict[Link, Remote] = {}

    def connection(self) -> Link:
        """Return the protocol of a new connection."""
        return Link(self._receive, self._lost, MAX_HELLO_BYTES)

    def _receive(self, link: Link, number: int, kind: int, payload: bytes) -> None:
        if (remote := self._remotes.get(link)) is not None:
            return remote.receive(number, kind, payload)
        try:
            if kind != HELLO:
                raise ValueError
            who: dict[str, Any] = json.loads(payload)
            group = self._groups[who["model"]]
            if "error" in who:
                group.fail(who)
                return
            remote = Remote(link, who)
            group.join(remote)
            self._remotes[link], link.max_bytes = remote, MAX_FRAME_BYTES
        except (ValueError, LookupError, TypeError, RecursionError):  # it is no replica
            link.close()

    def _lost(self, link: Link) -> None:
        if (remote := self._remotes.pop(link, None)) is not None:
            remote.lose()
            self._groups[remote.who["model"]].leave(remote)
