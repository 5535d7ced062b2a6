"""Prometheus metrics with vLLM's names under the prefix nanoinfer: (docs/metrics.md has the table).

What runs, waits and is cached is what the core published after its last step. The rest is observed in the event loop
when an output is received, and from the metrics of a request's last output. Nothing here waits for a step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.types import Scope

from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import RequestMetrics, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.access_log import count_tokens

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PREFIX = "nanoinfer:"

_SHORT_SEC = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_SEC = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(m * 10**e for e in range(5) for m in (1, 2, 5))
_Value = Callable[[RequestMetrics, SamplingParams], float | None]
_HISTOGRAMS: dict[str, tuple[str, Sequence[float], _Value | None]] = {
    "time_to_first_token_seconds": (
        "Time from a request's arrival to its first token.", _LONG_SEC, lambda m, p: m.ttft_sec),
    "inter_token_latency_seconds": (
        "Time between two outputs of a stream, as the event loop receives them.", _SHORT_SEC, None),
    "request_time_per_output_token_seconds": (
        "Mean time of a request's tokens after the first.", _SHORT_SEC, lambda m, p: m.tpot_sec),
    "e2e_request_latency_seconds": (
        "Time from a request's arrival to its last token.", _LONG_SEC, lambda m, p: m.total_sec),
    "request_queue_time_seconds": (
        "Time from a request's arrival to its first step.", _LONG_SEC, lambda m, p: m.queue_sec),
    "request_prefill_time_seconds": (
        "Time from a request's first step to its first token.", _LONG_SEC, lambda m, p: m.ttft_sec - m.queue_sec),
    "request_decode_time_seconds": (
        "Time from a request's first token to its last.", _LONG_SEC, lambda m, p: m.total_sec - m.ttft_sec),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS, lambda m, p: m.num_prompt_tokens),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS, lambda m, p: m.num_output_tokens),
    "request_params_n": ("Outputs that a request asks for.", (1, 2, 5, 10, 20, 50, 100), lambda m, p: p.n),
    "request_params_max_tokens": ("max_tokens of a request, if it is given.", _TOKENS, lambda m, p: p.max_tokens),
}  # fmt: skip
"""Name -> help text, buckets, and the value of a request that has ended, if it has one."""
_POOLED = ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens")
"""Those of requests that generate nothing: embeddings and scores."""
_SPECULATION = {
    "spec_decode_num_drafts": "Steps that verified a draft.",
    "spec_decode_num_draft_tokens": "Proposed tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Proposed tokens that were accepted.",
}
_NO_PARAMS = SamplingParams()
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        llm: the served model.
        model_name: value of the label model_name.
        clock: returns seconds; tests pass a fake one.
    """

    def __init__(self, llm: AsyncLLM, model_name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(llm, model_name))

        def make(kind: Any, name: str, doc: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            metric = kind(PREFIX + name, doc, ("model_name", *labels), registry=self._registry, **options)
            return metric if labels else metric.labels(model_name)

        self._histograms = {
            name: _Histogram(name, doc, buckets, model_name) for name, (doc, buckets, _) in _HISTOGRAMS.items()
        }
        for histogram in self._histograms.values():
            self._registry.register(histogram)
        self.observe_gap = self._histograms["inter_token_latency_seconds"].observe
        self._speculation = {name: make(Counter, name, doc) for name, doc in _SPECULATION.items()}
        finished = make(Counter, "request_success", "Requests that have ended, by finish reason.", ("finished_reason",))
        self._finished = {reason: finished.labels(model_name, reason) for reason in FINISH_REASONS}
        self._responses = make(Counter, "http_responses", "Responses; 0: the client left before.", ("method", "status"))
        self._model_name = model_name

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format. It takes some 2 ms, and waits for nothing."""
        return bytes(generate_latest(self._registry))

    def responded(self, entry: Mapping[str, Any]) -> None:
        """Count a response. Args: entry: of the access log."""
        self._responses.labels(self._model_name, *response_labels(entry)).inc()

    @contextmanager
    def watch(self, scope: Scope, params: SamplingParams | None, num_prompts: int) -> Iterator[RequestWatch]:
        """Observe the requests of one HTTP request within the context. Those that do not finish were aborted or failed.

        Args:
            scope: gets their token counts, for the access log.
            params: of all of them; None: they generate nothing.
            num_prompts: their number.
        """
        watch = RequestWatch(self, scope, params)
        reason: str | None = "abort"
        try:
            yield watch
        except Exception as e:
            refused = isinstance(e, NanoinferError) and not isinstance(e, ResultError) and not watch.began
            reason = None if refused else "error"
            raise
        finally:
            if reason is not None:
                self._finished[reason].inc(num_prompts - watch.num_finished)

    def finish(self, output: RequestOutput, params: SamplingParams | None) -> None:
        """Observe the last output of a request."""
        metrics = output.metrics
        reason = next((o.finish_reason for o in output.outputs), None)  # of the first output
        self._finished[reason if reason in FINISH_REASONS else "length"].inc()
        for name, (_, _, read) in _HISTOGRAMS.items():
            if params is None and name not in _POOLED:
                continue
            if read is not None and (value := read(metrics, params or _NO_PARAMS)) is not None:
                self._histograms[name].observe(value)
        if (speculation := metrics.speculation) is not None:
            counts = (speculation.num_verify_steps, speculation.num_proposed, speculation.num_accepted)
            for name, count in zip(_SPECULATION, counts, strict=True):
                self._speculation[name].inc(count)


def response_labels(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return method and status of a response, from its entry of the access log."""
    method = entry["method"] if entry["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
    return method, str(entry["status"])


class RequestWatch:
    """Observes the outputs of the requests of one HTTP request.

    Args:
        metrics: where to.
        scope, params: as for `Metrics.watch`.
    """

    def __init__(self, metrics: Metrics, scope: Scope, params: SamplingParams | None) -> None:
        self._metrics, self._scope, self._params = metrics, scope, params
        self._last: dict[int, float] = {}
        self.began = False
        """Whether an output was received."""
        self.num_finished = 0

    def receive(self, outputs: Sequence[tuple[int, RequestOutput, bool]]) -> None:
        """Observe outputs: the number of the request, the output, and whether it is the last."""
        now = self._metrics.clock()
        self.began = True
        for i, output, last in outputs:
            if i in self._last:
                self._metrics.observe_gap(now - self._last[i])
            self._last[i] = now
            if last:
                self.num_finished += 1
                self._metrics.finish(output, self._params)
                count_tokens(self._scope, output.metrics.num_prompt_tokens, output.metrics.num_output_tokens)


class _Histogram(Collector):
    """Counts values in one of its buckets: prometheus_client's own takes ten times as long, for each token."""

    def __init__(self, name: str, doc: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._doc, self._model_name = name, doc, model_name
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Add a value. Only the event loop calls it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric."""
        family = HistogramMetricFamily(PREFIX + self._name, self._doc, labels=["model_name"])
        names = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        family.add_metric([self._model_name], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family


class _Engine(Collector):
    """Reads what the core has published, when the metrics are requested."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm, self._model_name = llm, model_name

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics."""
        core = self._llm.llm.core
        state = core.published
        for kind, name, doc, value in (
            (GaugeMetricFamily, "num_requests_running", "Requests that the engine runs.", state.num_running),
            (GaugeMetricFamily, "num_requests_waiting", "Requests that are prepared or wait.",
             max(0, self._llm.num_unfinished_requests - state.num_running)),
            (GaugeMetricFamily, "kv_cache_usage_perc", "Used share of the KV cache, kept prefixes included; 1 is all.",
             1.0 - state.num_free_blocks / core.num_blocks),
            (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up.", state.num_prompt_tokens),
            (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found in the cache.", state.num_shared_tokens),
            (CounterMetricFamily, "num_preemptions", "Preempted sequences.", state.num_preempted),
            (CounterMetricFamily, "prompt_tokens", "Tokens of admitted prompts.", state.num_prompt_tokens),
            (CounterMetricFamily, "generation_tokens", "Generated tokens.", state.num_output_tokens),
        ):  # fmt: skip
            family = kind(PREFIX + name, doc, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
