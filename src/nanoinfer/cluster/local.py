"""The replicas of a model, as the front sees them: processes that a host (host.py) forks, each on its own cores."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio

from nanoinfer.cluster.host import HostSpec
from nanoinfer.cluster.link import Remote, ReplicaLost
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, printable, reason
from nanoinfer.protocols.fields import FieldError
from nanoinfer.server.config import ClusterConfig, ServerConfig
from nanoinfer.utils.environment import num_cpus

log = logging.getLogger("nanoinfer.server")

HOST_COMMAND = (sys.executable, "-m", "nanoinfer.cluster.host")
_STOP_SEC = 10.0
_RESTART_SEC = 1.0
_POLL_SEC = 0.1
START_TIMEOUT_SEC = 600.0
"""Longest time that a request waits for a replica; the request's own time limit is usually shorter."""


class Host:
    """A process that loads a model and forks its replicas.

    Args:
        spec: what it runs.
        changed: called when a replica begins or ends, and when the process ends.
    """

    def __init__(self, spec: HostSpec, changed: Callable[[], None]) -> None:
        self._spec, self._changed = spec, changed
        self.running: dict[int, Remote] = {}
        """The replicas by their number."""
        self.names: tuple[str, ...] = ()
        """Names of the model in requests."""

    async def start(self) -> None:
        """Start the process; return when its replicas run. Raises NanoinferError if the model cannot be loaded."""
        model = printable(self._spec.config.model)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *HOST_COMMAND,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the front, which ends the host
            )  # fmt: skip
        except OSError as e:  # no descriptor, process or memory is to be had
            raise NanoinferError(f"{model}: no process can be started that loads it: {reason(e)}") from None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(pickle.dumps(self._spec))
            report = await self._report() or {"error": "the process that loads it has ended"}
            if "error" in report:
                raise NanoinferError(f"{model}: {report['error']}")
            self.names, self._limits = tuple(report["names"]), report["limits"]
            while len(self.running) < len(self._spec.cores):
                if not await self._update():
                    raise NanoinferError(f"{model}: its process has ended before its replicas were ready")
        except BaseException:
            await self.end()
            raise
        self.watching = asyncio.create_task(self._watch())

    async def end(self) -> None:
        """End the process and its replicas."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_SEC)
        except asyncio.TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def _watch(self) -> None:
        """Update the replicas until the process ends."""
        while await self._update():
            self._changed()
        self.running.clear()
        self._changed()

    async def _update(self) -> bool:
        """Wait until a replica begins or ends; return False at the end of the process."""
        if (report := await self._report()) is None:
            return False
        number, runs = report
        self.running.pop(number, None)
        if runs:
            self.running[number] = Remote(str(number), f"{self._spec.path}{number}", *self._limits)
        return True

    async def _report(self) -> Any:
        """Return the next line of the process; None at its end."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        return json.loads(line) if line else None


