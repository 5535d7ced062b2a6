"""/metrics, the dashboard that reads it, the access log and request ids."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.environment import ROOT

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `server` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from helpers import asgi
from helpers.asgi import call
from nanoinfer import LLM, AsyncLLM, NanoinferError, SamplingParams
from nanoinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from nanoinfer.server.access_log import MAX_LINES, AccessLog, LogRequests, OneLine, configure_logging
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.connections import MAX_CONNECTIONS
from nanoinfer.server.metrics import FINISH_REASONS, PREFIX, Metrics

COMPLETIONS = "/v1/completions"
serve = functools.partial(asgi.serve, served_model_name=("m",))
BODY = {"prompt": "To be or not to b", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), engine="native", max_num_seqs=4)


async def post(app: ASGIApp, **changes: Any) -> Any:
    found = await call(app, "POST", COMPLETIONS, body=json.dumps(BODY | changes).encode())
    return found.status


def samples(exposition: bytes) -> dict[tuple[str, str], float]:
    """Return the values by name and by what the labels beside model_name are: {("x_total", "stop"): 1.0}."""
    found = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            found[sample.name.removeprefix(PREFIX), ",".join(labels.values())] = sample.value
    return found


async def scrape(app: ASGIApp) -> dict[tuple[str, str], float]:
    found = await call(app, "GET", "/metrics")
    assert found.status == 200
    assert found.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(found.content)


def test_counts_of_requests_and_tokens(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        before = await scrape(app)
        assert before["kv_cache_usage_perc", ""] == 0
        assert await post(app) == 200
        assert await post(app, n=2, temperature=1, seed=0) == 200
        assert await post(app, prompt=["To be", "or"], stream=True) == 200
        assert await post(app, n=0) == 400
        found = await scrape(app)
        assert found["request_success_total", "length"] == 4
        assert found["prompt_tokens_total", ""] == 17 + 17 + 5 + 2
        assert found["generation_tokens_total", ""] == 8 * 5
        assert found["prefix_cache_queries_total", ""] == 17 + 17 + 5 + 2
        assert found["prefix_cache_hits_total", ""] == llm.core.scheduler.stats.num_shared_tokens > 15
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
            assert found[f"{name}_seconds_count", ""] == 4
            assert 0 <= found[f"{name}_seconds_sum", ""] < 60
        assert found["request_prompt_tokens_sum", ""] == 17 + 17 + 5 + 2
        assert found["request_generation_tokens_sum", ""] == 8 * 5
        assert found["request_params_n_sum", ""] == 1 + 2 + 1 + 1
        assert found["request_params_max_tokens_sum", ""] == 8 * 4
        assert found["inter_token_latency_seconds_count", ""] <= 2 * 8  # of the two streams; outputs may be merged
        assert found["http_responses_total", "POST,200"] == 3
        assert found["http_responses_total", "POST,400"] == 1
        assert found["num_requests_running", ""] == found["num_requests_waiting", ""] == 0
        decoder = llm.engine._decoder  # type: ignore[attr-defined]
        assert 0 < found["kv_cache_usage_perc", ""] < 1  # prefixes that are kept
        assert found["kv_cache_usage_perc", ""] == 1 - decoder.blocks_free / decoder.blocks_total
        llm.reset_prefix_cache()
        assert (await scrape(app))["kv_cache_usage_perc", ""] == 0

    serve(llm, main)


def test_running_and_waiting_requests_and_those_that_were_aborted(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        gone = asyncio.Event()
        body = json.dumps(BODY | {"n": 4, "max_tokens": 1_000_000, "overflow": "slide"}).encode()
        tasks = [asyncio.create_task(call(app, "POST", COMPLETIONS, body=body, disconnect=gone)) for _ in range(3)]
        while llm.core.published.num_running < 1 or model.num_unfinished_requests < 3:
            await asyncio.sleep(0.001)
        found = await scrape(app)
        assert (found["num_requests_running", ""], found["num_requests_waiting", ""]) == (1, 2)
        gone.set()
        await asyncio.gather(*tasks)
        while llm.core.published.num_running or model.num_unfinished_requests:
            await asyncio.sleep(0.001)
        found = await scrape(app)
        assert (found["num_requests_running", ""], found["num_requests_waiting", ""]) == (0, 0)
        assert found["request_success_total", "abort"] == 3
        assert found["http_responses_total", "POST,0"] == 3

    serve(llm, main)


def output(**metrics: Any) -> RequestOutput:
    completion = CompletionOutput(0, "x", [1], "stop")
    measured = RequestMetrics(**{"num_prompt_tokens": 3, "num_output_tokens": 4, "ttft_sec": 0.25, "tpot_sec": 0.1,
                                 "total_sec": 0.55, "queue_sec": 0.05, **metrics})  # fmt: skip
    return RequestOutput(0, None, [1, 2, 3], [completion], 0, 0, measured)


def metrics_of(llm: LLM, clock: Callable[[], float]) -> tuple[Metrics, Callable[[], dict[tuple[str, str], float]]]:
    model = AsyncLLM.from_llm(llm)
    metrics = Metrics(model, "m", clock)
    return metrics, lambda: samples(metrics.exposition())


def test_times_of_a_request(llm: LLM) -> None:
    now = iter([10.0, 10.5, 12.5])
    metrics, read = metrics_of(llm, lambda: next(now))
    scope: dict[str, Any] = {}
    with metrics.watch(scope, SamplingParams(n=1), 2) as watch:
        watch.receive([(0, output(), False), (1, output(), False)])
        watch.receive([(0, output(), False)])
        watch.receive([(0, output(), True), (1, output(tpot_sec=None), True)])
    found = read()
    assert found["inter_token_latency_seconds_count", ""] == 3
    assert found["inter_token_latency_seconds_sum", ""] == 0.5 + 2.0 + 2.5
    assert found["time_to_first_token_seconds_sum", ""] == 2 * 0.25
    assert found["request_queue_time_seconds_sum", ""] == 2 * 0.05
    assert found["request_prefill_time_seconds_sum", ""] == pytest.approx(2 * 0.2)
    assert found["request_decode_time_seconds_sum", ""] == pytest.approx(2 * 0.3)
    assert found["request_time_per_output_token_seconds_count", ""] == 1
    assert found["e2e_request_latency_seconds_sum", ""] == 2 * 0.55
    assert found["request_success_total", "stop"] == 2
    assert scope["state"]["num_tokens"] == [6, 8]


def test_acceptance_of_drafts(llm: LLM) -> None:
    metrics, read = metrics_of(llm, lambda: 0.0)
    speculation = SpeculationMetrics(num_proposed=10, num_accepted=7, num_rejected=2, num_verify_steps=3,
                                     mean_accepted_length=7 / 3, draft_share=0.1)  # fmt: skip
    metrics.finish(output(speculation=speculation), SamplingParams())
    found = read()
    assert found["spec_decode_num_drafts_total", ""] == 3
    assert found["spec_decode_num_draft_tokens_total", ""] == 10
    assert found["spec_decode_num_accepted_tokens_total", ""] == 7


@pytest.mark.parametrize(
    ("error", "began", "counted"),
    [(NanoinferError("n=0"), False, None), (NanoinferError("later"), True, "error"), (KeyError(), False, "error"),
     (asyncio.CancelledError(), False, "abort"), (None, False, "abort")],
)  # fmt: skip
def test_requests_that_do_not_finish_are_counted_unless_they_were_refused(
    llm: LLM, error: BaseException | None, began: bool, counted: str | None
) -> None:
    metrics, read = metrics_of(llm, lambda: 0.0)

    def fail() -> None:
        with metrics.watch({}, SamplingParams(), 3) as watch:
            if began:
                watch.receive([(0, output(), True)])
            if error is not None:
                raise error

    if error is None:
        fail()
    else:
        with pytest.raises(type(error)):
            fail()
    found = read()
    expected = dict.fromkeys(FINISH_REASONS, 0)
    if counted is not None:
        expected[counted] = 3 - began
    expected["stop"] += began
    assert {reason: found["request_success_total", reason] for reason in FINISH_REASONS} == expected


def test_unknown_methods_are_one_label(llm: LLM) -> None:
    """A client cannot make labels, which are kept for ever."""
    metrics, read = metrics_of(llm, lambda: 0.0)
    for i in range(50):
        metrics.responded({"method": f"M{i}", "status": 405})
    assert read()["http_responses_total", "other,405"] == 50


# The documents -------------------------------------------------------------------------------------------


def families(llm: LLM) -> dict[str, str]:
    """Return the type of each metric."""
    metrics, _ = metrics_of(llm, lambda: 0.0)
    found = text_string_to_metric_families(metrics.exposition().decode())
    return {
        f.name + ("_total" if f.type == "counter" else ""): f.type for f in found if not f.name.endswith("_created")
    }


def test_the_dashboard_reads_metrics_that_exist(llm: LLM) -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    dashboard = json.loads(text)
    known = {
        name + suffix
        for name, kind in families(llm).items()
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    read = set(re.findall(r"nanoinfer:\w+", text))  # the variable's query as well
    assert len(dashboard["panels"]) >= 12
    assert read - known == set()
    for expression in expressions:  # every selection is by the variable of the model
        assert expression.count('{model_name=~"$model"}') == len(re.findall(r"nanoinfer:\w+", expression))
        assert expression.count("(") == expression.count(")")
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_table_of_metrics_is_complete(llm: LLM) -> None:
    rows = re.findall(r"^\| `(nanoinfer:\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert dict(rows) == families(llm)


def test_the_table_of_bounds_is_complete() -> None:
    table = (ROOT / "docs" / "server-security.md").read_text()
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]+) \|", table, re.MULTILINE))
    config = ServerConfig()
    defaults = {**vars(config), "max_connections": MAX_CONNECTIONS}
    for name, default in defaults.items():
        if name.startswith("max_") or name.endswith("_sec"):
            assert float(rows[name.replace("_", "-")].partition(",")[0]) == default, name


# The access log ------------------------------------------------------------------------------------------


def test_the_access_log_has_a_line_of_json_for_each_request(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        secret = {"authorization": "Bearer secret", "x-request-id": "id-1"}
        body = json.dumps(BODY | {"prompt": "secret"}).encode()
        await call(app, "POST", COMPLETIONS, headers=secret, body=body)
        await call(app, "GET", "/health?secret", headers={"x-request-id": 'bad "id"\n'})
        await call(app, "GET", "/" + "x" * 1000)

    serve(llm, main, log)
    log.close()
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert list(first) == ["time", "request_id", "client", "method", "path", "status", "duration_sec",
                           "prompt_tokens", "completion_tokens"]  # fmt: skip
    assert (first["request_id"], first["method"], first["path"]) == ("id-1", "POST", COMPLETIONS)
    assert (first["status"], first["prompt_tokens"], first["completion_tokens"]) == (200, 6, 8)
    assert 0 < first["duration_sec"] < 60
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert re.fullmatch(r"[0-9a-f]{32}", second["request_id"])
    assert len(third["path"]) == 256
    assert "secret" not in path.read_text().replace("/health?secret", "")
    assert path.stat().st_mode & 0o077 in (0, 0o040)  # not readable by everybody


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("abc-123", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ("é", False),
        ("", False),
        (None, False),
    ],
)
def test_request_ids_are_taken_over_if_they_are_well_formed(given: str | None, taken: bool) -> None:
    entries: list[Any] = []
    headers = {} if given is None else {"x-request-id": given}
    found = asyncio.run(call(LogRequests(hello, entries.append), headers=headers))
    assert found.headers["x-request-id"] == entries[0]["request_id"] == found.scope["state"]["request_id"]
    assert (found.headers["x-request-id"] == given) == taken
    assert found.headers["x-content-type-options"] == "nosniff"


def test_a_response_that_is_cut_off_is_marked() -> None:
    async def cut(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ConnectionAbortedError

    entries: list[Any] = []
    with pytest.raises(ConnectionAbortedError):
        asyncio.run(call(LogRequests(cut, entries.append)))
    assert (entries[0]["status"], entries[0]["complete"]) == (200, False)


def test_an_exception_that_no_middleware_answers_is_a_500_in_openais_shape(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise OSError("a secret")

    entries: list[Any] = []
    found = asyncio.run(call(LogRequests(fail, entries.append)))
    assert (found.status, found.complete, entries[0]["status"]) == (500, True, 500)
    assert found.error["type"] == "server_error"
    assert entries[0]["request_id"] == found.headers["x-request-id"] in caplog.text
    assert "OSError" in caplog.text
    assert "secret" not in caplog.text + found.error["message"]


def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(LogRequests(hello, sent.append)({"type": "websocket"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_discards_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as configure_logging sets it
    log = AccessLog("/dev/full")
    for _ in range(MAX_LINES + 10):
        log.write({"status": 200})
    log.close()


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NanoinferError, match="--access-log"):
        AccessLog(str(tmp_path / "missing" / "log"))


def record_of(error: BaseException | None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("nanoinfer", logging.ERROR, "", 0, "two\nlines", (), info)


def test_exceptions_are_logged_on_one_line_unless_the_level_is_debug() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d ERROR two lines: KeyError", OneLine(False).format(record_of(KeyError("x"))))
    assert OneLine(False).format(record_of(None)).endswith("ERROR two lines")
    assert "KeyError: 'x'" in OneLine(True).format(record_of(KeyError("x")))


def test_logging_is_configured_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: logging.getLogger(name) for name in ("nanoinfer", "asyncio", "uvicorn")}
    state = {name: (g.handlers, g.propagate, g.level) for name, g in before.items()}
    raising = logging.raiseExceptions
    try:
        for _ in range(2):
            configure_logging("warning")
        logging.getLogger("nanoinfer.server").warning("once")
        logging.getLogger("uvicorn.error").info("not at this level")
    finally:
        logging.raiseExceptions = raising
        for name, logger in before.items():
            logger.handlers, logger.propagate, logger.level = state[name]
    assert capsys.readouterr().err.count("once") == 1
