"""Serve several models, or several replicas of one, behind one port.

The front is an ASGI application that passes each request on to a replica of the model that it names.

If a replica ends, its requests whose response has not begun are sent again, to another replica; with a seed the
text is the same. A stream that has begun ends with an error.

Its metrics are its own and those of all replicas, each with the number of its replica as a label:

    nanoinfer:generation_tokens_total{model_name="a",replica="1"}

A replica that has ended, or does not answer in time, has no metrics: Prometheus' functions treat it as a reset.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import Message, Receive, Scope, Send

from nanoinfer.cluster.link import Answer, Remote, ReplicaLost, choose, head_of, prefix_blocks
from nanoinfer.cluster.local import Group, plan_cores, unavailable
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, ResultError, one_line, printable
from nanoinfer.protocols.fields import unknown_model
from nanoinfer.server.access_log import AccessLog, configure_logging, count_tokens
from nanoinfer.server.app import guarded
from nanoinfer.server.config import ClusterConfig, ServerConfig
from nanoinfer.server.connections import with_max_connections
from nanoinfer.server.http import Bodies, SentResponse, respond, respond_json
from nanoinfer.server.limits import BoundRequests
from nanoinfer.server.metrics import CONTENT_TYPE as METRICS_TYPE
from nanoinfer.server.metrics import PREFIX, response_labels
from nanoinfer.server.run import listen, log_files
from nanoinfer.utils.workers import Workers

log = logging.getLogger("nanoinfer.server")

ATTEMPTS = 3
"""How often a request is sent to a replica: a request that crashes its replica must not crash all of them."""
RETRY_SEC = 0.05
"""Time before it is sent again; ten times as long before the next time. Of replicas that end together, the front learns
one by one."""
_MODELS = "/v1/models"


class Front:
    """Answers requests for several models.

    Args:
        groups: the models; requests that name none go to the first.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._by_name = {name: group for group in groups for name in group.names}
        self._bodies = Bodies()
        self.metrics = FrontMetrics(groups)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose body comes in one message. Raises errors, which the caller turns into responses."""
        path = scope["path"] if scope["method"] in ("GET", "HEAD") else None  # a replica refuses other methods
        if path == "/health":
            if missing := [group.names[0] for group in self._groups if not group.is_running]:
                raise unavailable(f"no replica of {', '.join(missing)} runs")
            return await respond(send, b"")
        if path == "/metrics":
            return await respond(send, await self.metrics.exposition(), content_type=METRICS_TYPE)
        if path == _MODELS:
            entries = [entry for group in self._groups for entry in group.described]
            return await respond_json(send, {"object": "list", "data": entries})
        body: bytes = (await receive())["body"]
        document, blocks = await self._document(body, scope["state"].get("cache_salt"))
        group, response = self._group(scope, document), SentResponse(send)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_SEC * 10 ** (attempt - 1))
            remote = choose(await group.ready(), blocks)
            try:
                async with remote.request(head_of(scope), body) as answer:
                    return await _pass_on(answer, scope, response)
            except ReplicaLost:
                request_id = scope["state"].get("request_id", "-")
                log.warning("request %s: replica %s of %s has ended", request_id, remote.name, group.model)
                if response.status:
                    raise ResultError(
                        "the replica that ran this request has ended: send the request again; with a seed it gives the"
                        " same text"
                    ) from None
                self.metrics.retried.labels(group.names[0]).inc()
        raise unavailable(f"{ATTEMPTS} replicas have ended while they ran this request: try again later")

    def _group(self, scope: Scope, document: Mapping[str, Any]) -> Group:
        """Return the model that a request names: in its body, in its path or in its query. Raises FieldError."""
        name = document.get("model")
        if scope["path"].startswith(_MODELS + "/"):
            name = scope["path"][len(_MODELS) + 1 :]
        elif name is None:
            name = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model", [None])[0]
        if name is None:
            return self._groups[0]
        group = self._by_name.get(name) if isinstance(name, str) else None
        if group is None:
            raise unknown_model(name, [group.names[0] for group in self._groups])
        return group

    async def _document(self, body: bytes, salt: str | None) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Return the JSON object of a body and the blocks of its prompt; empty without one: the replica refuses it."""

        async def receive() -> Message:
            return {"body": body}

        try:
            return await self._bodies.read(receive, lambda document: (document, prefix_blocks(document, salt)))
        except NanoinferError:
            return {}, ()


async def _pass_on(answer: Answer, scope: Scope, send: Send) -> None:
    """Send what the replica answers. Raises ReplicaLost."""
    status, headers = await answer.head()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    more = True
    while more:
        part, more = await answer.part()
        await send({"type": "http.response.body", "body": part, "more_body": more})
    if any(answer.num_tokens):
        count_tokens(scope, *answer.num_tokens)


_OF_FRONT = PREFIX + "http_responses"
"""The metric that the front counts itself: replicas declare it, without samples, and a name must not come twice."""
REPLICA_SEC = 2.0
"""How long the metrics wait for a replica."""


class FrontMetrics(Collector):
    """The metrics of a front. Args: groups: the models."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._registry = CollectorRegistry()
        self._responses = Counter(
            _OF_FRONT, "Responses; status 0: the client disconnected before.",
            ("model_name", "method", "status"), registry=self._registry,
        )  # fmt: skip
        self.retried = Counter(
            PREFIX + "requests_retried", "Requests that were sent again because their replica had ended.",
            ("model_name",), registry=self._registry,
        )  # fmt: skip
        self._replicas = Gauge(
            PREFIX + "replicas", "Replicas that are connected.", ("model_name",), registry=self._registry
        )
        self._texts: dict[Remote, str] = {}
        self._thread = Workers("nanoinfer-metrics", 1)
        self._registry.register(self)

    def responded(self, entry: Mapping[str, Any]) -> None:
        """Count a response. Args: entry: of the access log."""
        first = self._groups[0].names[0]  # as in the dashboard's queries; many responses are to requests of no model
        self._responses.labels(first, *response_labels(entry)).inc()

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""

        async def read(remote: Remote) -> tuple[Remote, str] | None:
            with suppress(ReplicaLost, asyncio.TimeoutError):
                return remote, (await asyncio.wait_for(remote.get("/metrics"), REPLICA_SEC)).decode()
            return None

        for group in self._groups:
            self._replicas.labels(group.names[0]).set(len(group.replicas))
        texts = await asyncio.gather(*(read(remote) for group in self._groups for remote in group.replicas))
        self._texts = dict(filter(None, texts))
        return await self._thread.run(lambda: bytes(generate_latest(self._registry)))  # milliseconds for each replica

    def describe(self) -> list[Any]:
        """Return nothing: the registry then does not collect at the beginning."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the replicas."""
        families: dict[str, Metric] = {}
        for remote, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, {**sample.labels, "replica": remote.name}, sample.value)
        families.pop(_OF_FRONT, None)
        yield from families.values()


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
    if (path := configs[0].scheduler.prefix_cache_file) is not None:  # of all of them
        raise NanoinferError(f"prefix_cache_file={path!r} needs one process: leave it out, or replicas and idle_unload")
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
