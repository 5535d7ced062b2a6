"""All GPU measurements in one results file: tests, kernels, and suite gpu beside its goals.

    make gpu-check                                                     all parts (minutes; needs a CUDA device)
    PYTHONPATH=src python3 benchmarks/gpu_check.py --quick             without an installation: needs torch, triton,
                                                                       pytest, typer and rich; uses transformers
    ... gpu_check.py --minutes 9 --resume                              in pieces of 9 minutes
    ... gpu_check.py --only tests --only bench --output results.json

Parts, in this order: `tests` (pytest -m gpu), `sampler` and `kernels` (benchmarks/triton_sampler.py and
triton_kernels.py), `bench` (suite gpu of `nanoinfer bench`). A part that fails or runs out of time is recorded with
its error, and the others run. The file (--output, docs/results/gpu.json; a readable .txt beside it) is written after
every part. --resume keeps the parts that finished, failed ones too unless --only names them, and continues with the
remaining cases of the suite.

Exit codes: 0 all parts passed, 1 a part failed or is unfinished (a missed goal is a result, not a failure), 2 bad
arguments or no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]  # also without an installation

from gpu_targets import judge  # noqa: E402

from nanoinfer.bench import machine, results  # noqa: E402
from nanoinfer.bench.suites import SUITES  # noqa: E402
from nanoinfer.files import read_json, write_atomically  # noqa: E402
from nanoinfer.models.presets import PRESETS  # noqa: E402

SCHEMA = "nanoinfer-gpu-check/1"
LIMITS_SEC = {"tests": 420.0, "sampler": 180.0, "kernels": 240.0, "bench": 1800.0}  # of a part, if time remains
PARTS = tuple(LIMITS_SEC)
SPARE_SEC = 5.0  # of the remaining time, kept for writing the file
SUITE_SHARE = 0.75  # of the suite's time, after which it starts no new backend; those that run need the rest
SCRIPTS = {"sampler": "triton_sampler.py", "kernels": "triton_kernels.py"}
NEEDS = {  # part -> modules that it imports
    "tests": ("pytest", "triton"), "sampler": ("triton",), "kernels": ("triton",),
    "bench": ("typer", "rich", "safetensors", "tokenizers", "huggingface_hub"),
}  # fmt: skip
Part = dict[str, Any]


def new_part(status: str = "not run", error: str | None = None, data: dict[str, Any] | None = None) -> Part:
    """Return the result of a part; `status`: passed, failed, unfinished (its time ran out) or not run."""
    return {"status": status, "seconds": 0.0, "error": error, "data": data or {}}


@dataclass(frozen=True)
class Done:
    """A command that has ended; `code` is None if it was stopped because its time ran out."""

    code: int | None
    out: str
    err: str

    def __str__(self) -> str:
        lines = (self.err.strip() or self.out.strip() or "it printed nothing").splitlines()
        return " ".join(lines[-1].split())[:300]


Runner = Callable[[Sequence[str], float], Done]


def run_command(command: Sequence[str], limit_sec: float) -> Done:
    """Run a command in the repository, with `src` importable; end it and its children when its time runs out."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(timeout=limit_sec)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # the suite then ends its workers and keeps its results
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        return Done(code, out.read(), err.read())


# Parts -----------------------------------------------------------------------------------------------------


def outcome(done: Done, limit_sec: float, data: dict[str, Any] | None, problem: str | None) -> Part:
    """Return the result of a part that ran one command, with what is wrong with its output."""
    if done.code is None:
        return new_part("unfinished", f"stopped after {limit_sec:.0f} s: {done}", data)
    problem = problem or (f"exit code {done.code}: {done}" if done.code != 0 else None)
    return new_part("passed" if problem is None else "failed", problem, data)


