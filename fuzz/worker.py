"""One target's fuzzer: a process that forks children, which run cases until one of them ends its child.

    python fuzz/worker.py TARGET --seconds 60 --seed 0 --out build/fuzz     fuzz; stats as JSON on stdout
    python fuzz/worker.py --replay FILE ...                                 what each case does, as JSON

Each case has limits: CPU_SECONDS by the kernel's timer, BLOCKED_SECONDS asleep, MEMORY of address space. Guided by coverage:
an input that reaches a new line of the package, or gets a new kind of answer, is mutated further.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import logging
import mmap
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, NamedTuple

CPU_SECONDS = 5.0
BLOCKED_SECONDS = 3.0  # asleep without using the CPU
MEMORY = 1 << 30  # of address space, beyond what the process has before the case
MAX_CORPUS = 400  # from here on, only inputs that reach new lines are kept
PEAK = 256 << 20  # of resident memory that a case may add: no input is larger than 4 MiB
MAX_MESSAGE = 2000  # characters
MINIMISE_SHARE, MINIMISE_SECONDS = 0.2, 10.0  # of the time given; for one finding
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # in memory: each case writes files


def load_sanitized() -> bool:
    """Put the extension in NANOINFER_TEST_EXTENSION before the installed one; return whether there is one."""
    if not (folder := os.environ.get("NANOINFER_TEST_EXTENSION")):
        return False
    (library,) = Path(folder).glob("_native*.so")
    spec = importlib.util.spec_from_file_location("nanoinfer._native", library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["nanoinfer._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nanoinfer._native"])
    return True


SANITIZED = load_sanitized()

import torch  # noqa: E402
from mutate import MAX_BYTES  # noqa: E402
from targets import Target, load_targets  # noqa: E402

import nanoinfer  # noqa: E402
from nanoinfer import NanoinferError  # noqa: E402

PACKAGE = str(Path(nanoinfer.__file__).parent)


class Outcome(NamedTuple):
    """What came of a case."""

    kind: str
    """accepted, refused, or a finding: raise, wrong, message, memory, slow, hang, crash."""
    signature: str = ""
    """Equal for what is probably the same fault."""
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether this must not happen."""
        return self.kind not in ("accepted", "refused")


# One case --------------------------------------------------------------------------------------------------


class Messages(logging.Handler):
    """Keeps what the package logs: it reaches the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def place_of(error: BaseException) -> str:
    """Return the innermost function of the package that an error passed, and its file: "load.py:load_model"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    frames = frames or traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and those that it was raised from or during."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def judge(target: Target, data: bytes, folder: Path, messages: Messages) -> Outcome:
    """Run a case and say what came of it."""
    messages.texts.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error: BaseException | None = None
    try:
        target.run(data, folder)
    except BaseException as e:
        error = e
    finally:
        sys.settrace(None)
    where, name = (place_of(error), type(error).__name__) if error is not None else ("", "")
    said = messages.texts + ([str(error)] if isinstance(error, NanoinferError) else [])
    for text in said:
        if not text.isprintable() or len(text) > MAX_MESSAGE:
            what = (
                "has a character that is not printable" if not text.isprintable() else f"is {len(text)} characters long"
            )
            return Outcome("message", f"message {what.split()[0]} {where}", f"a message {what}: {text!r:.300}")
    out_of_memory = any(isinstance(e, MemoryError) or "allocate memory" in str(e) for e in causes(error))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if out_of_memory or (peak > PEAK and not SANITIZED):
        return Outcome("memory", f"memory {where}", f"it took {peak >> 20} MiB or more: {name} {error}"[:300])
    if error is None:
        return Outcome("accepted")
    if isinstance(error, NanoinferError):
        text = re.sub(r"\d+|'[^']*'|\"[^\"]*\"|/\S+", "#", str(error))
        return Outcome("refused", f"{where} {re.sub('[^a-zA-Z #]', '', text)[:80]}", str(error)[:300])
    if isinstance(error, AssertionError):
        return Outcome("wrong", f"wrong {where} {str(error)[:20]}", str(error)[:300])
    return Outcome("raise", f"raise {name} {where}", f"{name}: {error}"[:300])


