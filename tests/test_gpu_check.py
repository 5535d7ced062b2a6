"""benchmarks/gpu_check.py with stand-ins for its commands and its clock: parts, time, resuming, targets, exit codes."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nanoinfer.bench import results
from nanoinfer.bench.case import Case
from nanoinfer.bench.results import Results, Row
from nanoinfer.bench.stats import Figures, RunTimes, summarize
from nanoinfer.bench.suites import GPU_LARGE, SUITES
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import slot_tokens
from nanoinfer.models.presets import PRESETS

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # as when it is run as a script: its parts lie beside it

from gpu_targets import GPU_SMALL, best, growth, judge  # noqa: E402

FIGURES = summarize([RunTimes(4, [[0.1, 0.2, 0.3]])])
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
<testcase classname="" name="tests/b.py"><error message="no module flashinfer"/></testcase>
<testcase classname="tests.a" name="test_three"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""
GOOD_JUNIT = '<testsuite><testcase classname="tests.a" name="test_one"/></testsuite>'


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", FOLDER / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# Targets ---------------------------------------------------------------------------------------------------


def row(backend: str, speed: float, model: str = GPU_SMALL, batch: int = 1, **fields: Any) -> Row:
    """A measured row in bfloat16, whose decode and output speeds are the same."""
    figures: Figures = replace(FIGURES, decode_tokens_per_sec=speed, output_tokens_per_sec=speed)
    made = Row(Case(backend, model, "bfloat16", batch=batch, device="cuda:0"), figures)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


SLOT = slot_tokens(ENGINES["triton"].memory, 1024) * 2 * 12 * 768 * 2  # a key and a value in 12 layers, in bfloat16


def everything() -> list[Row]:
    return [
        row("static", 900.0),
        row("cuda_graph", 3000.0, verify_ratio=1.5, peak_memory_bytes=3 << 30),
        row("triton", 4500.0, verify_ratio=1.05, peak_memory_bytes=2 << 30),
        row("transformers-dynamic", 150.0),
        row("triton", 700.0, GPU_LARGE, mbu_percent=64.5, verify_ratio=1.2),
        row("cuda_graph", 500.0, GPU_LARGE, mbu_percent=46.0, verify_ratio=1.0),
        row("static", 20_000.0, batch=512),
        row("triton", 90_000.0, batch=512, peak_memory_bytes=23 << 30),
        row("cuda_graph", 80_000.0, batch=512, peak_memory_bytes=21 << 30),
    ]


def test_targets_by_hand() -> None:
    made = [(t.value, t.met, t.engine) for t in judge(everything())]
    assert made == [
        (64.5, True, "triton"),
        (700.0, True, "triton"),
        (4500.0, True, "triton"),
        (30.0, True, "triton"),
        (4.5, False, "triton"),
        (pytest.approx((21 << 30) / (511 * SLOT)), False, "triton"),  # the row that decodes fastest
        (1.05, True, "triton"),
        (1.2, False, "triton"),
    ]
    wanted = [(t.wanted, t.at_most) for t in judge([])]
    assert wanted == [
        (64.0, False), (690.0, False), (4400.0, False), (15.0, False), (5.0, False), (1.1, True), (1.1, True),
        (1.1, True),
    ]  # fmt: skip


def test_what_was_not_measured_is_unknown_and_not_met() -> None:
    for target in judge([]):
        assert (target.value, target.met, target.engine) == (None, False, None)
    failed = [Row(r.case, error="out of memory") for r in everything()]
    assert all(t.value is None for t in judge(failed))
    without_peer = [r for r in everything() if r.case.backend != "transformers-dynamic"]
    missing = [t.name for t in judge(without_peer) if t.value is None]
    assert missing == ["GPT-2 124M, batch 1, over transformers' generate"]


def test_only_bfloat16_without_quantization_is_judged() -> None:
    rows = [row("triton", 100.0), row("cuda_graph", 90.0)]
    for other in ({"dtype": "float16"}, {"quantization": "int8"}):
        fast = row("cuda_graph", 1e6)
        fast.case = replace(fast.case, **other)
        rows.append(fast)
    chosen = best(rows, GPU_SMALL, 1)
    assert chosen is rows[0]
    assert best([row("static", 1e6)], GPU_SMALL, 1) is None  # the rung before is no target's


def test_memory_is_flat_when_only_the_cache_grows() -> None:
    alone = row("triton", 1.0, peak_memory_bytes=1000 + SLOT)
    many = row("triton", 1.0, batch=512, peak_memory_bytes=1000 + 512 * SLOT)
    assert growth(alone, many) == 1.0
    assert growth(None, many) is None
    many.peak_memory_bytes = None
    assert growth(alone, many) is None


# Parts -----------------------------------------------------------------------------------------------------


def answer(check: ModuleType, code: int | None = 0, out: str = "", err: str = "") -> Any:
    return check.Done(code, out, err)


class Commands:
    """Stands for run_command: answers each kind of command, and moves a clock."""

    def __init__(self, check: ModuleType, rows: list[Row] | None = None) -> None:
        self.check, self.now = check, 0.0
        self.seen: list[list[str]] = []
        self.limits: list[float] = []
        self.junit, self.codes = GOOD_JUNIT, {"pytest": 0, "triton_sampler": 0, "triton_kernels": 0, "bench": 0}
        self.seconds = dict.fromkeys(self.codes, 10.0)
        self.rows = all_rows() if rows is None else rows
        self.resumed: list[dict[str, Any] | None] = []

    def __call__(self, command: Sequence[str], limit_sec: float) -> Any:
        self.seen.append(list(command))
        self.limits.append(limit_sec)
        kind = next(k for k in ("triton_sampler", "triton_kernels", "pytest", "bench") if any(k in c for c in command))
        self.now += min(self.seconds[kind], limit_sec)
        code: int | None = self.codes[kind] if self.seconds[kind] <= limit_sec else None
        if kind == "pytest" and code is not None:
            path = next(c for c in command if c.startswith("--junitxml="))
            Path(path.partition("=")[2]).write_text(self.junit)
        if kind == "bench":
            self._bench(command)
        out = '{"rows": [{"batch": 1, "us": 20.5}]}' if kind in ("triton_sampler", "triton_kernels") else ""
        return answer(self.check, code, out, f"{kind}: the last words\n")

    def _bench(self, command: Sequence[str]) -> None:
        resume = "--resume" in command
        path = Path(command[command.index("--resume" if resume else "--output") + 1])
        self.resumed.append(json.loads(path.read_text()) if resume else None)
        if self.codes["bench"] in (0, 1):
            path.write_text(results.to_json(suite(self.rows)))


def suite(rows: list[Row]) -> Results:
    ceiling = {"read_bytes_per_sec": 3.0e12, "flops_per_sec": {"bfloat16": 7e14}, "source": "copies"}
    return Results("gpu", "static", "2026-01-01", "abc", "nanoinfer bench", {}, {}, ceiling, rows)


def all_rows() -> list[Row]:
    """Every case of the suite, measured; those of the targets with their figures."""
    known = {(r.case.backend, r.case.model, r.case.batch): r for r in everything()}
    made = []
    for case in SUITES["gpu"].cases(GPU_SMALL, PRESETS["gpt2"], [], False):
        plain = case.dtype == "bfloat16" and case.quantization is None
        target = known.get((case.backend, case.model, case.batch)) if plain else None
        made.append(replace(target, case=case) if target is not None else Row(case, FIGURES))
    return made


@pytest.fixture
def here(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Returns what runs a check with stand-ins, on a machine with all modules and both scripts."""
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for script in check.SCRIPTS.values():
        (tmp_path / "benchmarks" / script).touch()

    def run(commands: Commands, document: dict[str, Any] | None = None, **options: Any) -> tuple[int, Any]:
        made = document or blank(check)
        asked = check.Check(
            tmp_path / "gpu.json", run=commands, clock=lambda: commands.now, log=lambda _: None, **options
        )
        code = asked(made)
        assert json.loads((tmp_path / "gpu.json").read_text()) == json.loads(json.dumps(made))
        assert (tmp_path / "gpu.txt").read_text() == check.as_text(made) + "\n"
        return code, made

    return run


