"""The replicas of a model: as the front sees them, and as processes that a host (host.py) forks, on their own cores."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from nanoinfer.cluster.config import ClusterConfig
from nanoinfer.cluster.host import HostSpec
from nanoinfer.cluster.link import Answer, Remote, ReplicaLost
from nanoinfer.cluster.routing import choose
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, printable
from nanoinfer.protocols.fields import FieldError
from nanoinfer.server.config import ServerConfig
from nanoinfer.utils.environment import num_cpus
from nanoinfer.utils.files import reason

log = logging.getLogger("nanoinfer.server")

HOST_COMMAND = (sys.executable, "-m", "nanoinfer.cluster.host")
NODES = Path("/sys/devices/system/node")
_STOP_SEC = 10.0
_RESTART_SEC = 1.0
_POLL_SEC = 0.1
_LOADS = 3
"""Attempts to load a model again if its host is killed meanwhile: one that never fits must not be loaded for ever."""
START_TIMEOUT_SEC = 600.0
"""Longest time that a request waits for a replica; the request's own time limit is usually shorter."""


class Group:
    """The replicas of one model, as the front sees them.

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

    async def wake(self) -> None:
        """Start a model that was unloaded, unless it is being started. Raises FieldError, a 503, if that fails."""

    @property
    def is_running(self) -> bool:
        """Whether requests can be answered, after the model is loaded if it was unloaded."""
        return bool(self.replicas)

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


class _HostEnded(NanoinferError):
    """A host has ended before its replicas were ready: it was killed, and loading may succeed later."""


class _Host:
    """A process that loads a model and forks its replicas."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, spec: HostSpec) -> _Host:
        """Start it, and return when the model is loaded. Raises NanoinferError if it cannot be loaded."""
        model = printable(spec.config.model)
        try:
            process = await asyncio.create_subprocess_exec(
                *HOST_COMMAND,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the front, which ends the host
            )  # fmt: skip
        except OSError as e:  # no descriptor, process or memory is to be had
            raise NanoinferError(f"{model}: no process can be started that loads it: {reason(e)}") from None
        host = cls(process)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pickle.dumps(spec))
            line = await process.stdout.readline()
            if not line:
                raise _HostEnded(f"{model}: the process that loads it has ended")
            if "error" in (report := json.loads(line)):
                raise NanoinferError(f"{model}: {report['error']}")
        except BaseException:
            await host.end()
            raise
        return host

    async def end(self, replicas: Sequence[Remote] = ()) -> None:
        """End it and its replicas."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # first: it would start replicas again
        for remote in replicas:
            remote.link.close()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_SEC)
        except asyncio.TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()


class LocalGroup(Group):
    """The replicas of a model on this machine.

    Args:
        number: of the model among those of the front.
        config: of the model.
        server: of the server.
        cluster: how many replicas, and when to unload.
        address: path of the front's socket.
    """

    def __init__(
        self, number: int, config: LLMConfig, server: ServerConfig, cluster: ClusterConfig, address: str
    ) -> None:
        super().__init__(config.model, cluster.routing)
        cores = plan_cores(cluster)
        if cores[0] and config.engine.engine in ("auto", "native"):
            config = replace(config, engine=replace(config.engine, threads=config.engine.threads or len(cores[0])))
        self._spec = HostSpec(config, server, address, number, 0, cores)
        self._idle_unload = cluster.idle_unload
        self._oldest = 0  # generation of replicas that may join
        self._host: _Host | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """See `Group`."""
        return self._host is None or bool(self.replicas)

    def _is_new(self, remote: Remote) -> bool:
        return bool(remote.who["generation"] >= self._oldest)

    def join(self, remote: Remote) -> None:
        """Add a replica that has connected. Raises ValueError if its host was replaced: it may have other weights."""
        if not self._is_new(remote):
            raise ValueError
        super().join(remote)

    async def start(self) -> None:
        """Start the replicas, and return when all are ready. Raises NanoinferError if the model cannot be loaded."""
        if self._host is not None:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._load())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # if all waiters left
        await asyncio.shield(self._starting)

    async def wake(self) -> None:
        """See `Group`."""
        try:
            await self.start()
        except NanoinferError as e:
            raise unavailable(str(e)) from None

    async def reload(self) -> None:
        """Load the model again. When all new replicas are ready, the old ones finish their requests and end.

        Raises:
            NanoinferError: it cannot be loaded. The old replicas are kept.
        """
        if (host := self._host) is None:
            return  # unloaded: the next request loads what is there then
        assert self._watching is not None
        self._watching.cancel()  # it would unload an idle model, or load it a second time, while it is loaded here
        try:
            await self._start()
        except Exception:
            self._watching = asyncio.create_task(self._watch(host))
            raise
        old = [remote for remote in self.replicas if not self._is_new(remote)]
        self.replicas = [remote for remote in self.replicas if self._is_new(remote)]
        while any(remote.num_in_flight for remote in old):
            await asyncio.sleep(_POLL_SEC)
        await host.end(old)

    async def stop(self) -> None:
        """End the replicas."""
        for task in (self._starting, self._watching):
            if task is not None and task.cancel():
                with suppress(asyncio.CancelledError, NanoinferError):
                    await task
        await self._unload()

    async def _load(self) -> None:
        """Start the replicas; again if their host is killed meanwhile, unless it is the first one of the server."""
        is_first = self._spec.generation == 0
        for remaining in reversed(range(_LOADS)):
            try:
                return await self._start()
            except _HostEnded as e:
                if is_first or not remaining:
                    raise
                log.error("%s: it is loaded again", e)
                await asyncio.sleep(_RESTART_SEC)

    async def _start(self) -> None:
        spec = self._spec = replace(self._spec, generation=self._spec.generation + 1)
        host = await _Host.start(spec)
        try:
            while len(self._of(spec)) < len(spec.cores):
                if host.process.returncode is not None:
                    raise _HostEnded(
                        f"{printable(self.model)}: its process has ended (code {host.process.returncode}) before its"
                        " replicas were ready"
                    )
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.change(), _POLL_SEC)
            await self.describe()
        except BaseException:
            await host.end(self._of(spec))
            raise
        self._host, self._oldest, self.used = host, spec.generation, time.monotonic()
        self._watching = asyncio.create_task(self._watch(host))

    def _of(self, spec: HostSpec) -> list[Remote]:
        return [remote for remote in self.replicas if remote.who["generation"] == spec.generation]

    async def _watch(self, host: _Host) -> None:
        """Unload the model when it is idle, and start it again if the host ends."""
        interval = min(1.0, self._idle_unload / 4) if self._idle_unload else None
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(host.process.wait(), interval)
                break
            if self.num_in_flight:
                self.used = time.monotonic()
            elif time.monotonic() - self.used >= self._idle_unload:
                log.info("%s is unloaded: no request for %g s", self.model, self._idle_unload)
                return await self._unload()
        log.error(
            "the process that loaded %s has ended (code %s): it is loaded again", self.model, host.process.returncode
        )
        await self._unload()
        await asyncio.sleep(_RESTART_SEC)
        try:
            await self.start()
        except NanoinferError as e:
            log.error("%s: the next request tries again", e)

    async def _unload(self) -> None:
        """End the connections, the replicas and the host."""
        host, self._host, self._oldest = self._host, None, self._spec.generation + 1
        replicas, self.replicas = self.replicas, []
        self._changed.set()  # a request that waits for a replica starts the model again
        if host is not None:
            await host.end(replicas)


def plan_cores(cluster: ClusterConfig) -> list[list[int]]:
    """Return the cores of each replica; an empty list: all.

    Raises:
        NanoinferError: the replicas need more cores than this process has.
    """
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(num_cpus()))
    available = available[: num_cpus()]  # a container's limit may be lower
    if cluster.replicas == 0:
        nodes = [[c for c in _cores(p / "cpulist") if c in available] for p in sorted(NODES.glob("node[0-9]*"))]
        return [node for node in nodes if node] or [available]
    if cluster.replicas == 1 and cluster.cores_per_replica is None:
        return [[]]
    size = cluster.cores_per_replica or max(1, len(available) // cluster.replicas)
    wanted = size * cluster.replicas
    if cluster.cores_per_replica is not None and wanted > len(available):
        raise NanoinferError(
            f"replicas={cluster.replicas} times cores_per_replica={size} is {wanted} cores and this process has"
            f" {len(available)}: lower one of them"
        )
    return [[available[(i * size + j) % len(available)] for j in range(size)] for i in range(cluster.replicas)]


def _cores(file: Path) -> list[int]:
    """Return the cores of a list: 0-2,7 -> [0, 1, 2, 7]."""
    found: list[int] = []
    for part in file.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1) if first else []
    return found


def unavailable(message: str) -> FieldError:
    """Return the error of a request that may succeed later."""
    return FieldError(message, None, 503, "service_unavailable")
