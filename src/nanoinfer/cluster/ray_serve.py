"""Models on a Ray cluster: applications of Ray Serve, whose replicas run the ASGI application of `nanoinfer serve`.

Serve listens, places the replicas on nodes, chooses the replica of a request, replaces those that end, and adds and
removes some by the number of requests. This process deploys the applications and deletes them at the end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.errors import NanoinferError, one_line, printable
from nanoinfer.ray.connect import capacity, check_versions, node_name, versions
from nanoinfer.server.app import build_app
from nanoinfer.server.config import ClusterConfig, ServerConfig
from nanoinfer.server.run import url
from nanoinfer.server.service import names_of

log = logging.getLogger("nanoinfer.server")

_LOGGING = {"log_level": "ERROR", "enable_access_log": False}


class Model:
    """A deployment: a model, and the server's application for it.

    Args:
        config: of the model.
        server: of the server.
        stream_interval_ms: see `ClusterConfig`.
        expected: the versions of the process that deploys it (`connect.versions`).
    """

    def __init__(
        self, config: LLMConfig, server: ServerConfig, stream_interval_ms: int, expected: dict[str, str]
    ) -> None:
        try:
            check_versions(expected)
            self._llm = AsyncLLM.from_config(config)
        except Exception as e:
            raise NanoinferError(f"node {node_name()}: {one_line(e)}") from None
        self._server, self._interval_sec = server, stream_interval_ms / 1000

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application. Called by Serve."""
        app = build_app(self._llm, self._server)

        async def without_prefix(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                scope = {**scope, "path": scope["path"].removeprefix(scope.get("root_path", "")), "root_path": ""}
            if not self._interval_sec:
                await app(scope, receive, send)
                return
            collected = _Collected(send, self._interval_sec)
            try:
                await app(scope, receive, collected)
            finally:
                collected.close()

        return without_prefix

    def check_health(self) -> None:
        """Raise if the engine has ended: Serve then replaces this replica."""
        if not self._llm.is_running:
            raise RuntimeError("the engine has ended")


class _Collected:
    """Sends the parts of a body that follow each other within an interval as one message: each is a call of Ray."""

    def __init__(self, send: Send, interval_sec: float) -> None:
        self._send, self._interval_sec = send, interval_sec
        self._parts: list[bytes] = []
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        """Take a message of the application."""
        if message["type"] == "http.response.body" and message.get("more_body"):
            self._parts.append(message.get("body", b""))
            self._task = self._task or asyncio.create_task(self._send_parts())
            return
        if self._task is not None:
            self._ended.set()
            await self._task
        await self._send(message)

    async def _send_parts(self) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), self._interval_sec)
        while self._parts:
            body, self._parts = b"".join(self._parts), []
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._task = None

    def close(self) -> None:
        """Drop what was not sent, after the client or the application has failed."""
        if self._task is not None:
            self._task.cancel()


def run(configs: Sequence[LLMConfig], server: ServerConfig, cluster: ClusterConfig, bound: socket.socket) -> None:
    """Serve models on the connected cluster until SIGTERM or SIGINT; SIGHUP deploys, and so loads, the models again.

    Args:
        configs: of the models.
        server: of the server.
        cluster: how many replicas.
        bound: from `server.run.bind`: its address is Serve's, and it is closed before Serve listens.

    Raises:
        NanoinferError: the cluster has too few CPUs, or a model cannot be loaded.
    """
    with bound:
        where, (host, port) = f"listening on {url(bound)}", bound.getsockname()[:2]
    check_capacity(len(configs) * cluster.replicas, cluster.cores_per_replica or 1)
    # With several models, the base URL chooses: http://HOST:PORT/NAME/v1.
    prefixes = [f"/{names_of(c.model)[0].strip('/')}" for c in configs] if len(configs) > 1 else ["/"]
    reloads: SimpleQueue[int] = SimpleQueue()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda number, frame: reloads.put(number))
    if serve.status().proxies:  # its host and port cannot be changed
        where = "deployed to the Ray Serve that runs on the cluster, with its host and port"
    options = {"host": host, "port": port, "keep_alive_timeout_s": max(1, int(server.keep_alive_sec))}
    try:
        serve.start(proxy_location="HeadOnly", http_options=options, logging_config=_LOGGING)
        for config, prefix in zip(configs, prefixes, strict=True):
            _deploy(config, server, cluster, prefix)
        models = ", ".join(f"{printable(c.model)} at {p}" for c, p in zip(configs, prefixes, strict=True))
        print(f"nanoinfer: {where} (Ray Serve: {models}; replicas: {cluster.replicas})", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):  # SIGTERM or Ctrl-C: the normal end
            while reloads.get():
                _reload(configs, server, cluster, prefixes)
    finally:
        for prefix in prefixes:
            serve.delete(_application(prefix))
        if not serve.status().applications:
            serve.shutdown()


def _deploy(config: LLMConfig, server: ServerConfig, cluster: ClusterConfig, prefix: str) -> None:
    """Deploy a model, or replace its replicas one after the other. Raises NanoinferError if it cannot be loaded."""
    threads = config.engine.threads or cluster.cores_per_replica or 1
    config = replace(config, engine=replace(config.engine, threads=threads))
    deployment = serve.deployment(**deployment_options(server, cluster))(serve.ingress()(Model))
    name = _application(prefix)
    try:
        bound = deployment.bind(config, server, cluster.stream_interval_ms, versions())
        serve.run(bound, name=name, route_prefix=prefix)
    except RuntimeError as e:
        status = serve.status().applications.get(name)
        messages = [d.message for d in status.deployments.values() if d.message] if status is not None else []
        # Serve's message is the traceback of the replica, which ends with "nanoinfer.errors.NanoinferError: node ...".
        error = (messages or [one_line(e)])[0].splitlines()[-1].split("Error: ", 1)[-1]
        raise NanoinferError(f"{printable(config.model)}: {error}") from None


def deployment_options(server: ServerConfig, cluster: ClusterConfig) -> dict[str, Any]:
    """Return the options of `serve.deployment`."""
    count: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        count = {"autoscaling_config": {
            "min_replicas": cluster.replicas, "max_replicas": cluster.max_replicas,
            "target_ongoing_requests": cluster.target_requests,
        }}  # fmt: skip
    return {
        **count,
        "name": "model",
        "ray_actor_options": {"num_cpus": cluster.cores_per_replica or 1},
        "max_ongoing_requests": server.max_requests_in_flight,
        "graceful_shutdown_timeout_s": server.shutdown_timeout,
        "max_constructor_retry_count": 1,
        "logging_config": _LOGGING,
    }


def _reload(
    configs: Sequence[LLMConfig], server: ServerConfig, cluster: ClusterConfig, prefixes: Sequence[str]
) -> None:
    for config, prefix in zip(configs, prefixes, strict=True):
        try:
            _deploy(config, server, cluster, prefix)
            log.warning("%s was loaded again", config.model)
        except NanoinferError as e:
            log.error("%s", e)


def check_capacity(num_replicas: int, cores: int) -> None:
    """Raise NanoinferError if the cluster has too few CPUs: Serve would wait for others without a word."""
    if (available := capacity(cores)) < num_replicas:
        raise NanoinferError(
            f"{num_replicas} replicas of {cores} CPUs do not fit into the cluster, which has CPUs for {available}:"
            " lower --replicas or --cores-per-replica, or add nodes"
        )


def _application(prefix: str) -> str:
    """Return the name of the application of Serve at a prefix: the same command replaces one that was left behind."""
    return f"nanoinfer{prefix}".rstrip("/")
