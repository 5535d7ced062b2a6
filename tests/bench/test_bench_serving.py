"""Suite serving: its cases, late requests and shared prefixes on a tiny model, and how its rows are shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.models import TINY, make_folder, refuses
from nanoinfer.bench import results
from nanoinfer.bench.backends import require_case
from nanoinfer.bench.backends.engines import EngineBackend
from nanoinfer.bench.case import Case, make_requests
from nanoinfer.bench.run import Plan, run
from nanoinfer.bench.suites import SUITES
from nanoinfer.bench.worker import WorkerProcess
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.presets import PRESETS

pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

PEERS = {("llama.cpp", bits) for bits in ("bfloat16", "Q8_0", "Q4_0")}
PEERS |= {(name, bits) for name in ("openvino", "vllm") for bits in ("bfloat16", "int8", "int4")}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("serving") / "tiny", replace(TINY, block_size=256))


def cases(quick: bool, engines: list[str] | None = None) -> list[Case]:
    return SUITES["serving"].cases("random:gpt2", PRESETS["gpt2"], engines or ["static", "native"], quick)


def test_the_suite_has_the_rows_of_the_issue() -> None:
    made = cases(quick=False)
    assert {c.model for c in made} == {"random:gpt2"}
    assert Counter(c.workload for c in made) == {"mixed": 12, "prefix": 2, "arrival": 3, "uniform": 2}
    mixed = [c for c in made if c.workload == "mixed"]
    assert {(c.backend, c.format) for c in mixed} == {("native", f) for f in ("bfloat16", "int8", "int4")} | PEERS
    assert {(c.batch, c.prompt_tokens, c.output_tokens) for c in mixed} == {(64, 256, 256)}
    others = made[12:]
    assert {c.label.partition(" + ")[0] for c in others} == {"native int8"}
    assert [(c.batch, c.prompt_tokens, c.prefix_caching) for c in others[:2]] == [(200, 520, False), (200, 520, True)]
    assert [(c.batch, c.prompt_tokens, c.max_num_batched_tokens, c.target_step_ms) for c in others[2:5]] == [
        (9, 1000, 2048, None), (9, 1000, 2048, 80), (9, 1000, 64, None),
    ]  # fmt: skip
    assert [c.batch for c in others[5:]] == [64, 512]


def test_a_quick_run_is_small_and_has_every_kind_of_row() -> None:
    made = cases(quick=True)
    assert Counter(c.workload for c in made) == {"mixed": 4, "prefix": 2, "arrival": 2, "uniform": 1}
    assert max(c.batch * (c.prompt_tokens + c.output_tokens) for c in made) <= 2500
    assert {c.quantization for c in cases(True, ["static"]) if c.backend == "static"} == {None}


def test_a_late_request_runs_beside_the_others_and_is_not_timed(folder: Path) -> None:
    case = Case("native", "m", batch=4, prompt_tokens=100, output_tokens=12, workload="arrival")
    work = make_requests(case, 30)
    tokens, times = EngineBackend(case, folder).run(work)
    assert [len(t) for t in tokens] == work.output_tokens == [12, 12, 12, 1]
    assert [len(a) for a in times.arrivals] == [12, 12, 12]
    assert times.num_prompt_tokens == 3 * 32
    small = replace(case, max_num_batched_tokens=16)
    assert EngineBackend(small, folder).run(work)[0] == tokens


def test_the_late_request_arrives_at_the_last_first_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of at most 40 tokens that process 100 late ones follow the one that ends the prompts."""
    case = Case(
        "native", "m", batch=3, prompt_tokens=100, output_tokens=8, workload="arrival", max_num_batched_tokens=40
    )
    backend, sizes = EngineBackend(case, folder), []
    extend = backend._llm.engine.extend
    monkeypatch.setattr(
        backend._llm.engine, "extend", lambda batch: (sizes.append(len(batch.token_ids)), extend(batch))[1]
    )
    backend.run(make_requests(case, 30))
    assert sum(sizes) == 2 * 32 + 100 + 2 * 7
    first = sizes.index(40, 2)
    assert sizes[first : first + 2] == [40, 40]
    assert all(n <= 40 for n in sizes)


