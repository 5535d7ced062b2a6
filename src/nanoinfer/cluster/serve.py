"""Serve several models, or several replicas of one, behind one port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from nanoinfer.cluster.config import ClusterConfig
from nanoinfer.cluster.front import Front
from nanoinfer.cluster.local import Group, plan_cores
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, one_line, printable
from nanoinfer.server.access_log import AccessLog, configure_logging
from nanoinfer.server.app import guarded
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.connections import with_max_connections
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
    if server.lora_modules and len(models) > 1:
        raise NanoinferError(f"lora_modules names adapters of one model, and {len(models)} are given: leave it out")
    if cluster.ray is None:
        plan_cores(cluster)
    elif server.access_log is not None:
        raise NanoinferError("access_log is not supported with ray: leave it out; Ray Serve has logs of its own")


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
    if cluster.ray is not None:
        from nanoinfer.ray.connect import connected

        with connected(cluster.ray):
            from nanoinfer.cluster import ray_serve  # `connected` sets the environment that Ray reads when imported

            configure_logging(server.log_level)  # now: `connected` redirects what Ray writes to standard error
            return ray_serve.run(configs, server, cluster, bound)
    # A folder that only this user can open has the sockets on which the replicas listen.
    with bound, tempfile.TemporaryDirectory(prefix="nanoinfer-") as folder, log_files(server) as access_log:
        of_replicas = replace(server, api_key=())  # the front checks the keys
        groups = [Group(c, of_replicas, cluster, os.path.join(folder, str(i))) for i, c in enumerate(configs)]
        asyncio.run(_serve(groups, server, bound, access_log))


async def _serve(
    groups: Sequence[Group], server: ServerConfig, bound: socket.socket, access_log: AccessLog | None
) -> None:
    config, requested = with_max_connections(server), asyncio.Event()
    reloading = asyncio.create_task(reload(groups, requested))
    try:
        for group in groups:  # one after the other: loading takes all cores and much memory
            await group.start()
        _check_names(groups)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
        front = Front(groups)
        app = guarded(BoundRequests(front, config), config, front.metrics.responded, access_log)
        names = ", ".join(printable(group.names[0]) for group in groups)
        counts = ", ".join(str(len(group.replicas)) for group in groups)
        about = f"model{'s' if len(groups) > 1 else ''}: {names}; replicas: {counts}"
        await listen(app, config, bound, about)
    finally:
        reloading.cancel()
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
