"""Fuzz one target: fork children that run cases. A crash ends only the child.

    python fuzz/worker.py TARGET --seconds 60 --seed 0 --out build/fuzz     fuzz; counts as JSON on stdout
    python fuzz/worker.py --replay FILE ...                                 outcome of each case, as JSON

Coverage guides the fuzzer: an input that reaches a new line of the package, or has a new kind of outcome, is mutated
further.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch
from case import (
    CPU_SECONDS,
    PACKAGE,
    SANITIZED,
    SCRATCH,
    Outcome,
    crash_of,
    empty,
    isolate,
    judge,
    limit,
    listen,
    prepare_child,
    read_case,
    wait,
)
from mutate import MAX_BYTES
from targets import Target, load_targets

MAX_CORPUS = 400  # size from which only inputs that reach new lines are kept
MINIMISE_SHARE, MINIMISE_SECONDS = 0.2, 10.0  # share of the total time; limit for one finding


class Coverage:
    """The lines of the package that were executed, and the signatures of outcomes."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.new: set[Any] = set()
        self._ours: dict[CodeType, bool] = {}

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace calls into the package (for sys.settrace)."""
        code = frame.f_code
        if (ours := self._ours.get(code)) is None:
            ours = self._ours[code] = code.co_filename.startswith(PACKAGE)
        return self.line if ours else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Record an executed line."""
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self.seen:
            self.new.add(key)
        return self.line

    @property
    def num_lines(self) -> int:
        """Number of executed lines."""
        return sum(isinstance(key, tuple) for key in self.seen)


class Fuzzer:
    """A target with its corpus, coverage and findings."""

    def __init__(self, name: str, target: Target, seed: int, folder: Path) -> None:
        self.name, self.target, self.folder, self.seed = name, target, folder, seed
        self.todo = target.seeds()
        random.Random(seed).shuffle(self.todo)
        self.corpus: list[bytes] = []
        self.coverage = Coverage()
        self.findings: dict[str, tuple[Outcome, bytes]] = {}
        self.shared = mmap.mmap(-1, MAX_BYTES + 4096)  # cases run so far, size of the current input, the input
        self.children = 0

    @property
    def cases(self) -> int:
        """Number of cases run so far."""
        return int.from_bytes(self.shared[:8], "little")

    def run_child(self, deadline: float) -> bool:
        """Run cases in a forked child and add its results; return whether time is left."""
        self.children += 1
        log, events = self.folder / "log", self.folder / "events"
        events.write_bytes(b"")
        child = os.fork()
        if child == 0:
            try:
                prepare_child(log)
                self.loop(deadline, events)
                os._exit(0)
            except BaseException:  # the child must not return into the parent's code
                traceback.print_exc()
                os._exit(9)
        try:
            status = wait(child, lambda: self.cases)
        finally:
            with open(events, "rb") as f, contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:
                    self.learn(*pickle.load(f))
        if status:
            size = int.from_bytes(self.shared[8:16], "little")
            data = bytes(self.shared[16 : 16 + size])
            self.todo = [d for d in self.todo if d != data]
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT:
                raise KeyboardInterrupt
            self.learn(data, crash_of(status, log), set())
        return time.monotonic() < deadline

    def learn(self, data: bytes, outcome: Outcome, new: set[Any]) -> None:
        """Add an input to the findings or to the corpus."""
        self.coverage.seen |= new
        if outcome.is_finding:
            self.findings.setdefault(outcome.signature, (outcome, data))
        else:
            self.corpus.append(data)
        self.todo = [d for d in self.todo if d != data]

    def loop(self, deadline: float, events: Path) -> None:
        """Run cases in the child process and write new results to `events`."""
        rng = random.Random(f"{self.seed} {self.name} {self.children}")
        messages, folder = listen(), self.folder / "case"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        with open(events, "ab", buffering=0) as out:
            while time.monotonic() < deadline:
                data = self.todo[0] if self.todo else self.mutate(rng)
                self.shared[:16] = (self.cases + 1).to_bytes(8, "little") + len(data).to_bytes(8, "little")
                self.shared[16 : 16 + len(data)] = data
                limit(0)
                empty(folder)
                self.coverage.new.clear()
                limit(2 * CPU_SECONDS)  # tracing takes time too; `minimise` runs without it
                sys.settrace(self.coverage.trace)
                outcome = judge(self.target, data, folder, messages)
                limit(0)
                new = self.coverage.new | ({outcome.signature} - self.coverage.seen)
                if not self.coverage.new and len(self.corpus) > MAX_CORPUS and not outcome.is_finding:
                    continue
                known = outcome.is_finding and outcome.signature in self.findings
                if (new or data in self.todo) and not known:
                    out.write(pickle.dumps((data, outcome, new)))
                    self.learn(data, outcome, new)
                if outcome.kind == "memory":  # the peak of a process never decreases: continue in a new one
                    return

    def mutate(self, rng: random.Random) -> bytes:
        """Return a new input."""
        corpus = self.corpus or self.target.seeds()
        some = rng.choices(corpus[-20:] if rng.random() < 0.4 else corpus, k=3)
        data = min(some, key=len) if rng.random() < 0.9 else some[0]  # prefer small inputs, which run faster
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            with contextlib.suppress(Exception):  # keep an input that cannot be mutated
                data = self.target.mutate(rng, data, corpus)[:MAX_BYTES]
        return data

    def minimise(self, outcome: Outcome, data: bytes, end: float) -> tuple[bytes, bool | None]:
        """Delete parts of an input while its outcome stays the same.

        Returns:
            the input, and whether the outcome was reproduced (None: no time).
        """
        if time.monotonic() > end:
            return data, None
        if isolate(self.target, data).signature != outcome.signature:
            return data, False
        end, size = min(end, time.monotonic() + MINIMISE_SECONDS), len(data) // 2
        while size and time.monotonic() < end:
            at = 0
            while at < len(data) and time.monotonic() < end:
                shorter = data[:at] + data[at + size :]
                if isolate(self.target, shorter).signature == outcome.signature:
                    data = shorter
                else:
                    at += size
            size //= 2
        return data, True