def blank(check: ModuleType) -> dict[str, Any]:
    """A document without results, of a machine with a GPU."""
    details = {"driver": "580.1", "cuda": "13.0", "sm_clock_mhz": 1980.0, "max_sm_clock_mhz": 1980.0}
    return {
        "schema": check.SCHEMA, "created": "2026-01-01", "commit": "abc", "earlier_commits": [], "quick": False,
        "machine": {"gpu": "NVIDIA H100", "gpu_details": details}, "versions": {"torch": "2.11.0"},
        "copy_bytes_per_sec": None, "parts": {name: check.new_part() for name in check.PARTS}, "targets": [],
        "bench": None,
    }  # fmt: skip


def test_all_parts_pass(check: ModuleType, here: Callable[..., tuple[int, Any]]) -> None:
    commands = Commands(check)
    code, made = here(commands)
    assert code == 0
    assert {name: part["status"] for name, part in made["parts"].items()} == dict.fromkeys(check.PARTS, "passed")
    assert [part["seconds"] for part in made["parts"].values()] == [10.0] * 4
    assert made["parts"]["sampler"]["data"] == {"rows": [{"batch": 1, "us": 20.5}]}
    assert made["copy_bytes_per_sec"] == 3.0e12
    assert [t["met"] for t in made["targets"]] == [True, True, True, True, False, False, True, False]
    assert commands.limits == [check.LIMITS_SEC[name] for name in check.PARTS]
    text = check.as_text(made)
    assert "NVIDIA H100, driver 580.1" in text
    assert "measured copy bandwidth: 3.00 TB/s, read and written" in text
    line = next(x for x in text.splitlines() if x.startswith("GPT-2 124M, batch 512"))
    assert line.split()[-6:] == [">=", "5", "4.50", "times", "MISSED", "triton"]


