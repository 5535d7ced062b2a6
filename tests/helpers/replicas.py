"""A front with replicas in this process, for tests: each replica answers with an application of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from helpers.asgi import until
from nanoinfer.cluster.front import Front
from nanoinfer.cluster.link import Remote, Remotes, Replica
from nanoinfer.cluster.local import Group
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.limits import BoundRequests


class StubGroup(Group):
    """A model whose replicas the test starts."""

    num_woken = 0

    async def wake(self) -> None:
        """Count."""
        self.num_woken += 1


@dataclass
class Setup:
    """A front and its replicas."""

    groups: list[StubGroup]
    front: Front
    app: ASGIApp
    """The front within the limits of a request."""
    path: str
    _tasks: dict[tuple[int, int], asyncio.Task[None]] = field(default_factory=dict)

    async def add(self, group: int, replica: int, app: ASGIApp, **who: Any) -> Remote:
        """Connect a replica, and return it as the front sees it."""
        name = self.groups[group].model
        about = {
            "names": (name,),
            "max_num_seqs": 8,
            "max_num_tokens": 16000,
            "model": group,
            "replica": replica,
            **who,
        }
        runs = Replica(BoundRequests(app, ServerConfig()), about).run(self.path)
        self._tasks[group, replica] = asyncio.create_task(runs)
        count = len(self.groups[group].replicas)
        await until(lambda: len(self.groups[group].replicas) > count)
        return self.groups[group].replicas[-1]

    async def end(self) -> None:
        """Wait for the replicas, whose connections have been closed."""
        await asyncio.wait_for(asyncio.gather(*self._tasks.values()), 20)


@asynccontextmanager
async def front(folder: Path, models: Sequence[str] = ("a",), **options: Any) -> AsyncIterator[Setup]:
    """Run a front of several models without replicas. `options` are those of ServerConfig."""
    groups = [StubGroup(model, "prefix") for model in models]
    remotes = Remotes(groups)
    path = str(folder / "front")
    listener = await asyncio.start_unix_server(remotes.connection, path)
    made = Front(groups)
    setup = Setup(groups, made, BoundRequests(made, ServerConfig(**options)), path)
    try:
        yield setup
    finally:
        for group in groups:
            for remote in group.replicas:
                remote.link.close()
        listener.close()
        await setup.end()
