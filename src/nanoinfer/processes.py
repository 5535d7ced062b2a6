"""What engines need where a process forks, or exits while a thread generates.

Fork: the child has the parent's memory but only the thread that forked. torch's pools (OpenMP, MKL, the compiler's
workers) would wait for threads that are not there, so in a child torch computes with one thread and uses no pool; a
program may raise that with torch.set_num_threads where the parent had computed nothing.

Exit: Python (before 3.14) ends a daemon thread as soon as it asks for the interpreter's lock, by unwinding its stack,
and C++ code on that stack then aborts the process. So the exit takes every step lock, which waits for the steps that
are running, and keeps it: a thread that would start another step waits until the process is gone. Such a thread waits
before it asks for the lock, since a thread that runs step after step would be given the lock before the exit is.

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
from weakref import ref

EXIT_WAIT_SEC = 30.0
"""How long the exit waits for running steps."""

_locks: list[ref[threading.Lock]] = []
_generation = 0
_is_exiting = False


def step_lock() -> threading.Lock:
    """Return a new lock to be held while an engine computes.

    A plain lock: Python handles no signal between taking it and the block of its `with`, nor before its release.
    """
    lock = threading.Lock()
    if _is_exiting and threading.current_thread() is not threading.main_thread():
        lock.acquire()  # for good: whoever makes a lock now may hold another, for which the exit waits
    else:
        _locks.append(ref(lock, _locks.remove))
    return lock


@contextmanager
def computing() -> Iterator[None]:
    """Mark a thread that computes without an engine's lock, so that the exit waits for it. Also a decorator."""
    with step_lock():
        yield


def wait_if_exiting() -> None:
    """Return at once, but in another thread than the main one of a process that exits: never."""
    while _is_exiting and threading.current_thread() is not threading.main_thread():
        time.sleep(EXIT_WAIT_SEC)


def is_exiting() -> bool:
    """Return whether this is the main thread after the exit took all locks: it may compute without one."""
    return _is_exiting and threading.current_thread() is threading.main_thread()


def generation() -> int:
    """Return how many forks lie between this process and the one that imported nanoinfer: 0 if none."""
    return _generation


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    torch, inductor = (sys.modules.get(name) for name in ("torch", "torch._inductor.config"))
    if hasattr(torch, "set_num_threads"):  # not while torch is being imported
        torch.set_num_threads(1)  # type: ignore[union-attr]
    if hasattr(inductor, "compile_threads"):
        inductor.compile_threads = 1  # type: ignore[union-attr]


def _at_exit() -> None:
    global _is_exiting
    _is_exiting = True
    end = time.monotonic() + EXIT_WAIT_SEC
    for lock in [r() for r in _locks.copy()]:
        if lock is not None:
            lock.acquire(timeout=max(0.0, end - time.monotonic()))


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
