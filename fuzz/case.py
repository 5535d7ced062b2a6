"""Run one case, an input of a target, in a process with limits, and classify the outcome.

The limits of a case are CPU_SECONDS of CPU time, BLOCKED_SECONDS asleep, and MEMORY of address space.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import logging
import mmap
import os
import pickle
import re
import resource
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CPU_SECONDS = 5.0
BLOCKED_SECONDS = 3.0  # asleep without using the CPU
MEMORY = 1 << 30  # of address space, in addition to the process's before the case
PEAK = 256 << 20  # of resident memory that a case may add: no input is larger than 4 MiB
MAX_MESSAGE = 2000  # characters
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None  # in memory, because each case writes files


def load_sanitized() -> bool:
    """Load the extension in NANOINFER_TEST_EXTENSION instead of the installed one; return whether it is set."""
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

from targets import Target  # noqa: E402

import nanoinfer  # noqa: E402
from nanoinfer import NanoinferError  # noqa: E402

PACKAGE = str(Path(nanoinfer.__file__).parent)


class Outcome(NamedTuple):
    """Outcome of a case."""

    kind: str
    """accepted, refused, or a finding: raise, wrong, message, memory, slow, hang, crash."""
    signature: str = ""
    """Key of the fault: outcomes with equal signatures probably have the same cause."""
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        """Whether the outcome is a fault."""
        return self.kind not in ("accepted", "refused")


class Messages(logging.Handler):
    """Collects the package's log messages, which users see on the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def place_of(error: BaseException) -> str:
    """Return the file and name of the innermost function of the package in a traceback: "load.py:load_model"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    frames = frames or traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def judge(target: Target, data: bytes, folder: Path, messages: Messages) -> Outcome:
    """Run a case and return its outcome."""
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
    """Set a timer that ends this process after `seconds` of CPU time; 0 removes it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def wait(child: int, num_cases: Callable[[], int] = lambda: 0) -> int:
    """Wait for a child and return its exit status. End it if it sleeps in one case for BLOCKED_SECONDS."""
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
    """Set the limits of a child and redirect its output, including fault tracebacks, to `log`."""
    handle = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(handle, 2)
    os.dup2(handle, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not SANITIZED:  # a sanitizer prints its own traceback and reserves terabytes of address space
        faulthandler.enable()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * mmap.PAGESIZE + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, all_threads=False, chain=True)


def crash_of(status: int, log: Path) -> Outcome:
    """Return the outcome of a child that a signal or a sanitizer ended."""
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
    """Remove the files of a case from its folder; return the folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder


def isolate(target: Target, data: bytes) -> Outcome:
    """Run one case in a separate child process."""
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
    """Return the only handler of the package's log messages."""
    messages, log = Messages(), logging.getLogger("nanoinfer")
    log.handlers, log.propagate = [messages], False
    log.setLevel(logging.INFO)
    return messages


def read_case(path: Path) -> bytes:
    """Return the input in a case file, decompressed if its suffix is .xz."""
    import lzma

    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