def limit(seconds: float) -> None:
    """Let the kernel end this process after `seconds` of CPU time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def wait(child: int, num_cases: Callable[[], int] = lambda: 0) -> int:
    """Return the exit status of a child; end it where it sleeps in one case for BLOCKED_SECONDS."""
    handle, step, asleep, before = os.pidfd_open(child), 0.25, 0.0, ("", 0)
    try:
        while not select.select([handle], [], [], step)[0]:
            fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
            now = f"{fields[0]} {fields[11]} {fields[12]}", num_cases()  # state, CPU time of the user and the system
            asleep = asleep + step if now == before and fields[0] == "S" else 0.0
            before = now
            if asleep >= BLOCKED_SECONDS:
                os.kill(child, signal.SIGALRM)
        return os.waitpid(child, 0)[1]
    finally:
        os.close(handle)


def prepare_child(log: Path) -> None:
    """Set what holds for all cases of a child: limits, and where its faults are written."""
    handle = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(handle, 2)
    os.dup2(handle, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not SANITIZED:  # which prints a trace of its own, and reserves terabytes of addresses
        faulthandler.enable()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * mmap.PAGESIZE + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, all_threads=False, chain=True)


def crash_of(status: int, log: Path) -> Outcome:
    """Return what ended a child: a signal, or a sanitizer."""
    text = log.read_text(errors="replace") if log.exists() else ""
    frames = re.findall(rf'File "{re.escape(PACKAGE)}/(\S+)", line \d+ in (\S+)', text)
    where = f"{Path(frames[0][0]).name}:{frames[0][1]}" if frames else "?"
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return Outcome("slow", f"slow {where}", f"more than {CPU_SECONDS:g} s of CPU time in {where}")
    if number == signal.SIGALRM:
        return Outcome("hang", f"hang {where}", f"blocked in {where}")
    summary = re.search(r"SUMMARY: (.*)|runtime error: (.*)", text)
    name = signal.Signals(number).name if number else f"exit status {os.waitstatus_to_exitcode(status)}"
    what = next(filter(None, summary.groups()), "") if summary else where
    return Outcome("crash", f"crash {name} {re.sub(r'0x[0-9a-f]+', '', what)[:100]}", f"{name}: {text[-400:].strip()}")


def empty(folder: Path) -> Path:
    """Remove what a case left in its folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder


def isolate(target: Target, data: bytes) -> Outcome:
    """Run one case in a child of its own."""
    with TemporaryDirectory(dir=SCRATCH) as name:
        folder, log, answer = Path(name, "case"), Path(name, "log"), Path(name, "answer")
        folder.mkdir()
        child = os.fork()
        if child == 0:
            prepare_child(log)
            os.chdir(folder)
            limit(CPU_SECONDS)
            answer.write_bytes(pickle.dumps(judge(target, data, folder, listen())))
            os._exit(0)
        status = wait(child)
        return pickle.loads(answer.read_bytes()) if status == 0 else crash_of(status, log)


def listen() -> Messages:
    """Return a handler that gets what the package logs, and nothing else does."""
    messages, log = Messages(), logging.getLogger("nanoinfer")
    log.handlers, log.propagate = [messages], False
    log.setLevel(logging.INFO)
    return messages


# Many cases ------------------------------------------------------------------------------------------------


class Coverage:
    """Lines of the package, and kinds of answers, that were seen."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.new: set[Any] = set()
        self._ours: dict[CodeType, bool] = {}

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow calls into the package (sys.settrace)."""
        code = frame.f_code
        if (ours := self._ours.get(code)) is None:
            ours = self._ours[code] = code.co_filename.startswith(PACKAGE)
        return self.line if ours else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Note a line."""
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self.seen:
            self.new.add(key)
        return self.line

    @property
    def num_lines(self) -> int:
        """Lines seen."""
        return sum(isinstance(key, tuple) for key in self.seen)


class Fuzzer:
    """A target with its corpus, its coverage and what was found."""

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
        """Cases that were run."""
        return int.from_bytes(self.shared[:8], "little")

    def run_child(self, deadline: float) -> bool:
        """Fork, and let the child run cases; learn what it learned. Returns whether time is left."""
        self.children += 1
        log, events = self.folder / "log", self.folder / "events"
        events.write_bytes(b"")
        child = os.fork()
        if child == 0:
            try:
                prepare_child(log)
                self.loop(deadline, events)
                os._exit(0)
            except BaseException:  # the parent's code must not run here
                traceback.print_exc()
                os._exit(9)
        status = wait(child, lambda: self.cases)
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
        """Keep an input that reached something new, and what was found."""
        self.coverage.seen |= new
        if outcome.is_finding:
            self.findings.setdefault(outcome.signature, (outcome, data))
        else:
            self.corpus.append(data)
        self.todo = [d for d in self.todo if d != data]

    def loop(self, deadline: float, events: Path) -> None:
        """Run cases; what is new goes to `events`. The child does this."""
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
                limit(2 * CPU_SECONDS)  # tracing takes time too: `minimise` measures without
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
                if outcome.kind == "memory":  # the peak of a process never falls: go on in a new one
                    return

    def mutate(self, rng: random.Random) -> bytes:
        """Return a new input."""
        corpus = self.corpus or self.target.seeds()
        some = rng.choices(corpus[-20:] if rng.random() < 0.4 else corpus, k=3)
        data = min(some, key=len) if rng.random() < 0.9 else some[0]  # the small ones are quick
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = self.target.mutate(rng, data, corpus)[:MAX_BYTES]
        return data

    def minimise(self, outcome: Outcome, data: bytes, end: float) -> tuple[bytes, bool | None]:
        """Delete parts of an input while the same comes of it; return it, and whether it came again (None: no time)."""
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
    """Fuzz a target; write what was found to `out`, and return the counts."""
    start = time.monotonic()
    with TemporaryDirectory(dir=SCRATCH) as folder:
        fuzzer = Fuzzer(name, load_targets()[name], seed, Path(folder))
        running = time.monotonic()
        interrupted, done = False, 0
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


def read_case(path: Path) -> bytes:
    """Return the input in a case."""
    import lzma

    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


if __name__ == "__main__":
    main()
