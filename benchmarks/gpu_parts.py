"""The parts of gpu_check.py: each runs commands with a time limit, and says what came of them.

A runner takes a command and a limit in seconds; tests give one of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NANOINFER = (sys.executable, "-c", "from nanoinfer.cli import main; main()")
SUITE_SHARE = 0.75  # of the suite's time, after which it begins nothing new; what has begun needs the rest


@dataclass
class Part:
    """What came of a part. `status`: passed, failed, unfinished (its time was over) or not run."""

    status: str = "not run"
    seconds: float = 0.0
    error: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    """Of tests: counts and failures; of sampler and kernels: their JSON document."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int | None
    """None: it was stopped, its time was over."""
    out: str
    err: str

    @property
    def last_words(self) -> str:
        lines = [line for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return " ".join(lines[-1].split())[:300] if lines else "it said nothing"


Runner = Callable[[Sequence[str], float], Done]


def run_command(command: Sequence[str], limit_sec: float) -> Done:
    """Run a command in the repository, with `src` importable; end it with all that it started when its time is over."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=limit_sec)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # the suite then ends its workers and keeps what is done
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        finally:
            if process.poll() is None or code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for f in (out, err):
            f.seek(0)
        return Done(code, out.read(), err.read())


# Parts -----------------------------------------------------------------------------------------------------


def run_tests(run: Runner, limit_sec: float) -> Part:
    """Run the tests that need a GPU; their counts, and each failure on one line."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        pytest.append("--continue-on-collection-errors")  # a file that cannot be imported is a failure, the rest runs
        done = run(pytest, limit_sec)
        data = read_junit(report) if report.exists() else {}
    if done.code is None:
        return Part("unfinished", error=f"stopped after {limit_sec:.0f} s: {done.last_words}", data=data)
    if done.code == 0 and data.get("passed"):
        return Part("passed", data=data)
    if data.get("failures"):
        return Part("failed", error=f"{len(data['failures'])} tests failed", data=data)
    reason = "no test was run" if done.code in (0, 5) else f"exit code {done.code}: {done.last_words}"
    return Part("failed", error=reason, data=data)


def read_junit(path: Path) -> dict[str, Any]:
    """Return counts, and what failed: {"passed": 3, "failed": 1, ..., "failures": [{"test": ..., "message": ...}]}."""
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
    failures, skips = [], []
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".strip(":")
        kinds = {child.tag: child for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in kinds), None)
        counts[{"failure": "failed", "error": "errors", "skipped": "skipped", None: "passed"}[kind]] += 1
        if kind is not None:
            message = " ".join((kinds[kind].get("message") or kinds[kind].text or "").split())[:300]
            (skips if kind == "skipped" else failures).append({"test": name, "message": message})
    return {**counts, "failures": failures, "skips": skips}


def run_script(script: str, run: Runner, limit_sec: float) -> Part:
    """Run a benchmark that prints one JSON document with --json."""
    if not (ROOT / script).exists():
        return Part("failed", error=f"{script} is not in this checkout")
    done = run([sys.executable, script, "--json"], limit_sec)
    if done.code is None:
        return Part("unfinished", error=f"stopped after {limit_sec:.0f} s: {done.last_words}")
    document = last_json(done.out)
    if done.code != 0:
        return Part("failed", error=f"exit code {done.code}: {done.last_words}", data=document or {})
    if document is None:
        return Part("failed", error=f"it printed no JSON document: {done.last_words}")
    return Part("passed", data=document)


def last_json(text: str) -> dict[str, Any] | None:
    """Return the JSON document of an output: all of it, or its last line; lists are put under "rows"."""
    for candidate in (text, *reversed(text.strip().splitlines()[-1:])):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {"rows": found}
    return None


def run_bench(
    run: Runner, limit_sec: float, old: dict[str, Any] | None, quick: bool
) -> tuple[Part, dict[str, Any] | None]:
    """Run suite gpu, going on with an older document; return the part and the document as far as it came."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [*NANOINFER, "bench", "--suite", "gpu", "--minutes", f"{limit_sec * SUITE_SHARE / 60:.2f}"]
        command += ["--quick"] if quick else []
        if old is not None:
            path.write_text(json.dumps(old))
            command += ["--resume", str(path)]
        else:
            command += ["--output", str(path)]
        done = run(command, limit_sec)
        made = json.loads(path.read_text()) if path.exists() else None
    rows = made["rows"] if made is not None else []
    errors = [f"{name_of(r)}: {r['error']}" for r in rows if r.get("error") is not None]
    left = num_cases(quick) - len(rows)
    data = {"measured": len(rows) - len(errors), "failed": len(errors), "left": left, "failed_cases": errors}
    if made is None or done.code not in (0, 1, None):
        how = f"stopped after {limit_sec:.0f} s" if done.code is None else f"exit code {done.code}"
        return Part("failed", error=f"{how}: {done.last_words}", data=data), made
    if left > 0:
        return Part("unfinished", error=f"{left} cases are left: --resume goes on", data=data), made
    if errors:
        return Part("failed", error=f"{len(errors)} cases failed", data=data), made
    return Part("passed", data=data), made


def name_of(row: dict[str, Any]) -> str:
    """Return a row's case in words."""
    from nanoinfer.bench.case import Case

    case = Case(**row["case"])
    return f"{case.label} {case.model} batch {case.batch}"


def num_cases(quick: bool) -> int:
    """Return how many cases the suite has."""
    from nanoinfer.bench.suites import SUITES
    from nanoinfer.config import PRESETS

    return len(SUITES["gpu"].cases(SUITES["gpu"].model, PRESETS["gpt2"], [], quick))