def test_a_part_that_fails_is_recorded_and_the_rest_goes_on(
    check: ModuleType, here: Callable[..., tuple[int, Any]]
) -> None:
    commands = Commands(check)
    commands.junit, commands.codes["pytest"], commands.codes["triton_sampler"] = JUNIT, 1, 1
    code, made = here(commands)
    assert code == 1
    tests, sampler = made["parts"]["tests"], made["parts"]["sampler"]
    assert (tests["status"], tests["error"]) == ("failed", "2 tests failed")
    assert {k: v for k, v in tests["data"].items() if isinstance(v, int)} == {
        "passed": 1, "failed": 1, "errors": 1, "skipped": 1,
    }  # fmt: skip
    assert tests["data"]["failures"] == [
        {"test": "tests.a::test_two", "message": "assert 1 == 2 more"},
        {"test": "tests/b.py", "message": "no module flashinfer"},
    ]
    assert tests["data"]["skips"] == [{"test": "tests.a::test_three", "message": "needs two GPUs"}]
    assert (sampler["status"], sampler["error"]) == ("failed", "exit code 1: triton_sampler: the last words")
    assert made["parts"]["bench"]["status"] == "passed"
    assert "tests.a::test_two: assert 1 == 2 more" in check.as_text(made)


def test_resuming_leaves_what_failed_alone_unless_it_is_named(
    check: ModuleType, here: Callable[..., tuple[int, Any]]
) -> None:
    commands = Commands(check)
    commands.codes["triton_sampler"] = 1
    _, made = here(commands)
    before = len(commands.seen)
    code, made = here(commands, made, redo_failed=False)
    assert (code, len(commands.seen)) == (1, before)
    commands.codes["triton_sampler"] = 0
    code, made = here(commands, made, only=("sampler",))
    assert (code, len(commands.seen)) == (0, before + 1)
    assert made["parts"]["sampler"]["status"] == "passed"


