"""benchmarks/gpu_check.py and its parts: rows as they come, tests that hang or crash, resuming, targets, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer.bench import results
from nanoinfer.bench.case import Case
from nanoinfer.bench.results import Results, Row
from nanoinfer.bench.stats import RunTimes, summarize
from nanoinfer.bench.suites import GPU_LARGE, SUITES
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import slot_tokens
from nanoinfer.models.presets import PRESETS

FOLDER = Path(__file__).parents[1] / "benchmarks"
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
    row("triton", 4500.0, verify_ratio=1.05, peak_memory_bytes=2 << 30),
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
    assert [t.value for t in made] == [64.5, 700.0, 4500.0, 1.05, 1.2, 30.0, 4.5, 1.3, growth]
    assert [t.met for t in made] == [True, True, True, True, False, True, False, True, False]
    assert {t.row.case.backend for t in made if t.row is not None} == {"triton"}
    assert str(made[6]).split()[-5:] == ["5", "times", "4.50", "MISSED", "(triton)"]
    for target in judge([Row(r.case, error="out of memory") for r in ROWS]):
        assert (target.value, target.met) == (None, False)
        assert str(target).endswith("unknown")


# Rows ------------------------------------------------------------------------------------------------------


def test_a_case_that_never_finished_is_started_twice(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "kernels")
    for name, found in (("good", {"usec": 1.5}), ("bad", {"error": "wrong"}), ("once", None), ("hangs", None)):
        rows.append(case=name, started=True)
        rows.append(case=name, **(found or {"started": True}))
    rows.path.write_text(rows.path.read_text().replace('{"by": "kernels", "case": "once", "started": true}\n', "", 1))
    with rows.path.open("a") as file:
        file.write('{"by": "kernels", "case": "cut o')
    assert rows.left(["good", "bad", "once", "hangs", "new"]) == {"once", "new"}
    errors = {case: found.get("error") for case, found in rows.results().items()}
    lost = "it was started and did not finish"
    assert errors == {"good": None, "bad": "wrong", "once": lost, "hangs": lost}
    rows.forget_failures()
    assert rows.left(["good", "bad", "hangs"]) == {"bad", "hangs"}


@pytest.mark.slow
def test_a_command_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    start = time.monotonic()
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    code, _ = run_command([sys.executable, "-c", script], start + 1.5)
    assert code is None
    assert time.monotonic() - start < 30
    assert run_command([sys.executable, "-c", "print('a\\nb'); exit(3)"], start + 60) == (3, "b")
    rows = Rows(tmp_path / "rows.jsonl", "part")  # a command that writes nothing is not run for ever
    assert run_until_done([sys.executable, "-c", "exit('no driver')"], rows, start + 60) == "exit code 1: no driver"


# Tests -----------------------------------------------------------------------------------------------------

TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_hangs(): time.sleep(60)
def test_ends_the_process(): os._exit(7)
def test_breaks_the_context(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
@pytest.mark.skip(reason="needs two GPUs")
def test_skips(): pass
def test_last(): pass
"""


def check(tmp_path: Path, *arguments: object) -> tuple[int, str]:
    """Run the check with the tests of tmp_path; return its exit code and its summary."""
    options = ["--output", tmp_path / "out", "--tests", tmp_path, "--limit", 3, "--jobs", 2]
    code = gpu_check.main([*map(str, (*options, *arguments))])
    return code, (tmp_path / "out" / "summary.txt").read_text()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check.machine, "describe_machine", lambda device: {"gpu": "NVIDIA H100"})


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.slow
def test_a_test_that_hangs_or_crashes_is_a_row_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text("import no_such_module  # GPU")
    (tmp_path / "test_other.py").write_text("raise SystemExit('not asked for')")
    code, summary = check(tmp_path, "--only", "tests")
    assert code == 1
    found = {case.split("::")[-1]: r for case, r in Rows(tmp_path / "out" / "tests.jsonl", "").results().items()}
    errors = {name: r.get("error") for name, r in found.items()}
    lost = "it was started and did not finish"
    assert errors.pop(next(name for name in errors if name.endswith("test_two.py"))).startswith("ModuleNotFoundError")
    assert errors == {
        "test_passes": None, "test_fails": "AssertionError: one is not two", "test_hangs": lost,
        "test_ends_the_process": lost, "test_skips": None, "test_last": None,
        "test_breaks_the_context": "RuntimeError: CUDA error: an illegal memory access was encountered",
    }  # fmt: skip
    assert found["test_skips"]["skipped"] == "Skipped: needs two GPUs"
    assert "tests        2 passed    5 failed    1 skipped\n" in summary

    (tmp_path / "test_one.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_fails(): pass")
    assert "2 passed    5 failed" in check(tmp_path, "--only", "tests", "--resume")[1]  # nothing runs again
    (tmp_path / "test_two.py").unlink()
    code, summary = check(tmp_path, "--only", "tests", "--resume", "--retry")
    assert code == 0
    assert "tests        3 passed    0 failed    1 skipped\n" in summary


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.slow
def test_what_was_cut_off_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("import pytest, time\n@pytest.mark.gpu\ndef test_one(): time.sleep(50)")
    code, summary = check(tmp_path, "--only", "tests", "--minutes", 0.15, "--limit", 60)
    assert code == 1
    assert "skipped: test_one.py: its time is over: continue with --resume\n" in summary
    file.write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): pass")
    assert check(tmp_path, "--only", "tests", "--resume")[0] == 0


