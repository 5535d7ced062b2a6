"""Raises KeyboardInterrupt at every so many-th line of the package, and checks what is left."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanoinfer
from helpers.scheduling import check_integrity
from nanoinfer.core.core import Core
from nanoinfer.engines import registry

PACKAGE = str(Path(nanoinfer.__file__).parent)
how_often = pytest.mark.parametrize("num_interrupts", [100, pytest.param(2000, marks=pytest.mark.nightly)])
ENGINES = [name for name, spec in registry.ENGINES.items() if "cpu" in spec.devices and name != "compiled"]


class Interrupter:
    """Raises KeyboardInterrupt at the given line event in this package's code; counts the events."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupter | None:
        if event == "call":
            return self if frame.f_code.co_filename.startswith(PACKAGE) else None
        if event == "line" and not unreachable(frame):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self


def unreachable(frame: FrameType) -> bool:
    """Whether no signal can raise here: Python drops what a finalizer raises, and looks for signals neither on the way
    into and out of a `with` on a lock (a trace function is called on that line both times) nor at a `try`.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    locks = line.strip().startswith("with ") and "self._lock" in line
    return frame.f_code.co_name == "__del__" or locks or line.strip() == "try:"


@contextmanager
def tracing(interrupter: Interrupter) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        yield
    finally:
        sys.settrace(before)


def check(core: Core) -> None:
    """What is open in the engine is what the scheduler's sequences hold, and what it keeps."""
    owned = [s.handle for s in core.scheduler.running if s.handle is not None] + core.scheduler.cache.idle
    assert sorted(core.engine.handles) == sorted(owned)
    check_integrity(core.scheduler)


def interrupt_everywhere(core: Core, work: Callable[[], Any], num: int) -> None:
    """Interrupt `work` at `num` points spread over all of its lines, one at a time; then it must work as before."""
    expected = work()
    counter = Interrupter(-1)
    with tracing(counter):
        work()
    for i in range(num):
        with suppress(KeyboardInterrupt), tracing(Interrupter(1 + i * counter.count // num)):
            work()
        gc.collect(0)
        check(core)
        if i % 50 == 0:
            assert work() == expected
            assert not core.unfinished
            assert set(core.engine.handles) == set(core.scheduler.cache.idle)
    assert work() == expected
