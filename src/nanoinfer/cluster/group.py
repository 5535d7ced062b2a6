"""The replicas of one model, as the front sees them."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio

from nanoinfer.cluster.link import Answer, Remote, ReplicaLost
from nanoinfer.cluster.routing import choose
from nanoinfer.errors import printable
from nanoinfer.protocols.fields import FieldError

START_TIMEOUT_SEC = 600.0
"""Longest time that a request waits for a replica; the request's own time limit is usually shorter."""


class Group(ABC):
    """The replicas of one model.

    Args:
        model: its name, as the command has it.
        policy: which replica a request goes to, one of `routing.POLICIES`.
    """

    def __init__(self, model: str, policy: str) -> None:
        self.model, self.policy = model, policy
        self.names: tuple[str, ...] = (model,)
        """Names of the model in requests; the replicas know them."""
        self.described: list[dict[str, Any]] = []
        """The entries of the model in a list of models."""
        self.replicas: list[Remote] = []
        self.num_waiting = 0
        """Requests that wait for a replica."""
        self.used = time.monotonic()
        """Time of the last known request (`time.monotonic`)."""
        self._changed = asyncio.Event()

    @abstractmethod
    async def wake(self) -> None:
        """Start a model that was unloaded, unless it is being started. Raises FieldError, a 503, if that fails."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether requests can be answered, after the model is loaded if it was unloaded."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that wait or are answered."""
        return self.num_waiting + sum(r.num_in_flight for r in self.replicas)

    def join(self, remote: Remote) -> None:
        """Add a replica that has connected."""
        self.names = tuple(remote.who["names"])
        self.replicas.append(remote)
        self._changed.set()

    async def describe(self) -> None:
        """Read how the newest replica describes the model. If it ends meanwhile, the description stays as it was."""
        with suppress(ReplicaLost):
            self.described = json.loads(await self.replicas[-1].get("/v1/models"))["data"]

    def leave(self, remote: Remote) -> None:
        """Remove a replica whose connection has ended."""
        if remote in self.replicas:
            self.replicas.remove(remote)
            self._changed.set()

    async def ask(self, head: dict[str, Any], body: bytes, blocks: Sequence[int]) -> Answer:
        """Send a request to a replica, and return its response, which has not begun. Waits until there is a replica.

        Args:
            head: from `link.head_of`.
            body: of the request.
            blocks: of its prompt (`routing.prefix_blocks`).

        Raises:
            FieldError: no replica was ready in time; status 503.
        """
        self.used = time.monotonic()
        self.num_waiting += 1
        try:
            # Not asyncio.wait_for: it returns in a later turn, in which the replica may have left.
            with anyio.fail_after(START_TIMEOUT_SEC):
                await self._until_ready()
        except TimeoutError:
            raise unavailable(f"the model {printable(self.names[0])} has no replica: try again later") from None
        finally:
            self.num_waiting -= 1
        return choose(self.replicas, blocks, self.policy).ask(head, body)

    async def _until_ready(self) -> None:
        await self.wake()
        while not self.replicas:
            await self.change()
            await self.wake()  # the model may have been unloaded meanwhile

    async def change(self) -> None:
        """Wait until a replica has joined or left."""
        self._changed.clear()
        await self._changed.wait()


def unavailable(message: str) -> FieldError:
    """Return the error of a request that may succeed later."""
    return FieldError(message, None, 503, "service_unavailable")
