"""The metrics of all replicas: summed under the names that one server has, and by replica.

    nanoinfer:generation_tokens_total{model_name="a"}                            the sum
    nanoinfer:replica_generation_tokens_total{model_name="a",replica="1"}        of one replica

What a replica had counted at the last request for the metrics stays in the sums after it has ended.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    from nanoinfer.cluster.group import Group

_MEANS = (PREFIX + "kv_cache_usage_perc",)
"""Gauges of which the replicas' mean is shown."""
_NOT_SUMMED = "_created"
_OF_FRONT = (PREFIX + "http_responses",)
"""Metrics that the front counts itself: replicas declare them, without samples, and a name must not come twice."""
REPLICA_SEC = 2.0
"""How long the metrics wait for a replica; what one that hangs had counted before is shown."""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Name and labels of a sample -> its value."""


class FrontMetrics:
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
        self._merged = _Merged()
        self._thread = Workers("nanoinfer-metrics", 1)
        self._registry.register(self._merged)

    def responded(self, entry: Mapping[str, Any]) -> None:
        """Count a response. Args: entry: of the access log."""
        first = self._groups[0].names[0]  # as in the dashboard's queries; many responses are to requests of no model
        self._responses.labels(first, *response_labels(entry)).inc()

    def retried(self, group: Group) -> None:
        """Count a request that is sent to another replica."""
        self._retried.labels(group.names[0]).inc()

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        asked = {r: asyncio.create_task(r.get("/metrics")) for group in self._groups for r in group.replicas}
        found: dict[Remote, str | None] = {}
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=REPLICA_SEC)
        finally:
            for task in asked.values():
                task.cancel()  # what has ended stays as it is
        for remote, task in asked.items():
            with suppress(ReplicaLost):
                found[remote] = task.result().decode() if task.done() else None
        for group in self._groups:
            self._replicas.labels(group.names[0]).set(len(group.replicas))

        def merge() -> bytes:
            self._merged.update(found)
            return bytes(generate_latest(self._registry))

        return await self._thread.run(merge)  # milliseconds for each replica


class _Merged(Collector):
    """The metrics of all replicas, summed."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}  # name -> the family without samples
        self._latest: dict[Remote, dict[str, Samples]] = {}
        self._ended: dict[str, Samples] = defaultdict(lambda: defaultdict(float))
        """Counters and histograms of replicas that have ended."""

    def update(self, texts: Mapping[Remote, str | None]) -> None:
        """Store the latest metrics of each replica; None: it has not answered. Replicas that are missing have ended."""
        for remote in [r for r in self._latest if r not in texts]:
            for name, samples in self._latest.pop(remote).items():
                if self._families[name].type != "gauge":
                    _add(self._ended[name], samples)
        for remote, text in texts.items():
            if text is None:
                continue
            found: dict[str, Samples] = {}
            for family in text_string_to_metric_families(text):
                if family.name.endswith(_NOT_SUMMED) or family.name in _OF_FRONT:
                    continue
                self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                found[family.name] = {(s.name, tuple(s.labels.items())): s.value for s in family.samples}
            self._latest[remote] = found

    def describe(self) -> list[Any]:
        """Return nothing: the registry then does not collect at the beginning."""
        return []

    def collect(self) -> Any:
        """Yield the sums, then counters and gauges of each replica."""
        for name, family in self._families.items():
            total: Samples = defaultdict(float, self._ended[name])
            for samples in (latest.get(name, {}) for latest in self._latest.values()):
                _add(total, samples)
            if name in _MEANS:
                of = [latest.get(name, {}) for latest in self._latest.values()]
                total = {key: value / sum(key in samples for samples in of) for key, value in total.items()}
            yield _metric(family, name, total)
            if family.type in ("counter", "gauge"):
                by_replica: Samples = {}
                for remote, latest in self._latest.items():
                    for (sample, labels), value in latest.get(name, {}).items():
                        by_replica[_of_replica(sample), (*labels, ("replica", remote.name))] = value
                yield _metric(family, _of_replica(name), by_replica)


def _of_replica(name: str) -> str:
    return PREFIX + "replica_" + name.removeprefix(PREFIX)


def _add(total: Samples, samples: Samples) -> None:
    for key, value in samples.items():
        total[key] = total.get(key, 0.0) + value


def _metric(family: Metric, name: str, samples: Samples) -> Metric:
    made = Metric(name, family.documentation, family.type)
    for (sample, labels), value in samples.items():
        made.add_sample(sample, dict(labels), value)
    return made
