"""The commands of docs/gpu-first-run.md, run to their end from a bare folder, with a stand-in for the device.

Results are kept as there: what a command left in the folder that OUT names is copied over the folder of earlier
results, and OUT is empty when the next one begins. The process group is killed at random moments.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import pytest

from helpers.environment import ROOT

pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_rows import read_rows

from nanoinfer.bench import results as bench_results

EARLIER = "gpu-results"
JOBS = 2  # files of tests, which run at the same time
TESTS = """
import pytest, sitecustomize, os
@pytest.mark.gpu
@pytest.mark.parametrize("i", range(9))
def test_one(i):
    sitecustomize.work(f"tests {__name__} {i}")
    if i == 4: os._exit(7)
    if i == 6: raise RuntimeError("Triton Error [CUDA]: unspecified launch failure")
"""


def commands() -> list[str]:
    """Return the commands of the procedure, in their order."""
    text = (ROOT / "docs" / "gpu-first-run.md").read_text()
    return re.findall(r"^ {4}(PYTHONPATH=src python3 benchmarks/gpu_check\.py .*)$", text, re.MULTILINE)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A bare folder with a copy of the source tree, tests of its own, and a python3 with the stand-in."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    copy = tmp_path / "tree"
    for name in files.stdout.splitlines():
        if name.split("/")[0] in ("src", "benchmarks", "pyproject.toml"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    for name in ("a/test_a.py", "b/test_b.py"):
        (copy / "tests" / name).parent.mkdir(parents=True)
        (copy / "tests" / name).write_text(TESTS)
    (tmp_path / "site").mkdir()
    shutil.copy(ROOT / "tests" / "helpers" / "gpu_stand_in.py", tmp_path / "site" / "sitecustomize.py")
    # Not the environment's own python3, which would find the package that is installed there.
    paths = f"$PYTHONPATH:{tmp_path / 'site'}:{sysconfig.get_paths()['purelib']}"
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec {Path(sys.base_prefix) / "bin" / "python3"} "$@"\n')
    python.chmod(0o755)
    return copy


def run(command: str, tree: Path, num_cases: int | None, delay_sec: float = 0.0) -> tuple[int, str]:
    """Run a command with an empty OUT; copy what it left over the earlier results. Return its exit code and output.

    It is killed, with all that it started, a moment after so many cases have begun.
    """
    out, log, said = (tree.parent / name for name in ("out", "log", "said"))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env |= {"OUT": str(out), "PATH": f"{tree.parent / 'bin'}:{env['PATH']}", "STAND_IN_LOG": str(log)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # as in a bare environment: clients of the server bring some
    command = command.replace("/tmp/models", str(tree.parent / "models"))
    begun = len(log.read_text().splitlines()) if log.exists() else 0
    with said.open("w") as file:
        p = subprocess.Popen(
            command, shell=True, cwd=tree, env=env, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
        )
    while p.poll() is None:
        time.sleep(0.01)
        if num_cases is not None and log.exists() and len(log.read_text().splitlines()) >= begun + num_cases:
            time.sleep(delay_sec)
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    files = list(out.iterdir())
    assert len(files) <= 8, files
    (tree / EARLIER).mkdir(exist_ok=True)
    for file in files:
        shutil.copy(file, tree / EARLIER / file.name)
    return p.returncode, said.read_text()


def results(tree: Path) -> Counter[tuple[str, str]]:
    """Return how many results each case has so far."""
    rows = read_rows(tree / EARLIER / "rows.jsonl")
    found = Counter((row["by"], row["case"]) for row in rows if "case" in row and "started" not in row)
    if (path := tree / EARLIER / "bench.json").exists():
        made = bench_results.read(path).rows
        found.update(("bench", f"{r.case.label} {r.case.model} {r.case.batch}") for r in made if not r.unfinished)
    return found


@pytest.mark.nightly
def test_the_first_command_has_the_tests_and_the_steps(tree: Path) -> None:
    code, said = run(commands()[0], tree, None)
    assert code == 1, said  # some tests fail
    assert Counter(by.split()[0] for by, _ in results(tree)) == {"tests": 18, "steps": 8}


@pytest.mark.nightly  # a minute each
@pytest.mark.parametrize("seed", [0, 1])
def test_the_procedure_runs_to_its_end_whenever_it_is_interrupted(tree: Path, seed: int) -> None:
    moments, num_kills = random.Random(seed), 0
    for command in commands():
        for num_cases in (moments.randrange(20), moments.randrange(60), None):
            before = results(tree)
            again = f" --continue {EARLIER}" if before and "--continue" not in command else ""
            code, said = run(command + again, tree, num_cases, moments.random() / 20)
            num_kills += code < 0
            assert code in (0, 1, -signal.SIGKILL), said  # 1: some rows are errors, or a time is over
            assert before <= results(tree)
            if code >= 0:
                break
    found = results(tree)
    assert set(found.values()) == {1}
    assert Counter(by.split()[0] for by, _ in found) == {
        "tests": 18, "steps": 8, "sampler": 24, "bench": 64, "kernels": 96, "variants": 52
    }  # fmt: skip
    errors = {row["case"]: row["error"] for row in read_rows(tree / EARLIER / "rows.jsonl") if row.get("error")}
    broken, ended = "RuntimeError: Triton Error [CUDA]: unspecified launch failure", "it ended its process, exit code 7"
    assert {case: error.partition(":")[0] if error.startswith(ended) else error for case, error in errors.items()} == {
        **{f"tests/{x}/test_{x}.py::test_one[{i}]": error for x in "ab" for i, error in ((4, ended), (6, broken))},
        "qkv gpt2 bfloat16 1 rows": "RuntimeError: Triton Error [CUDA]: misaligned address",
    }
    begun = Counter((tree.parent / "log").read_text().splitlines())
    assert num_kills >= 3  # the first command once, the third twice
    assert begun.total() - len(begun) <= JOBS * num_kills  # what was running is all that is repeated
    summary = (tree / EARLIER / "summary.txt").read_text()
    assert summary.startswith("NVIDIA H200, commit ")
    for line in (
        "missing: hypothesis: skipped: tests of engines",
        "tests       14 passed    4 failed",
        "full        44 passed",
    ):
        assert line in summary
    assert " 200.0 us predicted     300.0 us measured, 1.50 times" in summary


def test_the_commands_of_the_procedure_fit_their_time() -> None:
    minutes = [float(found[1]) for c in commands() if (found := re.search(r"--minutes ([\d.]+)", c))]
    assert len(minutes) == len(commands())
    assert max(minutes) < 9
    assert sum(minutes[:3]) <= 26  # and two minutes to start the machine
    assert sum(minutes[3:]) <= 14
    assert all(len(c) < 2000 and "OUT=" not in c for c in commands())