def test_rounds_with_a_prefix_cache_begin_without_prefixes(folder: Path) -> None:
    case = Case("native", "m", batch=4, prompt_tokens=60, output_tokens=3, workload="prefix", prefix_caching=True)
    backend, work = EngineBackend(case, folder), make_requests(case, 30, seed=1)
    stats = backend._llm.core.scheduler.stats
    tokens, shared = [], []
    for _ in range(2):
        before = stats.num_shared_tokens
        tokens.append(backend.run(work)[0])
        shared.append(stats.num_shared_tokens - before)
    assert shared == [3 * 40, 3 * 40]
    plain = EngineBackend(case.plain, folder)
    assert tokens == [plain.run(work)[0]] * 2
    assert plain._llm.core.scheduler.stats.num_shared_tokens == 0


def test_peers_refuse_what_they_are_not_measured_with() -> None:
    case = Case("llama.cpp", "m")
    for other in (replace(case, batch=2, workload="arrival"), replace(case, prefix_caching=True)):
        refuses(lambda c=other: require_case(c, dtypes=("float32",)), "llama.cpp", "late requests")  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ceiling")
def test_a_quick_run_from_measuring_to_the_figures(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    plan = Plan(suite=("serving",), model=str(folder), quick=True, output=path)
    (made,), _ = run(plan, "test", log=lambda _: None)
    ours = [row for row in made.rows if row.case.backend in ENGINES]
    assert [row.error for row in ours] == [None] * len(ours)
    assert made.baseline == "the best peer"
    shown = {row.case.label: row for row in ours if row.case.workload in ("prefix", "arrival")}
    assert list(shown) == ["native int8", "native int8 + prefix cache", "native int8 + steps of 64"]
    for row in list(shown.values())[1:]:
        assert row.same_tokens is True
        assert row.speedup is not None
    assert all(row.figures is not None and row.figures.worst_gap_sec is not None for row in ours)
    assert [row.mbu_percent is not None for row in ours] == [row.case.workload == "uniform" for row in ours]
    (again,), _ = run(replace(plan, output=None, resume=path), "test", log=lambda _: None)
    kept = [row.case for row in again.rows if row.error is None]
    assert kept == [row.case for row in made.rows if row.error is None]
    pytest.importorskip("vl_convert", reason="figures are drawn with it")
    (loaded,), _ = run(Plan(load=(path,), report=tmp_path / "page"), "test", log=lambda _: pytest.fail("it measured"))
    assert results.to_json(results.read(path)) == results.to_json(again) == results.to_json(loaded)
    assert {"serving-gap.svg", "serving-output.svg"} <= {drawn.name for drawn in (tmp_path / "page").iterdir()}


@pytest.mark.usefixtures("quick_ceiling")
def test_a_prefix_cache_that_changes_tokens_is_not_timed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_folder(tmp_path / "bad", replace(TINY, block_size=256), seed=1)
    load = WorkerProcess.load
    monkeypatch.setattr(
        WorkerProcess, "load", lambda self, weights: load(self, bad if self.case.prefix_caching else weights)
    )
    plan = Plan(suite=("serving",), model=str(folder), quick=True)
    wanted = [c for c in SUITES["serving"].cases(str(folder), TINY, ["native"], True) if c.workload == "prefix"]
    monkeypatch.setitem(SUITES, "serving", replace(SUITES["serving"], cases=lambda *_: wanted))
    (made,), _ = run(plan, "test", log=lambda _: None)
    plain, shared = made.rows
    assert (plain.error, shared.figures, shared.same_tokens) == (None, None, False)
    assert str(shared.error).startswith("not timed: token ")
