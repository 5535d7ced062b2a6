"""The metrics of a front, and those of all replicas, each with the number of its replica as a label.

    nanoinfer:generation_tokens_total{model_name="a",replica="1"}

A replica that has ended, or does not answer in time, has no metrics: Prometheus' functions treat it as a reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from nanoinfer.cluster.link import Remote, ReplicaLost
from nanoinfer.server.metrics import PREFIX, response_labels
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    from nanoinfer.cluster.local import Group

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
        self._retried = Counter(
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

    def retried(self, group: Group) -> None:
        """Count a request that is sent to another replica."""
        self._retried.labels(group.names[0]).inc()

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
