"""Serve several models, or several replicas of one, behind one port."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nanoinfer.cluster.config import ClusterConfig
from nanoinfer.cluster.front import Front
from nanoinfer.cluster.group import Group
from nanoinfer.cluster.local import LocalGroup, plan_cores
from nanoinfer.cluster.remote import Remotes
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, one_line, printable
from nanoinfer.server.access_log import AccessLog
from nanoinfer.server.app import guarded
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.descriptors import with_max_connections
from nanoinfer.server.limits import BoundRequests
from nanoinfer.server.run import listen, log_files

log = logging.getLogger("nanoinfer.server")


def check(configs: Sequence[LLMConfig], server: ServerConfig, cluster: ClusterConfig) -> None:
    """Check options before anything is loaded.

    Raises:
        NanoinferError: options exclude each other, or need more cores than this process has.
    """
    models = [config.model for config in configs]
    if again := next((m for i, m in enumerate(models) if m in models[:i]), None):
        raise NanoinferError(f"the model {printable(again)} is given twice: use --replicas for several of one model")
    if server.served_model_name and len(models) > 1:
        raise NanoinferError(f"served_model_name names one model, and {len(models)} are given: leave it out")
    if server.measure_roofline:
        raise NanoinferError("measure_roofline is not supported with replicas or several models: leave it out")
    if cluster.ray is None:
        plan_cores(cluster)


def serve(configs: Sequence[LLMConfig], server: ServerConfig, cluster: ClusterConfig, bound: socket.socket) -> None:
    """Serve models as `server.run.serve` serves one.

    Args:
        configs: of the models.
        server: of the server.
        cluster: how many replicas.
        bound: from `server.run.bind`; is closed at the end.

    Raises:
        NanoinferError: a model cannot be loaded.
    """
    # The log is opened last: `connected` has then redirected what Ray writes to standard error.
    with bound, _listener(cluster) as (listening, address), log_files(server) as access_log:
        of_replicas = replace(server, api_key=())  # the front checks the keys
        if cluster.ray is None:
            groups: list[Group] = [LocalGroup(i, c, of_replicas, cluster, str(address)) for i, c in enumerate(configs)]
        else:
            from nanoinfer.cluster.ray_serve import RayGroup, check_capacity

            check_capacity(len(configs) * cluster.replicas, cluster.cores_per_replica or 1)
            secret = secrets.token_hex(16)
            groups = [RayGroup(i, c, of_replicas, cluster, address, secret) for i, c in enumerate(configs)]
        asyncio.run(_serve(groups, server, bound, listening, access_log))


@contextmanager
def _listener(cluster: ClusterConfig) -> Iterator[tuple[socket.socket, Any]]:
    """Yield a socket on which the front listens for replicas, and its address.

    On one machine it is in a folder that only this user can open. On a cluster it has the address of the node, and the
    replicas authenticate themselves by a secret.
    """
    if cluster.ray is None:
        with tempfile.TemporaryDirectory(prefix="nanoinfer-") as folder, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path := os.path.join(folder, "front"))
            yield listening, path
        return
    from nanoinfer.ray.connect import connected

    with connected(cluster.ray), socket.socket() as listening:
        from nanoinfer.cluster.ray_serve import node_address

        listening.bind((node_address(), 0))
        yield listening, listening.getsockname()


async def _serve(
    groups: Sequence[Group],
    server: ServerConfig,
    bound: socket.socket,
    listening: socket.socket,
    access_log: AccessLog | None,
) -> None:
    config = with_max_connections(server)
    loop, remotes = asyncio.get_running_loop(), Remotes(groups)
    make = loop.create_unix_server if listening.family == socket.AF_UNIX else loop.create_server
    requested = asyncio.Event()
    reloading = asyncio.create_task(reload(groups, requested))
    listener = await make(remotes.connection, sock=listening)
    try:
        for group in groups:  # one after the other: loading takes all cores and much memory
            await group.start()
        _check_names(groups)
        loop.add_signal_handler(signal.SIGHUP, requested.set)
        front = Front(groups)
        app = guarded(BoundRequests(front, config), config, front.metrics.responded, access_log)
        names = ", ".join(printable(group.names[0]) for group in groups)
        counts = ", ".join(str(len(group.replicas)) for group in groups)
        about = f"model{'s' if len(groups) > 1 else ''}: {names}; replicas: {counts}"
        await listen(app, config, bound, about)
    finally:
        reloading.cancel()
        listener.close()
        await asyncio.gather(*(group.stop() for group in groups))


async def reload(groups: Sequence[Group], requested: asyncio.Event) -> None:
    """Load all models again whenever it is requested (SIGHUP); requests during a reload are one more reload."""
    while await requested.wait():
        requested.clear()
        for group in groups:
            try:
                await group.reload()
                log.warning("%s was loaded again", group.model)
            except Exception as e:
                log.error("%s: the replicas that run are kept", one_line(e), exc_info=not isinstance(e, NanoinferError))


def _check_names(groups: Sequence[Group]) -> None:
    seen: dict[str, Group] = {}
    for group in groups:
        for name in group.names:
            if (other := seen.setdefault(name, group)) is not group:
                raise NanoinferError(
                    f"the models {printable(other.model)} and {printable(group.model)} have the name {printable(name)}:"
                    " rename one"
                )