def run_tests(run: Runner, limit_sec: float) -> Part:
    """Run the tests that need a GPU; report their counts and failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        flags = ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", "--continue-on-collection-errors"]
        done = run([sys.executable, "-m", "pytest", *flags], limit_sec)
        data = read_junit(report) if report.exists() else {}
    problem = f"{len(data['failures'])} tests failed" if data.get("failures") else None
    if done.code in (0, 5) and not data.get("passed"):
        problem = "no test was run"
    return outcome(done, limit_sec, data, problem)


def read_junit(path: Path) -> dict[str, Any]:
    """Return {"passed": 3, "failed": 1, "errors": 0, "skipped": 2, "failures": [{"test", "message"}], "skips": []}."""
    kinds = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    found: dict[str, Any] = dict.fromkeys(("passed", *kinds.values()), 0) | {"failures": [], "skips": []}
    for case in ET.parse(path).getroot().iter("testcase"):
        child = next((c for c in case if c.tag in kinds), None)
        found["passed" if child is None else kinds[child.tag]] += 1
        if child is not None:
            name = f"{case.get('classname', '')}::{case.get('name', '')}".strip(":")
            message = " ".join((child.get("message") or child.text or "").split())[:300]
            found["skips" if child.tag == "skipped" else "failures"].append({"test": name, "message": message})
    return found


def run_script(script: str, run: Runner, limit_sec: float) -> Part:
    """Run a benchmark that prints one JSON document with --json, as all of its output or as the last line."""
    if not (ROOT / script).exists():
        return new_part("failed", f"{script} is not in this checkout")
    done = run([sys.executable, script, "--json"], limit_sec)
    data = None
    for candidate in (*done.out.strip().splitlines()[-1:], done.out):
        with contextlib.suppress(ValueError):
            data = json.loads(candidate)
    problem = f"no JSON document: {done}" if done.code == 0 and data is None else None
    return outcome(done, limit_sec, {"rows": data} if isinstance(data, list) else data, problem)


def run_bench(run: Runner, limit_sec: float, document: dict[str, Any]) -> Part:
    """Run the remaining cases of suite gpu; the results so far are document["bench"]."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "nanoinfer", "bench", "--suite", "gpu", *["--quick"] * document["quick"]]
        command += ["--minutes", f"{limit_sec * SUITE_SHARE / 60:.2f}"]
        if document["bench"] is not None:
            path.write_text(json.dumps(document["bench"]))
        done = run([*command, "--resume" if path.exists() else "--output", str(path)], limit_sec)
        document["bench"] = json.loads(path.read_text()) if path.exists() else None
    rows = read_suite(document).rows if document["bench"] is not None else []
    errors = [f"{r.case.label} {r.case.model} batch {r.case.batch}: {r.error}" for r in rows if r.error is not None]
    left = len(SUITES["gpu"].cases(SUITES["gpu"].model, PRESETS["gpt2"], [], document["quick"])) - len(rows)
    data = {"measured": len(rows) - len(errors), "failed": len(errors), "left": left, "failed_cases": errors}
    if document["bench"] is None or done.code not in (0, 1, None):
        how = f"stopped after {limit_sec:.0f} s" if done.code is None else f"exit code {done.code}"
        return new_part("failed", f"{how}: {done}", data)
    if left > 0:
        return new_part("unfinished", f"{left} cases are left: continue with --resume", data)
    return new_part("failed", f"{len(errors)} cases failed", data) if errors else new_part("passed", data=data)


# The document ----------------------------------------------------------------------------------------------


def new_document(commit: str | None, quick: bool) -> dict[str, Any]:
    """Return a document without results: time, machine and versions."""
    return {
        "schema": SCHEMA, "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or machine.commit(), "earlier_commits": [], "quick": quick,
        "machine": machine.describe_machine("cuda:0"), "versions": machine.describe_versions(),
        "copy_bytes_per_sec": None, "parts": {name: new_part() for name in PARTS}, "targets": [], "bench": None,
    }  # fmt: skip


def read_suite(document: dict[str, Any]) -> results.Results:
    """Return the results of suite gpu in a document."""
    return results.from_json(json.dumps(document["bench"]), "the suite's document")


def write(document: dict[str, Any], path: Path) -> None:
    """Judge the goals by the suite's rows; write the document, and the same as text beside it."""
    rows = []
    if document["bench"] is not None:
        measured = read_suite(document)
        rows, document["copy_bytes_per_sec"] = measured.rows, measured.ceiling["read_bytes_per_sec"]
    document["targets"] = [asdict(goal) | {"met": goal.met} for goal in judge(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, separators=(",", ":")).encode() + b"\n")
    write_atomically(path.with_suffix(".txt"), as_text(document).encode() + b"\n")


def as_text(document: dict[str, Any]) -> str:
    """Return the document as text: machine, parts and goals."""
    machine, versions, bandwidth = document["machine"], document["versions"], document["copy_bytes_per_sec"]
    gpu = machine["gpu_details"] or {}
    clocks = f"SM clock {gpu.get('sm_clock_mhz')} of {gpu.get('max_sm_clock_mhz')} MHz"
    packages = [f"{name} {versions.get(name)}" for name in ("python", "torch", "triton", "transformers")]
    commits = [f"commit {document['commit']}", *(f"some parts: {commit}" for commit in document["earlier_commits"])]
    copies = "unknown" if bandwidth is None else f"{bandwidth / 1e12:.2f} TB/s, read and written"
    lines = [
        f"{machine['gpu']}, driver {gpu.get('driver')}, CUDA {gpu.get('cuda')}, {clocks}",
        ", ".join([*commits, document["created"], *packages]),
        f"measured copy bandwidth: {copies}\n",
    ]
    for name, part in document["parts"].items():
        counts = ", ".join(f"{value} {key}" for key, value in part["data"].items() if type(value) is int)
        head = f"{name:8} {part['status']:10} {part['seconds']:6.0f} s"
        lines.append(": ".join(filter(None, (head, counts, part["error"]))))
        lines += [f"    {f['test']}: {f['message']}" for f in part["data"].get("failures", [])]
        lines += [f"    {case}" for case in part["data"].get("failed_cases", [])]
    lines += ["", f"{'goal':58} {'wanted':>12} {'reached':>10}"]
    for t in document["targets"]:
        wanted, value = f"{'<=' if t['at_most'] else '>='} {t['wanted']:,g}", t["value"]
        reached, met = ("unknown", "") if value is None else (f"{value:,.2f}", "met" if t["met"] else "MISSED")
        lines.append(f"{t['name']:58} {wanted:>12} {reached:>10} {t['unit']:9} {met:7} {t['engine'] or ''}".rstrip())
    return "\n".join(lines)


