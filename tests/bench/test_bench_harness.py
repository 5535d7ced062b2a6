"""The harness on a tiny model: real worker processes, checked tokens, failures as rows, resume, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.models import make_folder, one_thread, refuses
from nanoinfer.bench import results
from nanoinfer.bench.backends import open_backend
from nanoinfer.bench.case import Case, Row
from nanoinfer.bench.results import BEST_PEER
from nanoinfer.bench.run import Plan, run
from nanoinfer.bench.suites import SUITES
from nanoinfer.bench.worker import WorkerProcess
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError
from nanoinfer.models.presets import PRESETS
from nanoinfer.utils.progress import ProgressBar

pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
pytestmark = pytest.mark.usefixtures("quick_ceiling")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def quiet(_: str) -> None:
    pass


def bench(*arguments: object) -> list[str]:
    """The command, with a ceiling that is measured in milliseconds."""
    code = (
        "from nanoinfer.cli import main; from nanoinfer.roofline import ceilings;"
        "ceilings.CPU_WORKLOAD = ceilings.Workload(num_bytes=1 << 22, matrix_size=64, num_rounds=1); main()"
    )
    return [sys.executable, "-c", code, "bench", *map(str, arguments)]


@pytest.mark.nightly
def test_peak_memory_is_the_workers_own(tiny_folder: Path) -> None:
    ballast = bytearray(os.urandom(1 << 20)) * 1500  # resident here when the worker is started
    with WorkerProcess(Case("native", "m", output_tokens=4, prompt_tokens=4)) as worker:
        worker.load(tiny_folder)
        assert (worker.run().peak_memory_bytes or 0) < len(ballast)


@pytest.mark.slow
def test_a_run_checks_times_and_compares(tiny_folder: Path, tmp_path: Path) -> None:
    plan = Plan(
        model=str(tiny_folder), engine=("native", "static"), batch=(2,), prompt_tokens=(8,),
        output_tokens=(6,), rounds=2, output=tmp_path / "r.json",
    )  # fmt: skip
    (made,), interrupted = run(plan, "test", log=quiet)
    assert not interrupted
    assert [r.case.backend for r in made.rows] == ["native", "static"]
    for row in made.rows:
        assert row.error is None
        assert row.same_tokens is True
        assert row.figures is not None
        assert row.figures.rounds == 2
        assert row.figures.decode_tokens_per_sec is not None
        # Two rounds: the mean of rates is at least the rate of the mean time.
        assert row.figures.output_tokens_per_sec >= 0.999 * 12 / row.figures.total_sec
        assert row.peak_memory_bytes is not None
        assert 30 << 20 < row.peak_memory_bytes < 1 << 30  # the worker's own, not this process's
        assert row.mbu_percent is not None
    assert made.rows[0].speedup == 1.0
    assert results.to_json(results.read(tmp_path / "r.json")) == results.to_json(made)


def test_what_cannot_run_is_a_row_and_the_rest_goes_on(tiny_folder: Path) -> None:
    plan = Plan(
        model=str(tiny_folder),
        engine=("native",),
        dtype=("float32",),
        quantization=("int3",),
        output_tokens=(4,),
        rounds=1,
    )
    (made,), _ = run(plan, "test", log=quiet)
    assert made.rows[0].error is None
    assert "quantization='int3' is unknown: use int8 or int4" in str(made.rows[1].error)
    assert made.failed == [made.rows[1]]


@pytest.mark.nightly
def test_a_backend_that_says_other_words_is_not_timed(tmp_path: Path) -> None:
    """Workers get folders of different weights: the second disagrees with the reference."""
    from nanoinfer.bench.harness import Harness
    from nanoinfer.bench.suites import Options
    from nanoinfer.roofline.ceilings import Ceiling

    good, bad = make_folder(tmp_path / "good", seed=0), make_folder(tmp_path / "bad", seed=1)
    cases = [
        Case("static", "m", output_tokens=5, prompt_tokens=4),
        Case("dynamic", "m", output_tokens=5, prompt_tokens=4),
    ]
    ceiling = Ceiling("here", 1e10, {"float32": 1e11}, "a test")
    from helpers.models import TINY

    rows: list[Row] = []
    harness = Harness(good, TINY, ceiling, Options(rounds=1), ProgressBar("bench", False))
    original = WorkerProcess.load
    try:
        WorkerProcess.load = lambda self, weights: original(self, bad if self.case.backend == "dynamic" else weights)  # type: ignore[method-assign]
        harness.run(cases, lambda some: rows.__setitem__(slice(None), some))
    finally:
        WorkerProcess.load = original  # type: ignore[method-assign]
    assert rows[0].same_tokens is True
    assert rows[0].figures is not None
    assert rows[1].same_tokens is False
    assert rows[1].figures is None
    assert "not timed: token " in str(rows[1].error)


def test_a_dead_process_is_a_row_with_its_epitaph(tiny_folder: Path) -> None:
    case = Case("native", "m", output_tokens=4, prompt_tokens=4)
    with WorkerProcess(case) as worker:
        worker.load(tiny_folder)
        assert len(worker.run().tokens[0]) == 4
        os.kill(worker._process.pid, signal.SIGKILL)
        refuses(worker.run, "its process was killed: most likely out of memory")


def test_a_worker_that_computes_ends_with_the_process_that_started_it(tiny_folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nanoinfer.bench.case import Case;"
        "from nanoinfer.bench.worker import WorkerProcess;"
        "worker = WorkerProcess(Case('native', 'm', output_tokens=1 << 20, prompt_tokens=4));"
        "worker.load(Path(sys.argv[1])); print(worker._process.pid, flush=True); worker.run()"
    )
    command = [sys.executable, "-c", script, str(tiny_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=one_thread(), text=True) as harness:
        assert harness.stdout is not None
        worker = int(harness.stdout.readline())
        time.sleep(0.5)  # it computes
        assert is_running(worker)
        harness.kill()
    deadline = time.monotonic() + 20
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def written_figures(made: results.Results) -> list[object]:
    """Return the figures of each row as the file holds them: rounded."""
    return [row["figures"] for row in json.loads(results.to_json(made))["rows"]]


@pytest.mark.slow
def test_resume_keeps_what_is_done(tiny_folder: Path, tmp_path: Path) -> None:
    plan = Plan(model=str(tiny_folder), engine=("native",), output_tokens=(4,), rounds=1, output=tmp_path / "r.json")
    (first,), _ = run(plan, "test", log=quiet)
    again = replace(plan, engine=("native", "static"), output=None, resume=tmp_path / "r.json")
    (second,), _ = run(again, "test", log=quiet)
    assert written_figures(second)[:1] == written_figures(first)
    assert [r.case.backend for r in second.rows] == ["native", "static"]
    assert results.to_json(results.read(tmp_path / "r.json")) == results.to_json(second)
    (third,), _ = run(again, "test", log=quiet)
    assert written_figures(third) == written_figures(second)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tiny_folder: Path, tmp_path: Path) -> None:
    flags = [f for n in range(1, 40) for f in ("--batch", n)]
    out = tmp_path / "r.json"
    child = subprocess.Popen(
        bench("-m", tiny_folder, "--engine", "native", "--output-tokens", 4, *flags, "-o", out),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=one_thread(), text=True,
    )  # fmt: skip
    for _ in range(600):
        if out.exists() and results.read(out).rows:
            break
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    table, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "native float32" in table
    assert "Traceback" not in errors
    assert 1 <= len(results.read(out).rows) < 39


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"engine": ("warp",)}, "engine='warp' is unknown: use one of recompute"),
        ({"baseline": "warp"}, "engine='warp'"),
        ({"batch": (0,)}, "batch=0 is not an integer"),
        ({"prompt_tokens": (33,)}, "prompt_tokens=33 is more than the context length"),
        ({"dtype": ("float8",)}, "dtype='float8'"),
        ({"sampler": ("dice",)}, "sampler='dice'"),
        ({"device": "cuda:77"}, "device='cuda:77'"),
        ({"model": "random:gpt9"}, "gpt9"),
        ({"resume": Path("no.json")}, "no.json cannot be read"),
        ({"output": Path("/proc/x/r.json")}, "cannot be written"),
        ({"report": Path("/proc/x")}, "cannot be written"),
    ],
)
def test_bad_plans_say_why_before_anything_is_measured(
    tiny_folder: Path, changes: dict[str, object], words: str
) -> None:
    plan = replace(Plan(model=str(tiny_folder)), **changes)  # type: ignore[arg-type]
    refuses(lambda: run(plan, "test", log=lambda _: pytest.fail("it began to measure")), words)


def test_plans_that_contradict_themselves() -> None:
    refuses(lambda: Plan(suite=("marathon",)), "suite='marathon' is unknown: use one of ladder")
    refuses(lambda: Plan(suite=("ladder",), batch=(1,)), "--suite fixes its own cases")
    refuses(lambda: Plan(suite=("ladder", "peers"), output=Path("x")), "hold one suite, and 2 are given")
    refuses(lambda: Plan(rounds=0), "rounds=0")


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("quick", [True, False])
def test_every_suite_is_well_formed(name: str, quick: bool) -> None:
    config = PRESETS["gpt2"]
    cases = SUITES[name].cases("random:gpt2", config, list(ENGINES), quick)
    assert len(set(cases)) == len(cases)
    assert SUITES[name].baseline in {c.backend for c in cases} | {BEST_PEER}
    for case in cases:
        assert case.prompt_tokens <= config.block_size
    shapes = [c.shape for c in cases]
    if SUITES[name].options.together:
        assert len({s for s, t in pairwise(shapes) if s != t}) == len(set(shapes)) - 1


def test_a_missing_peer_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NanoinferError, match=r"llama_cpp cannot be imported \(.*\): pip install llama-cpp-python"):
        open_backend(Case("llama.cpp", "m"), tiny_folder)


@pytest.mark.slow
def test_the_command_prints_tables_json_and_exit_codes(tiny_folder: Path) -> None:
    flags = ("-m", tiny_folder, "--engine", "native", "--output-tokens", 4, "--rounds", 1)
    done = subprocess.run(bench(*flags), capture_output=True, text=True, env=one_thread(), check=True)
    assert "ceiling of this machine" in done.stdout
    assert "native float32" in done.stdout
    arguments = bench(*flags, "--quantization", "int3", "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, env=one_thread(), check=False)
    assert done.returncode == 1
    (document,) = json.loads(done.stdout)
    assert document["schema"] == "nanoinfer-bench/2"
    assert ["error" not in r for r in document["rows"]] == [True, False]


@pytest.mark.slow
def test_results_are_shown_and_reported_without_measuring(tiny_folder: Path, tmp_path: Path) -> None:
    plan = Plan(model=str(tiny_folder), engine=("native",), output_tokens=(4,), rounds=1, output=tmp_path / "r.json")
    (made,), _ = run(plan, "test", log=quiet)
    again = Plan(load=(tmp_path / "r.json", tmp_path / "r.json"), report=tmp_path / "page")
    loaded, interrupted = run(again, "test", log=lambda _: pytest.fail("it measured"))
    assert ([results.to_json(each) for each in loaded], interrupted) == ([results.to_json(made)] * 2, False)
    names = [path.name for path in sorted((tmp_path / "page").iterdir())]
    assert names == ["custom-ttft-2.svg", "custom-ttft.svg"]


def test_results_that_cannot_be_written_are_refused_before_measuring(tiny_folder: Path, tmp_path: Path) -> None:
    def say(text: str) -> None:
        raise AssertionError(text)

    (tmp_path / "file").write_text("x")
    inside, long = tmp_path / "file" / "r.json", tmp_path / ("x" * 255)
    for path in (tmp_path, Path("/dev/null"), inside, long):
        plan = Plan(model=str(tiny_folder), engine=("static",), output=path)
        refuses(lambda p=plan: run(p, "test", log=say), str(path), "cannot be written")  # type: ignore[misc]
    plan = Plan(model=str(tiny_folder), engine=("static",), report=inside)
    refuses(lambda: run(plan, "test", log=say), str(inside), "cannot be written")


@pytest.mark.parametrize("fitting, sizes", [(8, [8]), (5, [4, 4]), (4, [4, 4]), (3, [1, 3, 3, 1]), (2, [2, 2, 2, 2])])
def test_backends_in_as_many_bits_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitting: int, sizes: list[int]
) -> None:
    from helpers.models import TINY
    from nanoinfer.bench import harness
    from nanoinfer.bench.suites import Options
    from nanoinfer.roofline.ceilings import Ceiling

    ceiling = Ceiling("here", 1e10, {"float32": 1e11}, "a test")
    made = harness.Harness(tmp_path, TINY, ceiling, Options(), ProgressBar("bench", False))
    formats = [("float32", None)] + [("bfloat16", None)] * 3 + [("float32", "int8")] * 3 + [("float32", "int4")]
    cases = [Case(f"peer{i}", "m", dtype, q) for i, (dtype, q) in enumerate(formats)]
    need = made._memory_bytes(cases[0])
    monkeypatch.setattr(harness, "free_memory", lambda device: fitting * need * 3 // 2 + 2)
    parts = made._parts(cases)
    assert [case for part in parts for case in part] == cases
    assert [len(part) for part in parts] == sizes
