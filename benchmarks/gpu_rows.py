"""Rows of the GPU checks: JSON lines, written as they come, so that a run that is stopped continues where it was.

A case has a line when it starts and one with its result; an error is a result. A case that was started twice and has no
result is not started again: its kernel hangs, or ends the process. {"done": name} is the last line of a complete run.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
LIMIT_SEC = 150.0  # of a case, its compilation included
Row = dict[str, Any]


class Rows:
    """The lines of a file. Several processes may append to it."""

    def __init__(self, path: Path, by: str, limit_sec: float = LIMIT_SEC) -> None:
        self.path, self.by, self._limit_sec = path, by, limit_sec

    def read(self) -> list[Row]:
        """Return all lines but one that was cut off."""
        rows = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def append(self, **row: Any) -> None:
        """Write a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"by": self.by} | row) + "\n")

    def results(self) -> dict[str, Row]:
        """Return the result of each case; an error where there is none."""
        found: dict[str, Row] = {}
        for row in (r for r in self.read() if "case" in r):
            found[row["case"]] = row | {"error": "it was started and did not finish"} if "started" in row else row
        return found

    def left(self, cases: Sequence[str]) -> set[str]:
        """Return the cases that have no result, and were started at most once."""
        rows = self.read()
        finished = [r["case"] for r in rows if "case" in r and "started" not in r]
        starts = [r["case"] for r in rows if "started" in r]
        return {c for c in cases if c not in finished and starts.count(c) < 2}

    @property
    def is_done(self) -> bool:
        return any(row.get("done") == self.by for row in self.read())

    def forget_failures(self) -> None:
        """Keep the results without an error only, so that the others are measured again."""
        good = [row for row in self.results().values() if row.get("error") is None]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in good))

    @contextlib.contextmanager
    def running(self, case: str) -> Iterator[None]:
        """Note the start of a case, and end this process if the case takes longer than the limit."""
        self.append(case=case, started=True)
        faulthandler.dump_traceback_later(self._limit_sec, exit=True, file=sys.__stderr__)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def is_broken(error: str | None) -> bool:
    """Return whether a CUDA context has failed: every later call in this process would fail too."""
    return error is not None and "CUDA error" in error


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options of a script that calls `measure`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="file of JSON lines, written case by case; default: printed only")
    made.add_argument("--resume", action="store_true", help="continue --output: cases with a row are left out")
    made.add_argument("--limit", type=float, default=LIMIT_SEC, help="seconds after which a case ends the process")
    return made


def captured(call: Callable[[], T]) -> tuple[Callable[[], object], T]:
    """Return a replay of a call's kernels as one CUDA graph, and the result that it overwrites."""
    import torch

    call()  # compiled outside the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def microseconds(call: Callable[[], object], rounds: int, turns: int = 1) -> float:
    """Return the median time of a call on the device's clock, over `turns`; three calls before are not timed."""
    import torch

    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / turns)
    return statistics.median(times[3:])


def measure(cases: Mapping[str, Callable[[], Row]], args: argparse.Namespace, by: str) -> int:
    """Run the cases that are left, and write and print their rows; return 1 if any row has an error."""
    from nanoinfer.errors import one_line

    rows = Rows(args.output or Path(os.devnull), by, args.limit)
    if args.output is not None and not args.resume:
        args.output.unlink(missing_ok=True)
    left, errors = rows.left(list(cases)), 0
    for case, call in cases.items():
        if case in left:
            with rows.running(case):
                try:
                    row = call()
                except Exception as e:  # a row, and the next case
                    row = {"error": one_line(e)}
            rows.append(case=case, **row)
            shown = (f"{key} {value:,.4g}" if type(value) is float else f"{key} {value}" for key, value in row.items())
            print(f"{case}: {', '.join(shown)}", flush=True)
            errors += "error" in row
            gc.collect()  # engines, before the next one is made
            if is_broken(row.get("error")):
                return 1  # not done: the rest needs a new process
    rows.append(done=rows.by)
    return int(errors > 0)


def run_until_done(command: Sequence[str], rows: Rows, deadline: float) -> str | None:
    """Run a command until its rows are complete, again after a case that ended it; return what went wrong, or None."""
    before, code, said = -1, None, ""
    while not rows.is_done:
        if before == (before := sum(row["by"] == rows.by for row in rows.read())):
            return f"exit code {code}: {said}"
        code, said = run_command(command, deadline)
        if code is None and not rows.is_done:
            return "its time is over: continue with --resume"
    return None


def run_command(command: Sequence[str], deadline: float) -> tuple[int | None, str]:
    """Run a command in the repository until a time; return its exit code, None if it was stopped, and its last line.

    It is in this process's group, so that what ends this process from outside ends it too.
    """
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out) as p:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = p.wait(max(0.0, deadline - time.monotonic()))
        if code is None:
            p.send_signal(signal.SIGINT)  # the suite then ends its workers and keeps its rows
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(5)
            p.kill()
        out.seek(0)
        lines = out.read().strip().splitlines() or ["it printed nothing"]
    return code, " ".join(lines[-1].split())[:300]
