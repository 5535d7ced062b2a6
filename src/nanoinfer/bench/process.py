"""The harness's side of a worker: start it, ask it, end it, and say in one line how it died."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanoinfer.bench.case import Case
from nanoinfer.bench.stats import RunTimes
from nanoinfer.errors import NanoinferError

GPU_ANSWER_SEC = 300.0  # a GPU program that hangs does so for ever; the longest that is right is a compilation


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of a backend gave."""

    tokens: list[list[int]]
    times: RunTimes
    peak_memory_bytes: int | None
    reserved_bytes: int | None = None
    """Of a GPU: what torch's allocator took at most."""
    kv_cache_bytes: int | None = None
    """Keys and values that one of our engines has reserved."""
    speculation: dict[str, float] | None = None
    """What was proposed and accepted, of a case with a draft."""


class WorkerProcess:
    """One backend in a process of its own. Use as a context manager."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._answer_sec = None if case.device == "cpu" else GPU_ANSWER_SEC
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nanoinfer.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the harness: it ends its workers itself
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(
                    BrokenPipeError
                ):  # what was not sent to a process that is gone does not matter
                    pipe.close()

    def load(self, weights: Path) -> None:
        """Load the backend. Raises NanoinferError with its reason when it cannot."""
        self._ask(do="load", case=dataclasses.asdict(self.case), weights=str(weights))

    def run(self, *, seed: int = 0, **shape: Any) -> Run:
        """Run the case once, in its own shape or with some fields changed; another seed gives other prompts."""
        answer = self._ask(do="run", seed=seed, shape=shape)
        times = RunTimes(answer["num_prompt_tokens"], answer["arrivals"])
        names = ("peak_memory_bytes", "reserved_bytes", "kv_cache_bytes", "speculation")
        return Run(answer["tokens"], times, **{name: answer.get(name) for name in names})

    def breakdown(self) -> dict[str, float]:
        """Return where the time of a step goes, in percent (our engines only)."""
        percent: dict[str, float] = self._ask(do="breakdown")["percent"]
        return percent

    def launches(self) -> dict[str, float]:
        """Return the fields of `launches.Launches` (our engines on a GPU only)."""
        counts: dict[str, float] = self._ask(do="launches")["counts"]
        return counts

    def verify(self) -> float:
        """Return what verifying 5 tokens costs in decode steps (our engines only)."""
        ratio: float = self._ask(do="verify")["ratio"]
        return ratio

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            if self._answer_sec is not None and not select.select([self._process.stdout], [], [], self._answer_sec)[0]:
                self._process.kill()
                raise NanoinferError(f"its process gave no answer in {self._answer_sec:.0f} s, and was ended")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise NanoinferError(self._epitaph())
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise NanoinferError(answer["error"])
        return answer

    def _epitaph(self) -> str:
        """Return how the process died: killed (likely out of memory), or its last words."""
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "its process was killed: most likely out of memory"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how}): {words[-1][:200] if words else 'it said nothing'}"


class WorkerHandle:
    """A case's place at a process: cases that differ in their draft alone share one, and the weights in it."""

    def __init__(self, case: Case, process: WorkerProcess) -> None:
        self.case, self._process = case, process

    def run(self, *, seed: int = 0, **shape: Any) -> Run:
        """Run the case once, in its own shape or with some sizes changed; another seed gives other prompts."""
        own = {name: getattr(self.case, name) for name in ("draft", "speculate_k", "speculate_rule")}
        return self._process.run(seed=seed, **own, **shape)

    def breakdown(self) -> dict[str, float]:
        """Return where the time of a step goes, in percent (our engines only)."""
        return self._process.breakdown()

    def launches(self) -> dict[str, float]:
        """Return the fields of `launches.Launches` (our engines on a GPU only)."""
        return self._process.launches()

    def verify(self) -> float:
        """Return what verifying 5 tokens costs in decode steps (our engines only)."""
        return self._process.verify()


class Processes(contextlib.ExitStack):
    """The processes of some cases; all end with it."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self._weights = weights
        self._processes: dict[Case, WorkerProcess | NanoinferError] = {}

    def load_together(self, cases: Sequence[Case], warm: Callable[[Case], bool], at_once: int) -> None:
        """Load what some cases need, several at a time; a failure is raised by `worker`.

        On a machine with a GPU most of the time before the first measurement is imports, reading weights, and
        compilers: work of one core each.

        Args:
            cases: those that a process loads already are left out.
            warm: which are also run once in full, so that what they compile is compiled here.
            at_once: processes that load at the same time.
        """

        def load(case: Case, process: WorkerProcess) -> None:
            try:
                process.load(self._weights)
                if warm(case):
                    process.run()
            except NanoinferError as e:
                self._processes[case] = e

        with ThreadPoolExecutor(at_once) as pool:
            try:
                loading = []
                for case in dict.fromkeys(c.plain for c in cases):
                    if case not in self._processes:
                        process = self.enter_context(WorkerProcess(case))
                        self._processes[case] = process
                        loading.append(pool.submit(load, case, process))
                for future in loading:
                    future.result()
            except BaseException:  # Ctrl-C: the pool would wait for processes that are still loading
                self.close()
                raise

    def knows(self, case: Case) -> bool:
        """Return whether a case's process was started, loaded or failed."""
        return case.plain in self._processes

    def worker(self, case: Case) -> WorkerHandle:
        """Return a case's place, loading what it needs unless that is there. Raises NanoinferError if it fails."""
        process = self._processes.get(case.plain)
        if process is None:
            try:
                process = self.enter_context(WorkerProcess(case.plain))
                process.load(self._weights)
            except NanoinferError as e:
                process = e
            self._processes[case.plain] = process
        if isinstance(process, NanoinferError):
            raise process
        return WorkerHandle(case, process)
