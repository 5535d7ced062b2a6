"""The process that measures one backend (`Worker`), and the harness's side of it (`WorkerProcess`).

A request is one line of JSON on stdin, its answer one on stdout:

    {"do": "export", "case": {...}, "weights": "folder"}   -> {"answer": null}
    {"do": "load", "case": {...}, "weights": "folder"}     -> {"answer": null}
    {"do": "run", "case": {...}, "seed": 0}                -> {"answer": {"tokens": [[...]], "times": {...},
                                                               "peak_memory_bytes": ..., "speculation": null}}
    {"do": "verify"}     launches, logits, verify: engines -> {"answer": 1.07}
    any failure                                            -> {"error": "one line"}

A run's case may differ from the loaded one in its sizes and its draft; `seed` chooses other prompts. The process ends
with its stdin, and on Linux with the process that started it, also while it computes. What libraries print goes to
stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from nanoinfer.bench.backends import EXPORTED, open_backend, prepare
from nanoinfer.bench.case import Case, RunTimes, make_requests
from nanoinfer.bench.model_folders import read_passages
from nanoinfer.checkpoints import huggingface
from nanoinfer.errors import NanoinferError, one_line, reason
from nanoinfer.utils.environment import waited_seconds
from nanoinfer.utils.processes import end_with_parent

GPU_ANSWER_SEC = 300.0  # a GPU program that hangs never ends; the longest correct answer is a compilation


class Worker:
    """Holds the backend between requests."""

    def __init__(self) -> None:
        self._backend: Any = None
        self._speculated = False

    def answer(self, do: str, **fields: Any) -> Any:
        """Perform one request; return its answer."""
        if "case" in fields:
            fields["case"] = Case(**fields["case"])
        method = getattr(self, f"_{do}") if do in ("export", "load", "run") else getattr(self._backend, do)
        return method(**fields)

    def _export(self, case: Case, weights: str) -> None:
        prepare(case, Path(weights))

    def _load(self, case: Case, weights: str) -> None:
        folder = Path(weights)
        self._vocab_size = huggingface.read_config(folder / "config.json").vocab_size
        self._passages = read_passages(folder)
        self._backend = open_backend(case, folder)

    def _run(self, case: Case, seed: int) -> dict[str, Any]:
        requests = make_requests(case, self._vocab_size, seed=seed, passages=self._passages)
        if case.draft is not None or self._speculated:  # a draft is set, and removed again
            self._backend.speculate(case)
            self._speculated = True
        before = waited_seconds()
        tokens, times = self._backend.run(requests)
        after = waited_seconds()
        if (counts := [len(t) for t in tokens]) != requests.output_tokens:
            raise NanoinferError(f"it generated {sum(counts)} tokens instead of {sum(requests.output_tokens)}")
        return {
            "tokens": tokens,
            "times": dataclasses.asdict(times) | {"waited_sec": after and after - (before or 0.0)},
            "peak_memory_bytes": peak_memory(case.device),
            "speculation": self._backend.speculation() if case.draft is not None else None,
        }


def peak_memory(device: str) -> int | None:
    """Return the peak memory of this process in bytes: on a GPU torch's (None without it), else resident memory."""
    if device.startswith("cuda"):
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():  # reading a peak would start CUDA
            return None
        return torch.cuda.max_memory_allocated(device) or None
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):  # not getrusage: its peak includes the parent's, from before exec
                return int(line.split()[1]) * 1024
    return None


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
        process = self._processes[case.loaded]
        if isinstance(process, NanoinferError):
            raise process
        return process

    def _start(self, case: Case) -> WorkerProcess:
        """Return a loaded process. An export runs in another one: its float32 weights would count as peak memory."""
        python = self._pythons.get(case.backend)
        if case.backend in EXPORTED:
            with WorkerProcess(case, python) as exporter:
                exporter.ask("export", case=dataclasses.asdict(case), weights=str(self._weights))
        process = self.enter_context(WorkerProcess(case, python))
        process.load(self._weights)
        return process


def main() -> None:
    """Answer requests until stdin ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = {"answer": worker.answer(**json.loads(line))}
        except Exception as e:  # every failure is an answer: the harness makes it a row
            answer = {"error": one_line(e)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