@pytest.mark.slow
def test_the_tests_of_a_gpu_are_collected_where_only_torch_and_triton_are_installed() -> None:
    script = (
        "import sys, pytest; sys.modules.update(dict.fromkeys(['vl_convert', 'nanoinfer._native', 'flashinfer']));"
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-qq', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    files = [FOLDER.parent / "tests" / f"test_{name}.py" for name in ("bench_gpu", "bench_report", "triton_kernels")]
    done = subprocess.run([sys.executable, "-c", script, *files], cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_bench_gpu.py: " in done.stdout


# The check -------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands for the commands of all parts but `tests`; returns those that were run."""
    seen: list[list[str]] = []

    def run(command: Sequence[str], deadline: float) -> tuple[int | None, str]:
        seen.append(list(command))
        path = Path(command[1 + max(command.index(f) for f in ("--output", "--resume") if f in command)])
        if "bench" in command:
            ceiling = {"read_bytes_per_sec": 3.0e12, "flops_per_sec": {"bfloat16": 7e14}, "source": "copies"}
            cases = SUITES["gpu"].cases(GPU_SMALL, PRESETS["gpt2"], [], "--quick" in command)
            rows = ROWS + [Row(replace(case, device="cuda:0"), FIGURES) for case in cases["--quick" in command :]]
            made = Results("gpu", "static", "2026-01-01", "abc", "nanoinfer bench", {}, {}, ceiling, rows)
            path.write_text(results.to_json(made))
            return 0, "done"
        path = Path(command[command.index("--output") + 1])
        Rows(path, path.stem).append(case="one", usec=1.0)
        Rows(path, path.stem).append(done=path.stem)
        return 0, "done"

    monkeypatch.setattr("gpu_rows.run_command", run)
    monkeypatch.setattr(gpu_check, "run_command", run)
    return seen


def test_all_parts_write_their_files_and_the_goals_are_judged(commands: list[list[str]], tmp_path: Path) -> None:
    code, summary = check(tmp_path, "--commit", "1234", "--quick", "--minutes", 9, "--models", tmp_path / "m")
    assert code == 1  # no test was run
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        ["bench.json", "kernels.jsonl", "sampler.jsonl", "summary.txt"]
    )
    assert "NVIDIA H100, commit 1234" in summary
    assert "skipped: 1 cases are left: continue with --resume\n" in summary
    assert "GPT-2 124M, batch 1, over transformers' generate" in summary
    bench, kernels, sampler = commands
    assert bench[bench.index("--suite") :][:3] == ["--suite", "gpu", "--quick"]
    assert bench[bench.index("--models") + 1] == str(tmp_path / "m")
    assert 6.0 < float(bench[bench.index("--minutes") + 1]) <= 6.75  # backends are loaded for 3/4 of the time
    assert [kernels[1], sampler[1]] == ["benchmarks/triton_kernels.py", "benchmarks/triton_sampler.py"]

    commands.clear()
    code, summary = check(tmp_path, "--resume", "--only", "bench", "--only", "kernels", "--only", "sampler")
    assert code == 0, summary
    assert "kernels      1 passed    0 failed" in summary
    assert [c[c.index("--resume") + 1] for c in commands] == [str(tmp_path / "out" / "bench.json")]


def test_a_part_that_fails_is_in_the_summary(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "run_command", lambda command, deadline: (None, ""))
    code, summary = check(tmp_path, "--only", "bench", "--only", "sampler")
    assert code == 1
    assert "bench        0 passed    0 failed    0 skipped: 64 cases are left: continue with --resume\n" in summary
    assert "sampler      1 passed" in summary


def test_bad_arguments_and_no_device_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (["--minutes", "0"], ["--minutes", "nan"], ["--only", "everything"], ["--quic"], ["--jobs", "0"]):
        with pytest.raises(SystemExit) as e:
            gpu_check.main(arguments)
        assert e.value.code == 2
    capsys.readouterr()
    if not torch.cuda.is_available():
        assert gpu_check.main(["--output", str(tmp_path)]) == 2
        assert capsys.readouterr().err == "gpu_check: error: no CUDA device: run it on a machine with one\n"
