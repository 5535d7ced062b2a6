"""Rows of the GPU checks: JSON lines, written as they come, so that a run that is stopped continues where it was.

    {"by": "steps", "case": "...", "started": true}     a case begins
    {"by": "steps", "case": "...", "usec": 1.5}         its result; {"error": ...} is one, too
    {"by": "steps", "done": true}                       no case of `by` is left

A case that ends its process, or takes too long, gets an error from the process that started it. What is stopped from
outside has no result, and is started again by the next command.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import re
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
INTERRUPT_SEC = 5.0  # that a command has to end when it is interrupted, before it is killed
BROKEN = r"CUDA error|Triton Error \[CUDA\]|illegal memory access|unspecified launch failure|misaligned address"
Row = dict[str, Any]


class Rows:
    """The rows of a file whose `by` is this one's, or begins with it and a space. Several processes may append."""

    def __init__(self, path: Path, by: str, limit_sec: float = LIMIT_SEC) -> None:
        self.path, self.by, self._limit_sec = path, by, limit_sec

    def read(self) -> list[Row]:
        """Return all rows but those that were cut off."""
        return [row for row in read_rows(self.path) if f"{row['by']} ".startswith(f"{self.by} ")]

    def append(self, **row: Any) -> None:
        """Write a row."""
        # The line break comes first: it also ends what a killed process left unfinished.
        with self.path.open("ab") as file:
            file.write(b"\n" + json.dumps({"by": self.by} | row).encode())
            file.flush()
            os.fsync(file.fileno())

    def results(self) -> dict[str, Row]:
        """Return the result of each case."""
        return {row["case"]: row for row in self.read() if "case" in row and "started" not in row}

    def started(self) -> list[str]:
        """Return the cases that have begun and have no result."""
        done = self.results()
        return list(dict.fromkeys(row["case"] for row in self.read() if row.get("case", "") not in {"", *done}))

    @property
    def is_done(self) -> bool:
        return any(row["by"] == self.by and row.get("done") for row in self.read())

    def forget_failures(self) -> None:
        """Remove what is no result without an error, so that it is measured again."""
        from nanoinfer.utils.files import write_atomically

        good, mine = self.results().values(), self.read()
        kept = [r for r in read_rows(self.path) if r not in mine or (r in good and r.get("error") is None)]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())

    @contextlib.contextmanager
    def running(self, case: str) -> Iterator[None]:
        """Note the start of a case, and end this process if the case takes longer than the limit."""
        self.append(case=case, started=True)
        faulthandler.dump_traceback_later(self._limit_sec, exit=True, file=sys.__stderr__)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, of all parts."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def is_broken(error: str | None) -> bool:
    """Return whether a CUDA context has failed: every later call in this process would fail too."""
    return re.search(BROKEN, error or "") is not None


def parser(doc: str, by: str) -> argparse.ArgumentParser:
    """Return a parser with the options of a script that calls `measure`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="file of JSON lines, continued case by case; default: printed only")
    made.add_argument("--by", default=by, help=f"name of the rows there, default {by}")
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


def microseconds(call: Callable[[], object], rounds: int, turns: int = 1, warm_ups: int = 3) -> float:
    """Return the median time of a call on the device's clock, over `turns`; the calls before are not timed."""
    import torch

    times = []
    for _ in range(rounds + warm_ups):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / turns)
    return statistics.median(times[warm_ups:])


def measure(cases: Mapping[str, Callable[[], Row]], args: argparse.Namespace) -> int:
    """Run the cases that are left, and write and print their rows; return 1 if any row has an error."""
    from nanoinfer.errors import one_line

    rows, errors = Rows(args.output or Path(os.devnull), args.by, args.limit), 0
    known = rows.results()
    for case in (c for c in cases if c not in known):
        with rows.running(case):
            try:
                row = cases[case]()
            except Exception as e:  # a row, and the next case
                row = {"error": one_line(e)}
        rows.append(case=case, **row)
        shown = (f"{key} {value:,.4g}" if type(value) is float else f"{key} {value}" for key, value in row.items())
        print(f"{case}: {', '.join(shown)}", flush=True)
        errors += "error" in row
        gc.collect()  # engines, before the next one is made
        if is_broken(row.get("error")):
            return 1  # not done: the rest needs a new process
    rows.append(done=True)
    return int(errors > 0)


def run_until_done(command: Sequence[str], rows: Rows, deadline: float) -> str | None:
    """Run a command until its rows are complete, again after a case that ended it; return what went wrong, or None."""
    while not rows.is_done:
        before = len(rows.results())
        code, said = run_command(command, deadline)
        if code is None and not rows.is_done:
            return "its time is over"
        for case in rows.started():
            rows.append(case=case, error=f"it ended its process, exit code {code}: {said}")
        if not rows.is_done and len(rows.results()) == before:
            return f"exit code {code}: {said}"
    return None


def run_command(command: Sequence[str], deadline: float) -> tuple[int | None, str]:
    """Run a command in the repository until a time; return its exit code (None: it was stopped) and its last line.

    It is in this process's group, so that what ends this process from outside ends it too.
    """
    if deadline - time.monotonic() < 1:
        return None, ""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}  # it would be asked
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out) as p:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = p.wait(max(0.0, deadline - time.monotonic()))
        if code is None:
            p.send_signal(signal.SIGINT)  # the suite then ends its workers and keeps its rows
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(INTERRUPT_SEC)
            p.kill()
        out.seek(0)
        text = out.read().strip() or "it printed nothing"
    fault = re.search(r"(Timeout \(|Fatal Python error).*", text)  # of faulthandler, before a traceback
    return code, " ".join((fault[0] if fault else text.splitlines()[-1]).split())[:300]