# The check -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """The user's options, and the clock and runner that tests replace."""

    output: Path
    only: tuple[str, ...] = PARTS
    minutes: float | None = None
    redo_failed: bool = True
    """Whether a failed part of an older document is run again; an unfinished one always is."""
    run: Runner = run_command
    clock: Callable[[], float] = time.monotonic
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def __call__(self, document: dict[str, Any]) -> int:
        """Run the parts that are requested and not finished, updating the document; return the exit code."""
        parts, started = document["parts"], self.clock()
        for name in (p for p in PARTS if p in self.only):
            if parts[name]["status"] == "passed" or (parts[name]["status"] == "failed" and not self.redo_failed):
                continue
            begun = self.clock()
            left = float("inf") if self.minutes is None else 60 * self.minutes - (begun - started) - SPARE_SEC
            if left > 0:
                self.log(f"{name} ...")
                parts[name] = self._run_part(name, min(left, LIMITS_SEC[name]), document)
                parts[name]["seconds"] = round(self.clock() - begun, 1)
            elif parts[name]["status"] == "not run":
                parts[name] = new_part("unfinished", "no time was left: continue with --resume")
            self.log(f"{name}: {parts[name]['status']}: {parts[name]['error'] or 'no error'}")
            write(document, self.output)
        write(document, self.output)
        return int(any(parts[name]["status"] != "passed" for name in self.only))

    def _run_part(self, name: str, limit_sec: float, document: dict[str, Any]) -> Part:
        """Run one part; record any failure as its error."""
        if missing := [m for m in NEEDS[name] if importlib.util.find_spec(m) is None]:
            return new_part("failed", f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
        try:
            if name == "tests":
                return run_tests(self.run, limit_sec)
            if name == "bench":
                return run_bench(self.run, limit_sec, document)
            return run_script(f"benchmarks/{SCRIPTS[name]}", self.run, limit_sec)
        except (OSError, ValueError, KeyError, ET.ParseError) as e:
            return new_part("failed", f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="A part to run; may be repeated. Default: all.")
    parser.add_argument("--quick", action="store_true", help="The suite with fewer cases and one round.")
    parser.add_argument("--minutes", type=float, help="Time for all parts; --resume runs the rest.")
    parser.add_argument("--resume", nargs="?", const=True, metavar="FILE", help="Continue FILE, by default --output.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "gpu.json")
    parser.add_argument("--commit", help="Commit to record, where the checkout has no git.")
    args = parser.parse_args(arguments)
    if args.minutes is not None and not 0 < args.minutes <= 10_000:
        parser.error(f"--minutes {args.minutes:g} is not in (0, 10000]")
    return args


def resumed(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a new document with the results of an older one. Raises ValueError if they do not belong together."""
    old = read_json(path, 1 << 26, "an older run")
    if not isinstance(old, dict) or old.get("schema") != SCHEMA:
        raise ValueError(f"{path} does not have schema {SCHEMA!r}: leave --resume out to start again")
    if old["quick"] != document["quick"]:
        raise ValueError(f"{path} is of a run {'with' if old['quick'] else 'without'} --quick")
    earlier = [*old["earlier_commits"], *([old["commit"]] if old["commit"] != document["commit"] else [])]
    return document | {"parts": old["parts"], "bench": old["bench"], "earlier_commits": earlier}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("no CUDA device: run it on a machine with one")
        document = new_document(args.commit, args.quick)
        old = args.output if args.resume is True else Path(args.resume) if args.resume is not None else None
        if old is not None and old.exists():
            document = resumed(document, old)
    except (ModuleNotFoundError, ValueError) as e:
        problem = f"{e.name} is not installed: pip install {e.name}" if isinstance(e, ModuleNotFoundError) else e
        print(f"gpu_check: error: {problem}", file=sys.stderr)
        return 2
    code = Check(args.output, tuple(args.only or PARTS), args.minutes, bool(args.only))(document)
    print(as_text(document))
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the file holds the finished parts
        sys.exit(130)