def fuzz(name: str, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    """Fuzz a target, write the findings to `out`, and return the counts."""
    start = time.monotonic()
    with TemporaryDirectory(dir=SCRATCH) as folder:
        fuzzer = Fuzzer(name, load_targets()[name], seed, Path(folder))
        running = time.monotonic()
        interrupted, done = False, 0.0
        try:
            while fuzzer.run_child(start + (1 - MINIMISE_SHARE) * seconds):
                pass
            done = time.monotonic() - running
            found = [(*finding, *fuzzer.minimise(*finding, start + seconds)) for finding in fuzzer.findings.values()]
        except KeyboardInterrupt:
            interrupted, found = True, [(o, d, d, True) for o, d in fuzzer.findings.values()]
    files = []
    for outcome, _, data, again in found:
        if outcome.kind == "slow" and again is False:
            continue
        path = out / f"{name}__{outcome.kind}-{hashlib.sha256(outcome.signature.encode()).hexdigest()[:8]}.bin"
        path.write_bytes(data)
        files.append(outcome._asdict() | {"file": str(path), "bytes": len(data), "again": again})
    return {
        "target": name, "cases": fuzzer.cases, "seconds": done or time.monotonic() - running, "interrupted": interrupted,
        "lines": fuzzer.coverage.num_lines, "corpus": len(fuzzer.corpus), "findings": files,
        "sanitized": SANITIZED and fuzzer.target.sanitized,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Fuzz or replay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--replay", nargs="+", type=Path, help="cases: TARGET__NAME.bin, .xz if compressed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.replay is None:
        options.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(fuzz(options.target, options.seconds, options.seed, options.out.resolve())))
        return
    targets, outcomes = load_targets(), {}
    for path in options.replay:
        outcomes[path.name] = isolate(targets[path.name.split("__")[0]], read_case(path))._asdict()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