class Group:
    """The replicas of a model on this machine.

    Args:
        config: of the model.
        server: of the server.
        cluster: how many replicas, and when to unload.
        path: beginning of the paths of the replicas' sockets.
    """

    def __init__(self, config: LLMConfig, server: ServerConfig, cluster: ClusterConfig, path: str) -> None:
        cores = plan_cores(cluster)
        if cores[0] and config.engine.engine in ("auto", "native"):
            config = replace(config, engine=replace(config.engine, threads=config.engine.threads or len(cores[0])))
        self.model = config.model
        self.names: tuple[str, ...] = (config.model,)
        """Names of the model in requests."""
        self.described: list[dict[str, Any]] = []
        """The entries of the model in a list of models."""
        self._spec, self._path, self._num_loads = HostSpec(config, server, path, cores), path, 0
        self._idle_unload, self._used = cluster.idle_unload, time.monotonic()  # the time of the last known request
        self._num_waiting = 0  # requests that wait for a replica
        self._changed = asyncio.Event()
        self._host: Host | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[Remote]:
        """The replicas that run."""
        return [] if self._host is None else list(self._host.running.values())

    @property
    def is_running(self) -> bool:
        """Whether requests can be answered, after the model is loaded if it was unloaded."""
        return self._host is None or bool(self.replicas)

    async def ready(self) -> list[Remote]:
        """Return the replicas, one or more. Waits for one; loads a model that was unloaded.

        Raises:
            FieldError: the model cannot be loaded, or no replica was ready in time; status 503.
        """
        self._used = time.monotonic()
        self._num_waiting += 1
        try:
            # Not asyncio.wait_for: it returns in a later turn, in which the replica may have ended.
            with anyio.fail_after(START_TIMEOUT_SEC):
                while not self.replicas:
                    if self._host is None:
                        await self.start()
                    else:
                        self._changed.clear()
                        await self._changed.wait()
            return self.replicas
        except TimeoutError:
            raise unavailable(f"the model {printable(self.names[0])} has no replica: try again later") from None
        except NanoinferError as e:
            raise unavailable(str(e)) from None
        finally:
            self._num_waiting -= 1

    async def start(self) -> None:
        """Start the replicas, and return when all are ready. Raises NanoinferError if the model cannot be loaded."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._load())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # if all waiters left
        await asyncio.shield(self._starting)

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
            await self._load()
        except Exception:
            self._watching = asyncio.create_task(self._watch(host))
            raise
        while any(remote.num_in_flight for remote in host.running.values()):
            await asyncio.sleep(_POLL_SEC)
        await host.end()

    async def stop(self) -> None:
        """End the replicas."""
        for task in (self._starting, self._watching):
            if task is not None and task.cancel():
                with suppress(asyncio.CancelledError, NanoinferError):
                    await task
        await self._unload()

    async def _load(self) -> None:
        """Start a host, whose replicas get the requests from now on."""
        self._num_loads += 1
        host = Host(replace(self._spec, path=f"{self._path}-{self._num_loads}-"), self._changed.set)
        await host.start()
        with suppress(ReplicaLost):  # the description stays as it was
            self.described = json.loads(await host.running[0].get("/v1/models"))["data"]
        self._host, self.names, self._used = host, host.names, time.monotonic()
        self._changed.set()
        self._watching = asyncio.create_task(self._watch(host))

    async def _watch(self, host: Host) -> None:
        """Unload the model when it is idle, and load it again if the host ends."""
        interval = min(1.0, self._idle_unload / 4) if self._idle_unload else None
        while not (await asyncio.wait([host.watching], timeout=interval))[0]:
            if self._num_waiting or any(remote.num_in_flight for remote in self.replicas):
                self._used = time.monotonic()
            elif time.monotonic() - self._used >= self._idle_unload:
                log.info("%s is unloaded: no request for %g s", self.model, self._idle_unload)
                return await self._unload()
        log.error("the process that loaded %s has ended: it is loaded again", self.model)
        await self._unload()
        await asyncio.sleep(_RESTART_SEC)
        if self._host is None:  # else a request has loaded it
            try:
                await self.start()
            except NanoinferError as e:
                log.error("%s: the next request tries again", e)

    async def _unload(self) -> None:
        """End the host and the replicas."""
        host, self._host = self._host, None
        self._changed.set()  # a request that waits for a replica loads the model again
        if host is not None:
            await host.end()


def plan_cores(cluster: ClusterConfig) -> list[list[int]]:
    """Return the cores of each replica; an empty list: all.

    Raises:
        NanoinferError: the replicas need more cores than this process has.
    """
    if cluster.replicas == 1 and cluster.cores_per_replica is None:
        return [[]]
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(num_cpus()))
    available = available[: num_cpus()]  # a container's limit may be lower
    size = cluster.cores_per_replica or max(1, len(available) // cluster.replicas)
    num_cores = size * cluster.replicas
    if cluster.cores_per_replica is not None and num_cores > len(available):
        raise NanoinferError(
            f"replicas={cluster.replicas} times cores_per_replica={size} is {num_cores} cores and this process has"
            f" {len(available)}: lower one of them"
        )
    return [[available[(i * size + j) % len(available)] for j in range(size)] for i in range(cluster.replicas)]


def unavailable(message: str) -> FieldError:
    """Return the error of a request that may succeed later."""
    return FieldError(message, None, 503, "service_unavailable")
