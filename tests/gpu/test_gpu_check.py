"""benchmarks/gpu_check.py and its parts: rows as they come, tests that hang or crash, time, targets, exit codes.

test_gpu_procedure.py runs the commands of docs/gpu-first-run.md.
"""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.environment import ROOT
from nanoinfer.bench import results
from nanoinfer.bench.case import Case, Row, RunTimes, summarize
from nanoinfer.bench.results import Results
from nanoinfer.bench.suites import GPU_LARGE
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import slot_tokens

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))  # as when it is run as a script: its parts lie beside it

import gpu_check  # noqa: E402
from gpu_rows import Rows, run_command, run_until_done  # noqa: E402
from gpu_targets import GPU_SMALL, judge  # noqa: E402

FIGURES = summarize([RunTimes(4, [[0.1, 0.2, 0.3]])])
SLOT = slot_tokens(ENGINES["triton"].memory, 1024) * 2 * 12 * 768 * 2  # a key and a value in 12 layers, in bfloat16


# Targets ---------------------------------------------------------------------------------------------------


def row(backend: str, speed: float, model: str = GPU_SMALL, batch: int = 1, **fields: Any) -> Row:
    """A measured row in bfloat16, whose decode and output speeds are the same."""
    figures = replace(FIGURES, decode_tokens_per_sec=speed, output_tokens_per_sec=speed)
    case = Case(backend, model, "bfloat16", fields.pop("quantization", None), batch=batch, device="cuda:0")
    return Row(case, figures, **fields)


ROWS = [
    row("cuda_graph", 3000.0, verify_ratio=1.5, peak_memory_bytes=3 << 30),
    row("triton", 4500.0, mbu_percent=40.0, verify_ratio=1.05, peak_memory_bytes=2 << 30),
    row("transformers-dynamic", 150.0),
    row("triton", 700.0, GPU_LARGE, mbu_percent=64.5, verify_ratio=1.2),
    row("cuda_graph", 500.0, GPU_LARGE, mbu_percent=46.0, verify_ratio=1.0),
    row("triton", 1000.0, GPU_LARGE, quantization="int8"),
    row("triton", 1300.0, GPU_LARGE, quantization="int4"),
    row("static", 20_000.0, batch=512),
    row("triton", 90_000.0, batch=512, peak_memory_bytes=23 << 30),
    row("cuda_graph", 80_000.0, batch=512, peak_memory_bytes=21 << 30),
]


def test_targets_by_hand() -> None:
    made = judge(ROWS)
    growth = pytest.approx((21 << 30) / (511 * SLOT))  # of the row that decodes fastest
    assert [t.value for t in made] == [64.5, 64.5, 40.0, 40.0, 1.05, 1.2, 30.0, 4.5, 1.3, growth]
    assert [t.wanted for t in made[:4]] == [64.0, 78.0, 33.0, 46.0]  # % of the bandwidth of the same run
    assert [t.met for t in made] == [True, False, True, False, True, False, True, False, True, False]
    assert {t.row.case.backend for t in made if t.row is not None} == {"triton"}
    assert str(made[7]).split()[-6:] == ["times", "4.50", "MISSED", "(triton,", "90,000", "tokens/s)"]
    for target in judge([Row(r.case, error="out of memory") for r in ROWS]):
        assert (target.value, target.met) == (None, False)
        assert str(target).endswith("unknown")


# Rows ------------------------------------------------------------------------------------------------------


CASES = """
import os
from pathlib import Path
from gpu_rows import measure, parser

def case(name):
    with open("log", "a") as log:
        log.write(name)
    if name == "b":
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    if name == "c":
        os._exit(7)
    return {"usec": 1.0}

measure({name: lambda name=name: case(name) for name in "abcd"}, parser("", "part").parse_args())
"""


@pytest.mark.slow
def test_a_command_is_ended_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_rows.INTERRUPT_SEC", 0.3)
    start = time.monotonic()
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    assert run_command([sys.executable, "-c", script], start + 1.5)[0] is None
    assert time.monotonic() - start < 30
    assert run_command([sys.executable, "-c", script], start) == (None, "")  # it is not begun
    assert run_command([sys.executable, "-c", "print('a\\nb'); exit(3)"], math.inf) == (3, "b")
    rows = Rows(tmp_path / "rows.jsonl", "part")  # a command that writes nothing is not run for ever
    assert run_until_done([sys.executable, "-c", "exit('no driver')"], rows, math.inf) == "exit code 1: no driver"


# Tests -----------------------------------------------------------------------------------------------------

TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_hangs(): time.sleep(60)
def test_ends_the_process(): print("\\nit says so", flush=True), os._exit(7)
def test_breaks_the_context(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
@pytest.mark.skip(reason="needs two GPUs")
def test_skips(): pass
def test_last(): pass
"""


def check(tmp_path: Path, *arguments: object) -> tuple[int, str]:
    """Run the check; return its exit code and its summary."""
    code = gpu_check.main([*map(str, ("--output", tmp_path / "out", "--limit", 3, "--jobs", 2, *arguments))])
    return code, (tmp_path / "out" / "summary.txt").read_text()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check finds a CUDA device, and its tests in tmp_path."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check.machine, "describe_machine", lambda device: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(gpu_check, "free_memory", lambda device: 140 * 10**9)
    monkeypatch.setattr(gpu_check, "START", time.monotonic())
    monkeypatch.setattr(gpu_check, "TESTS", tmp_path)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.nightly
def test_a_test_that_hangs_or_crashes_is_a_row_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test_two.py").write_text("import no_such_module  # pytest.mark.gpu")
    (tmp_path / "test_three.py").write_text("raise OSError('no such file')  # pytest.mark.gpu")
    (tmp_path / "test_other.py").write_text("raise SystemExit('not asked for')")
    code, summary = check(tmp_path, "--only", "tests")
    assert code == 1
    rows = Rows(tmp_path / "out" / "rows.jsonl", "tests")
    found = {case.split("::")[-1].split("/")[-1]: r for case, r in rows.results().items()}
    assert {name: r.get("error") for name, r in found.items()} == {
        "test_passes": None, "test_fails": "AssertionError: one is not two",
        "test_hangs": "it ended its process, exit code 1: Timeout (0:00:03)!",
        "test_ends_the_process": "it ended its process, exit code 7: it says so",
        "test_breaks_the_context": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "test_skips": None, "test_last": None, "test_two.py": None, "test_three.py": "OSError: no such file",
    }  # fmt: skip
    assert "tests        2 passed    5 failed    2 skipped\n" in summary
    assert "    1 skipped: Skipped: needs two GPUs\n" in summary
    assert "    1 skipped: ModuleNotFoundError: No module named 'no_such_module'\n" in summary

    (tmp_path / "test_one.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_fails(): pass")
    again = "--only", "tests", "--continue", tmp_path / "out"
    assert "2 passed    5 failed" in check(tmp_path, *again)[1]  # nothing runs again
    (tmp_path / "test_three.py").unlink()
    code, summary = check(tmp_path, *again, "--retry")
    assert code == 0
    assert "tests        3 passed    0 failed    2 skipped\n" in summary


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.slow
def test_what_was_cut_off_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("import pytest, time\n@pytest.mark.gpu\ndef test_one(): time.sleep(50)")
    monkeypatch.setattr(gpu_check, "RESERVE_SEC", 1.0)
    code, summary = check(tmp_path, "--only", "tests", "--minutes", 0.15, "--limit", 60)
    assert code == 1
    assert "skipped: test_one.py: its time is over\n" in summary
    file.write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): pass")
    assert check(tmp_path, "--only", "tests", "--continue", tmp_path / "out")[0] == 0


@pytest.mark.nightly
def test_the_tests_of_a_gpu_are_collected_where_only_torch_and_triton_are_installed() -> None:
    absent = ["vl_convert", "nanoinfer._native", "rich", "click", "jinja2", "tokenizers", "transformers"]
    script = (
        f"import sys, pytest; sys.modules.update(dict.fromkeys({absent}));"
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-qq', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    names = ("bench_gpu", "triton_kernels", "static_shapes", "overlap", "triton_step", "triton_sampler", "profile")
    files = [file for name in names for file in (ROOT / "tests").rglob(f"test_{name}.py")]
    done = subprocess.run([sys.executable, "-c", script, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert set(re.findall(r"test_(\w+)\.py: ", done.stdout)) == set(names)


# The check -------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands for the commands of all parts but `tests`; returns those that were run."""
    seen: list[list[str]] = []

    def run(command: Sequence[str], deadline: float) -> tuple[int | None, str]:
        seen.append(list(command))
        if command[1] == "-c":
            path, first = tmp_path / "out" / "bench.json", not (tmp_path / "earlier").exists()
            ceiling = {"read_bytes_per_sec": 3.0e12, "flops_per_sec": {"bfloat16": 7e14}, "source": "copies"}
            rows = {replace(r.case, device="cpu"): r for r in ROWS}
            for i, case in enumerate(gpu_check.cases_of("quick") + gpu_check.cases_of("full")):
                rows.setdefault(case, Row(replace(case, device="cuda:0"), FIGURES, unfinished=first and i in (19, 63)))
            made = Results("gpu", "static", "2026-01-01", "abc", "", {}, {}, ceiling, list(rows.values()))
            path.write_text(results.to_json(made))
        else:
            by, path = (command[command.index(option) + 1] for option in ("--by", "--output"))
            Rows(Path(path), by).append(case="one", usec=3.0, predicted_usec=2.0)
            Rows(Path(path), by).append(done=True)
        return 0, "done"

    monkeypatch.setattr("gpu_rows.run_command", run)
    monkeypatch.setattr(gpu_check, "run_command", run)
    return seen


@pytest.mark.slow
def test_all_parts_are_continued_and_the_goals_are_judged(commands: list[list[str]], tmp_path: Path) -> None:
    parts = [option for part in gpu_check.PARTS if part != "tests" for option in ("--only", part)]
    code, summary = check(tmp_path, "--commit", "1234", *parts, "--minutes", 9, "--models", tmp_path / "m")
    assert code == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["bench.json", "rows.jsonl", "summary.txt"]
    assert summary.startswith("NVIDIA H200, commit 1234, ")
    assert "quick       19 passed    0 failed    0 skipped: 1 cases are left\n" in summary
    assert "full        43 passed    0 failed    0 skipped: 1 cases are left\n" in summary
    assert "steps        1 passed" in summary
    assert " 2.0 us predicted       3.0 us measured, 1.50 times\n" in summary
    assert "GPT-2 124M, batch 1, over transformers' generate" in summary
    kernels, sampler = "benchmarks/triton_kernels.py", "benchmarks/triton_sampler.py"
    assert [command[1] for command in commands] == [kernels, "-c", sampler, "-c", kernels, kernels]
    quick, full = (command[2] for command in commands if command[1] == "-c")
    assert "quick=True, retry=False, output=Path(" in quick
    assert f"models=Path('{tmp_path / 'm'}'), minutes=8." in quick
    assert "quick=False, retry=False, resume=Path(" in full

    commands.clear()
    earlier = (tmp_path / "out").rename(tmp_path / "earlier")
    code, summary = check(tmp_path, "--continue", earlier, *parts)
    assert code == 0, summary
    assert "quick=True, retry=False, resume=Path(" in commands[0][2]
    assert len(commands) == 1  # what is done is not run


def test_what_is_missing_is_said_first(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    absent = ("pytest", "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    code, summary = check(tmp_path, "--only", "tests", "--only", "steps")
    assert code == 1
    said = capsys.readouterr().out
    assert said.startswith(f"NVIDIA H200, commit {gpu_check.machine.commit()}, python {sys.version.split()[0]}")
    assert f"torch {torch.__version__.split('+')[0]}" in said
    assert "compiler None; free: 140 GB of the GPU's memory, 140 GB of the main memory" in said
    assert "missing: a C compiler: without it Triton's kernels fail\nmissing: triton: skipped: parts steps," in said
    assert "missing: pytest: skipped: part tests\n" in said
    assert "tests        0 passed    0 failed    0 skipped: pytest is not installed\n" in summary
    assert commands == []


def test_a_part_that_fails_is_in_the_summary(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "run_command", lambda command, deadline: (None, ""))
    code, summary = check(tmp_path, "--only", "quick", "--only", "sampler")
    assert code == 1
    assert "quick        0 passed    0 failed    0 skipped: 20 cases are left\n" in summary
    assert "sampler      1 passed" in summary


def test_bad_arguments_and_no_device_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--minutes", "0"], ["--minutes", "nan"], ["--only", "everything"], ["--quic"], ["--jobs", "0"]):
        with pytest.raises(SystemExit) as e:
            gpu_check.main(arguments)
        assert e.value.code == 2
    capsys.readouterr()
    if not torch.cuda.is_available():
        assert gpu_check.main(["--output", str(tmp_path)]) == 2
        assert capsys.readouterr().err == "gpu_check: error: no CUDA device: run it on a machine with one\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for folder, continued in ((tmp_path / "out", "typo"), (tmp_path / "full", None), (tmp_path / "full", "older")):
        for name in ("full", "older"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "rows.jsonl").write_text("")
        earlier = ["--continue", str(tmp_path / continued)] if continued else []
        assert gpu_check.main(["--output", str(folder), *earlier]) == 2
        said = capsys.readouterr().err
        assert ("neither rows.jsonl nor bench.json" if continued == "typo" else f"--continue {folder}") in said


def test_what_ended_before_its_first_result_can_be_continued(tmp_path: Path) -> None:
    for name, options in (("first", []), ("second", ["--continue", str(tmp_path / "first")])):
        args = gpu_check.parse(["--output", str(tmp_path / name), *options])
        gpu_check.begin(args)
        assert [file.name for file in args.output.iterdir()] == ["rows.jsonl"]


def test_results_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.parse([]).output == tmp_path
    assert gpu_check.parse(["--output", "/there"]).output == Path("/there")
    monkeypatch.delenv("OUT")
    assert gpu_check.parse([]).output == FOLDER.parent / "docs" / "results" / "gpu"