def test_no_tests_and_no_script_are_failures(
    check: ModuleType, here: Callable[..., tuple[int, Any]], tmp_path: Path
) -> None:
    commands = Commands(check)
    commands.junit, commands.codes["pytest"] = "<testsuite/>", 5
    (tmp_path / "benchmarks" / "triton_sampler.py").unlink()
    code, made = here(commands, only=("tests", "sampler"))
    assert code == 1
    assert made["parts"]["tests"]["error"] == "no test was run"
    assert made["parts"]["sampler"]["error"] == "benchmarks/triton_sampler.py is not in this checkout"
    assert made["parts"]["bench"]["status"] == "not run"


def test_only_some_parts(check: ModuleType, here: Callable[..., tuple[int, Any]]) -> None:
    commands = Commands(check)
    code, made = here(commands, only=("kernels",))
    assert code == 0
    assert len(commands.seen) == 1
    assert [made["parts"][n]["status"] for n in check.PARTS] == ["not run", "not run", "passed", "not run"]


def test_the_time_is_shared_out_and_resuming_goes_on(check: ModuleType, here: Callable[..., tuple[int, Any]]) -> None:
    commands = Commands(check, rows=all_rows()[:7])
    commands.seconds["pytest"] = 500.0
    code, made = here(commands, minutes=2.0)
    assert code == 1
    assert commands.limits == [115.0]  # 120 s, less what writing takes; nothing is left for the others
    assert made["parts"]["tests"]["status"] == "unfinished"
    assert "stopped after 115 s: pytest: the last words" in made["parts"]["tests"]["error"]
    assert made["parts"]["sampler"]["error"] == "no time was left: continue with --resume"

    commands.seconds["pytest"] = 60.0
    code, made = here(commands, made, minutes=9.0)
    assert code == 1
    assert [made["parts"][n]["status"] for n in check.PARTS] == ["passed", "passed", "passed", "unfinished"]
    bench = made["parts"]["bench"]
    total = len(all_rows())
    assert bench["error"] == f"{total - 7} cases are left: continue with --resume"
    minutes = float(commands.seen[-1][commands.seen[-1].index("--minutes") + 1])
    assert 60 * minutes == pytest.approx(0.75 * commands.limits[-1], abs=1)

    commands.rows = all_rows()
    before = len(commands.seen)
    code, made = here(commands, made, minutes=9.0)
    assert code == 0
    assert len(commands.seen) == before + 1  # what has passed is not run again
    assert commands.resumed[-1] is not None
    assert len(commands.resumed[-1]["rows"]) == 7


def test_rows_with_errors_fail_the_suite_and_keep_its_figures(
    check: ModuleType, here: Callable[..., tuple[int, Any]]
) -> None:
    rows = all_rows()
    broken = next(r for r in rows if r.case.backend == "compiled")
    broken.figures, broken.error = None, "no compiler"
    commands = Commands(check, rows)
    commands.codes["bench"] = 1
    code, made = here(commands, only=("bench",))
    assert code == 1
    part = made["parts"]["bench"]
    assert (part["status"], part["error"]) == ("failed", "1 cases failed")
    assert part["data"]["failed_cases"] == [f"compiled float32 {GPU_SMALL} batch 1: no compiler"]
    assert part["data"]["measured"] == len(rows) - 1
    assert made["targets"][0]["value"] == 64.5


def test_a_suite_that_dies_keeps_what_an_earlier_call_measured(
    check: ModuleType, here: Callable[..., tuple[int, Any]]
) -> None:
    commands = Commands(check, rows=all_rows()[:7])
    _, made = here(commands, only=("bench",))
    commands.codes["bench"] = 2
    code, made = here(commands, made, only=("bench",))
    assert code == 1
    assert made["parts"]["bench"]["error"] == "exit code 2: bench: the last words"
    assert len(made["bench"]["rows"]) == 7


def test_what_is_not_installed_is_one_line(
    check: ModuleType, here: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None if name in ("typer", "rich") else object())
    commands = Commands(check)
    code, made = here(commands, only=("bench", "kernels"))
    assert code == 1
    assert made["parts"]["bench"]["error"] == "typer, rich not installed: pip install typer rich"
    assert made["parts"]["kernels"]["status"] == "passed"


# Commands, files and arguments -----------------------------------------------------------------------------


