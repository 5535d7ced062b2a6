"""The metrics of all replicas: summed under the names that one server has, and by replica.

    nanoinfer:generation_tokens_total{model_name="a"}                            the sum
    nanoinfer:replica_generation_tokens_total{model_name="a",replica="1"}        of one replica

What a replica had counted at the last request for the metrics stays in the sums after it has ended.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

_MEANS = (PREFIX + "kv_cache_usage_perc",)
"""Gauges of which the replicas' mean is shown."""
_NOT_SUMMED = "_created"
_OF_FRONT = (PREFIX + "http_responses",)
"""Metrics that the front counts itself: replicas declare them, without samples, and a name must not come twice."""
REPLICA_SEC = 2.0
"""How long the metrics wait for a replica; what one that hangs had counted before is shown."""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Name and labels of a sample -> its value."""


class FrontMetrics(Collector):
    """The metrics of a front. Args: groups: the models."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._registry = CollectorRegistry()
        self._responses = Counter(
            PREFIX + "http_responses", "Responses; status 0: the client disconnected before.",
            ("model_name", "method", "status"), registry=self._registry,
        )  # fmt: skip
        self._retried = Counter(
            PREFIX + "requests_retried", "Requests that were sent again because their replica had ended.",
            ("model_name",), registry=self._registry,
        )  # fmt: skip
        self._replicas = Gauge(
            PREFIX + "replicas", "Replicas that are connected.", ("model_name",), registry=self._registry
        )
        self._families: dict[str, Metric] = {}  # name -> the family without samples
        self._latest: dict[Remote, dict[str, Samples]] = {}
        self._ended: dict[str, Samples] = defaultdict(dict)
        """Counters and histograms of replicas that have ended."""
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
        requests = {r: asyncio.create_task(r.get("/metrics")) for group in self._groups for r in group.replicas}
        texts: dict[Remote, str | None] = {}
        try:
            if requests:
                await asyncio.wait(requests.values(), timeout=REPLICA_SEC)
        finally:
            for task in requests.values():
                task.cancel()  # what has ended stays as it is
        for remote, task in requests.items():
            with suppress(ReplicaLost):
                texts[remote] = task.result().decode() if task.done() else None
        for group in self._groups:
            self._replicas.labels(group.names[0]).set(len(group.replicas))

        def merge() -> bytes:
            self._update(texts)
            return bytes(generate_latest(self._registry))

        return await self._thread.run(merge)  # milliseconds for each replica

    def _update(self, texts: Mapping[Remote, str | None]) -> None:
        """Store the latest metrics of each replica; None: it has not answered. Replicas that are missing have ended."""
        for remote in [r for r in self._latest if r not in texts]:
            for name, samples in self._latest.pop(remote).items():
                if self._families[name].type != "gauge":
                    self._ended[name] = _sum([self._ended[name], samples])
        for remote, text in texts.items():
            if text is not None:
                self._latest[remote] = latest = {}
                for family in text_string_to_metric_families(text):
                    if not family.name.endswith(_NOT_SUMMED) and family.name not in _OF_FRONT:
                        self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                        latest[family.name] = {(s.name, tuple(s.labels.items())): s.value for s in family.samples}

    def describe(self) -> list[Any]:
        """Return nothing: the registry then does not collect at the beginning."""
        return []

    def collect(self) -> Any:
        """Yield the sums, then counters and gauges of each replica."""
        for name, family in self._families.items():
            by_replica = {remote: latest.get(name, {}) for remote, latest in self._latest.items()}
            total = _sum([self._ended[name], *by_replica.values()])
            if name in _MEANS:
                total = {key: v / sum(key in samples for samples in by_replica.values()) for key, v in total.items()}
            yield _metric(family, name, total)
            if family.type in ("counter", "gauge"):
                yield _metric(family, _of_replica(name), {
                    (_of_replica(sample), (*labels, ("replica", remote.name))): value
                    for remote, samples in by_replica.items() for (sample, labels), value in samples.items()
                })  # fmt: skip


def _of_replica(name: str) -> str:
    return PREFIX + "replica_" + name.removeprefix(PREFIX)


def _sum(parts: Iterable[Samples]) -> Samples:
    total: Samples = defaultdict(float)
    for samples in parts:
        for key, value in samples.items():
            total[key] += value
    return total


def _metric(family: Metric, name: str, samples: Samples) -> Metric:
    metric = Metric(name, family.documentation, family.type)
    for (sample, labels), value in samples.items():
        metric.add_sample(sample, dict(labels), value)
    return metric
