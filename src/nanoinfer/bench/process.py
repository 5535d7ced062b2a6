"""The harness's side of a worker: start it, send it requests, end it, and report in one line how it died."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from nanoinfer.bench.backends import EXPORTED
from nanoinfer.bench.case import Case
from nanoinfer.bench.stats import RunTimes
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import reason

GPU_ANSWER_SEC = 300.0  # a GPU program that hangs never ends; the longest correct answer is a compilation


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One run of a backend."""

    tokens: list[list[int]]
    times: RunTimes
    peak_memory_bytes: int | None = None
    speculation: dict[str, float] | None = None
    """Totals of proposed and accepted tokens, of a case with a draft."""


class WorkerProcess:
    """One backend in a process of its own. Use as a context manager."""

    def __init__(self, case: Case, python: Path | None = None) -> None:
        """Start the worker of a case, with another interpreter than this one for a peer that has an environment."""
        self.case = case
        self._answer_sec = None if case.device == "cpu" else GPU_ANSWER_SEC
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        command = [str(python or sys.executable), "-m", "nanoinfer.bench.worker"]
        try:
            self._process = subprocess.Popen(  # in a new session: Ctrl-C is for the harness, which ends its workers
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            raise NanoinferError(f"{command[0]} cannot be started: {reason(e)}") from None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # unsent input of a process that has ended is dropped
                pipe.close()  # type: ignore[union-attr]

    def ask(self, do: str, **fields: Any) -> Any:
        """Return the answer to a request of `bench/worker.py`; raise NanoinferError for its errors, its end, a hang."""
        stdin, stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do} | fields), file=stdin, flush=True)
            if self._answer_sec is not None and not select.select([stdout], [], [], self._answer_sec)[0]:
                self._process.kill()
                raise NanoinferError(f"its process gave no answer in {self._answer_sec:.0f} s, and was ended")
            line = stdout.readline()
        if not line:
            raise NanoinferError(self._cause_of_death())
        answer = json.loads(line)
        if "error" in answer:
            raise NanoinferError(answer["error"])
        return answer["answer"]

    def export(self, weights: Path) -> None:
        """Write the weights in the backend's own format, where it has one."""
        self.ask("export", case=dataclasses.asdict(self.case), weights=str(weights))

    def load(self, weights: Path) -> None:
        """Load the backend, or raise NanoinferError with the reason."""
        self.ask("load", case=dataclasses.asdict(self.case), weights=str(weights))

    def run(self, case: Case | None = None, seed: int = 0) -> RunResult:
        """Run the loaded case once, or the same with other sizes or a draft; another seed gives other prompts."""
        answer = self.ask("run", case=dataclasses.asdict(case or self.case), seed=seed)
        return RunResult(**answer | {"times": RunTimes(**answer["times"])})

    def _cause_of_death(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed: most likely out of memory"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how}): {lines[-1][:200] if lines else 'it printed nothing'}"


class Processes(contextlib.ExitStack):
    """The processes of some cases; all end with it. Cases that differ in their draft alone share one.

    `pythons` has the interpreters of peers with an environment of their own.
    """

    def __init__(self, weights: Path, pythons: Mapping[str, Path] | None = None) -> None:
        super().__init__()
        self._weights, self._pythons = weights, pythons or {}
        self._processes: dict[Case, WorkerProcess | NanoinferError] = {}

    def worker(self, case: Case) -> WorkerProcess:
        """Return a case's process, loaded if necessary. Raises NanoinferError if that failed."""
        if case.loaded not in self._processes:
            try:
                self._processes[case.loaded] = self._start(case.loaded)
            except NanoinferError as e:
                self._processes[case.loaded] = e
        found = self._processes[case.loaded]
        if isinstance(found, NanoinferError):
            raise found
        return found

    def _start(self, case: Case) -> WorkerProcess:
        """Return a loaded process. An export runs in another one: its float32 weights would count as peak memory."""
        python = self._pythons.get(case.backend)
        if case.backend in EXPORTED:
            with WorkerProcess(case, python) as exporter:
                exporter.export(self._weights)
        process = self.enter_context(WorkerProcess(case, python))
        process.load(self._weights)
        return process