def test_a_command_is_ended_with_all_that_it_started(check: ModuleType) -> None:
    done = check.run_command([sys.executable, "-c", "print('hello'); raise SystemExit(3)"], 60.0)
    assert (done.code, done.out) == (3, "hello\n")
    start = time.monotonic()
    script = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    done = check.run_command([sys.executable, "-c", script], 1.5)
    assert done.code is None
    assert done.out == "begun\n"
    assert time.monotonic() - start < 30


def test_src_is_importable_in_a_command(check: ModuleType) -> None:
    done = check.run_command([sys.executable, "-c", "import nanoinfer; print(nanoinfer.__file__)"], 60.0)
    assert Path(done.out.strip()).is_relative_to(FOLDER.parent / "src")


@pytest.mark.parametrize(
    "out, status, data",
    [
        ('{"a": 1}', "passed", {"a": 1}),
        ('a table\n{"a": 1}\n', "passed", {"a": 1}),
        ('{\n"a": 1\n}', "passed", {"a": 1}),
        ("[1, 2]", "passed", {"rows": [1, 2]}),
        ("nothing", "failed", {}),
        ("", "failed", {}),
    ],
)
def test_json_of_an_output(
    check: ModuleType, here: Callable[..., tuple[int, Any]], out: str, status: str, data: dict[str, Any]
) -> None:
    part = check.run_script("benchmarks/triton_sampler.py", lambda command, limit_sec: check.Done(0, out, ""), 1.0)
    assert (part["status"], part["data"]) == (status, data)


def run_main(check: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    try:
        code = check.main([*map(str, arguments)])
    except SystemExit as e:
        code = e.code
    return code, capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_one_line_and_exit_code_2(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(check, capsys) == (2, "gpu_check: error: no CUDA device: run it on a machine with one\n")


def test_bad_arguments_and_files(
    check: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for arguments in (["--minutes", "0"], ["--minutes", "nan"], ["--only", "everything"], ["--quic"]):
        code, err = run_main(check, capsys, *arguments)
        assert code == 2
        assert "Traceback" not in err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "new_document", lambda commit, quick: blank(check) | {"commit": commit, "quick": quick})
    asked: list[Any] = []
    monkeypatch.setattr(check.Check, "__call__", lambda self, document: asked.append((self, document)) or 0)
    old = tmp_path / "old.json"
    old.write_text("{")
    code, err = run_main(check, capsys, "--resume", old)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{old} cannot be read as an older run" in err
    old.write_text('{"schema": "else"}')
    code, err = run_main(check, capsys, "--resume", old)
    assert (code, err.count("\n")) == (2, 1)
    assert check.SCHEMA in err
    old.write_text(json.dumps(blank(check)))
    code, err = run_main(check, capsys, "--resume", old, "--quick")
    assert (code, err) == (2, f"gpu_check: error: {old} is of a run without --quick\n")
    assert run_main(check, capsys, "--resume", old)[0] == 0
    assert run_main(check, capsys, "--resume", "--output", tmp_path / "new.json")[0] == 0  # begins
    old.write_text(json.dumps(blank(check) | {"commit": "older", "earlier_commits": ["oldest"]}))
    assert run_main(check, capsys, "--resume", old, "--commit", "new", "--only", "bench", "--minutes", 9)[0] == 0
    asked_for, document = asked[-1]
    assert (asked_for.only, asked_for.minutes, asked_for.redo_failed) == (("bench",), 9.0, True)
    assert (document["commit"], document["earlier_commits"]) == ("new", ["oldest", "older"])
    assert asked[0][0].redo_failed is False


def test_a_new_document_says_what_it_was_made_with(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.bench import machine

    monkeypatch.setattr(machine, "describe_machine", lambda device: {"gpu": str(device), "gpu_details": None})
    made = check.new_document("1234", quick=True)
    assert (made["commit"], made["quick"], made["machine"]["gpu"]) == ("1234", True, "cuda:0")
    assert made["versions"]["torch"] is not None
    assert set(made["parts"]) == set(check.PARTS)
    assert check.as_text(made).count("not run") == len(check.PARTS)
