"""Support for processes that fork, or that exit while a thread generates; their memory.

Fork: the child has the parent's memory, but only the thread that forked. PyTorch's thread pools (OpenMP, MKL, the
compiler's workers) would wait for threads that do not exist, so PyTorch computes with one thread in a child. A program
may raise that with torch.set_num_threads if the parent had not computed anything.

Exit: before 3.14, Python ends a daemon thread by unwinding its stack when the thread requests the interpreter lock, and
C++ code on that stack then aborts the process. The exit handler therefore acquires every step lock, which waits for the
running steps, and does not release it. A thread that would start another step waits before it requests the lock:
otherwise a thread that runs steps in a loop could get the lock before the exit handler does.

This is state of the process, so it is in this module's variables. No other module has variables that change.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import ref

EXIT_WAIT_SEC = 30.0
"""Longest time that the exit handler waits for running steps, in seconds."""

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the signal that this process gets when the one that started it ends
_locks: list[ref[threading.Lock]] = []
_generation = 0
_is_exiting = False


def step_lock() -> threading.Lock:
    """Return a new lock to be held while an engine computes.

    It is a threading.Lock, because Python handles no signal between its acquisition and the body of its `with`
    statement, nor between the body and its release.
    """
    lock = threading.Lock()
    if _is_exiting and threading.current_thread() is not threading.main_thread():
        lock.acquire()  # never released: this thread may hold another lock, which the exit handler waits for
    else:
        _locks.append(ref(lock, _locks.remove))
    return lock


@contextmanager
def computing() -> Iterator[None]:
    """Make the exit handler wait for a thread that computes without an engine's lock. Also usable as a decorator."""
    with step_lock():
        yield


def wait_if_exiting() -> None:
    """Block for ever if the process exits and this is not the main thread; otherwise return at once."""
    while _is_exiting and threading.current_thread() is not threading.main_thread():
        time.sleep(EXIT_WAIT_SEC)


def is_exiting() -> bool:
    """Return whether the process exits and this is the main thread, which may then compute without a lock."""
    return _is_exiting and threading.current_thread() is threading.main_thread()


def generation() -> int:
    """Return the number of forks between the process that imported nanoinfer and this one; 0 if it is the same."""
    return _generation


def trim_memory() -> None:
    """Return memory that was freed to the operating system, where the C library keeps it (glibc).

    It takes milliseconds, or 0.1 s with much memory in small pieces, in which other threads wait to allocate: call it
    seldom.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def end_with_parent(parent: int | None = None) -> None:
    """Let the operating system kill this process when the one that started it ends. Has an effect on Linux.

    Args:
        parent: process id of that process, if it may have ended already: this process then exits now.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1
    torch, inductor = (sys.modules.get(name) for name in ("torch", "torch._inductor.config"))
    if hasattr(torch, "set_num_threads"):  # False while torch is being imported
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
