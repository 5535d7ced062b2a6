"""What engines need where a process forks, or exits while a thread generates.

Fork: the child has the parent's memory but only the thread that forked. torch's pools (OpenMP, MKL, the compiler's
workers) would wait for threads that are not there, so in a child torch computes with one thread and uses no pool; a
program may raise that with torch.set_num_threads where the parent had computed nothing. A step lock that another thread
held at the fork is an error in the child.

Exit: Python (before 3.14) ends a daemon thread as soon as it asks for the interpreter's lock, by unwinding its stack,
and C++ code on that stack then aborts the process. So the exit waits for steps that are running, and threads that would
start another one sleep.

This is the state of a process, and lives in this module: the one place of variables that change.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nanoinfer.errors import NanoinferError

EXIT_WAIT_SEC = 30.0
"""How long the exit waits for running steps."""

_busy: dict[int, list[StepLock | None]] = {}
"""Thread -> the locks that it holds or waits for (None: `computing`)."""
_generation = 0
_is_exiting = False


class StepLock:
    """A lock around an engine and what belongs to it: one thread at a time, which may take it again.

    Raises:
        NanoinferError: on entering, in a child that was forked while another thread held it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_lost = False

    def __enter__(self) -> None:
        if self._is_lost:
            raise NanoinferError(
                "this process was forked while another thread was using the engine: load the model in the process that"
                " uses it"
            )
        _begin(self)
        try:
            self._lock.acquire()
        except BaseException:
            _end()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        _end()


@contextmanager
def computing() -> Iterator[None]:
    """Mark a thread that computes without a step lock, so that the exit waits for it. Also a decorator."""
    _begin(None)
    try:
        yield
    finally:
        _end()


def generation() -> int:
    """Return how many forks lie between this process and the one that imported nanoinfer: 0 if none."""
    return _generation


def _begin(lock: StepLock | None) -> None:
    thread = threading.get_ident()
    held = _busy.setdefault(thread, [])
    if _is_exiting and not held and threading.current_thread() is not threading.main_thread():
        del _busy[thread]
        while True:
            time.sleep(3600)
    held.append(lock)


def _end() -> None:
    thread = threading.get_ident()
    held = _busy[thread]
    held.pop()
    if not held:
        del _busy[thread]


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    own = threading.get_ident()
    for thread in [t for t in _busy if t != own]:
        for lock in _busy.pop(thread):
            if lock is not None:
                lock._is_lost = True
    torch, inductor = (sys.modules.get(name) for name in ("torch", "torch._inductor.config"))
    if hasattr(torch, "set_num_threads"):  # not while torch is being imported
        torch.set_num_threads(1)  # type: ignore[union-attr]
    if hasattr(inductor, "compile_threads"):
        inductor.compile_threads = 1  # type: ignore[union-attr]


def _at_exit() -> None:
    global _is_exiting
    _is_exiting = True
    own, end = threading.get_ident(), time.monotonic() + EXIT_WAIT_SEC
    while any(thread != own for thread in list(_busy)) and time.monotonic() < end:
        time.sleep(0.001)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
