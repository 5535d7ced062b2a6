"""A front with replicas in this process, for tests: each replica answers with an application of the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.cluster import link
from nanoinfer.cluster.front import Front
from nanoinfer.cluster.link import Remote
from nanoinfer.cluster.local import Group, Host
from nanoinfer.config import LLMConfig
from nanoinfer.server.config import ClusterConfig, ServerConfig
from nanoinfer.server.limits import BoundRequests


class StubGroup(Group):
    """A model whose replicas the test starts: its host has no process."""

    def __init__(self, model: str, path: str) -> None:
        super().__init__(LLMConfig(model=model), ServerConfig(), ClusterConfig(), path)
        self.path, self.changed = path, self._changed
        self._host = self.host = Host(self._spec, self._changed.set)

    def is_used(self) -> bool:
        """Return whether a request waits for a replica, or is answered."""
        return bool(self._num_waiting) or any(r.num_in_flight for r in self.replicas)


@dataclass
class Setup:
    """A front and its replicas."""

    groups: list[StubGroup]
    app: ASGIApp
    """The front within the limits of a request."""
    _running: dict[Remote, tuple[asyncio.Server, set[asyncio.Task[Any]]]] = field(default_factory=dict)

    async def add(self, group: int, number: int, app: ASGIApp) -> Remote:
        """Start a replica, and return it as the front sees it."""
        tasks: set[asyncio.Task[Any]] = set()
        limited = BoundRequests(app, ServerConfig())

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            if remote in self._running:  # else it is lost
                await limited(scope, receive, send)

        model = self.groups[group]
        path = f"{model.path}-{number}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        remote = model.host.running[number] = Remote(str(number), path, 8, 16000)
        self._running[remote] = await link.serve(recorded, listener), tasks
        model.changed.set()
        return remote

    def lose(self, number: int, group: int = 0) -> None:
        """End a replica, as its death does."""
        model = self.groups[group]
        server, tasks = self._running.pop(model.host.running.pop(number))
        server.close()
        for task in tasks:
            task.cancel()
        model.changed.set()


@asynccontextmanager
async def front(folder: Path, models: Sequence[str] = ("a",), **options: Any) -> AsyncIterator[Setup]:
    """Run a front of several models without replicas. `options` are those of ServerConfig."""
    groups = [StubGroup(model, str(folder / str(i))) for i, model in enumerate(models)]
    setup = Setup(groups, BoundRequests(Front(groups), ServerConfig(**options)))
    try:
        yield setup
    finally:
        for i, group in enumerate(groups):
            for number in list(group.host.running):
                setup.lose(number, i)
