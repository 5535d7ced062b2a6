"""A child process that works on untrusted input under limits of CPU time and memory: a chat template, a grammar.

The child is a script without this package. It reads one JSON document a line, first its limits, then requests, and
answers each request with one line of JSON. It is started at the first request, and replaced if a limit ended it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError, reason

WAIT_SEC = 30.0  # for an answer: on a busy machine, the child's CPU time takes longer
_ENDS: dict[int, str] = {signal.SIGSEGV: "it nests too deep", signal.SIGABRT: "it needs too much memory"}
_INHERITED = ("LD_LIBRARY_PATH", "TZ")  # of the environment, which may hold secrets


class LimitExceeded(NanoinferError):
    """A limit has ended the child process: the same request would need as much time again."""


class LimitedProcess:
    """A child process and its replacements. Thread-safe: one request at a time.

    Args:
        script: file of the child's program.
        packages: what it imports that is not in the standard library.
        setup: its first line; "cpu_sec" is the limit that error messages name.
        purpose: "the chat template cannot be rendered", for error messages.
    """

    def __init__(self, script: Path, packages: tuple[str, ...], setup: Mapping[str, Any], purpose: str) -> None:
        self._script, self._packages, self._purpose = script, packages, purpose
        self._setup = setup
        self._child: _Child | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()

    def ask(self, request: bytes) -> dict[str, Any]:
        """Return the answer to a request, one line of JSON. Raises LimitExceeded if a limit has ended the process."""
        if self._pid != os.getpid():  # forked: the child answers the parent
            self._pid, self._lock, self._child = os.getpid(), threading.Lock(), None
        with self._lock:
            child, self._child = self._child, None
            if child is None or child.has_ended:  # memory was short, and the operating system has ended it
                child = self._start()
            line = child.ask(request)  # an exception leaves no child behind: the next call starts one
            if not line:
                raise LimitExceeded(f"{self._purpose}: {child.end(self._setup['cpu_sec'])}")
            answer: dict[str, Any] = json.loads(line)
            self._child = child
        return answer

    def _start(self) -> _Child:
        folders = [_folder(name, self._purpose) for name in self._packages]
        command = [sys.executable, "-I", "-S", str(self._script), *dict.fromkeys(folders)]
        try:
            return _Child(command, json.dumps(self._setup).encode() + b"\n")
        except (OSError, ValueError) as e:
            raise NanoinferError(f"{self._purpose}: no process can be started: {reason(e)}") from None


class _Child:
    """One child process. Deleting the object ends it."""

    def __init__(self, command: list[str], first: bytes) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._first = first

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def ask(self, request: bytes) -> bytes:
        """Return the line that answers a request; empty if the process has ended, or does not answer in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(WAIT_SEC, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):  # the answer is then missing, too
                self._process.stdin.write(self._first + request)
                self._process.stdin.flush()
            self._first = b""
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def end(self, cpu_sec: float) -> str:
        """End the process and return why there was no answer."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"it needs more than {cpu_sec:g} s of CPU time"
        if code == -signal.SIGKILL:
            return f"there was no answer within {WAIT_SEC:.0f} s, or memory was short"
        return _ENDS.get(-code, f"its process ended with code {code}")

    def __del__(self) -> None:
        if (process := getattr(self, "_process", None)) is not None:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):  # of what was not flushed
                process.stdin.close()
            process.stdout.close()


def _folder(package: str, purpose: str) -> str:
    """Return the folder that the child imports a package from."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise NanoinferError(f"{purpose}: {package} is not installed; install nanoinfer again")
    return str(Path(spec.origin).parents[1])
