"""Generate for lines that several calls submit: one thread runs the loop of batch files over a queue of lines.

    call 1: lines a b c -> [ queue ] -> BatchRunner -> records a b c -> the future of call 1
    call 2: lines d e   -> [       ]    (one thread)           d e   -> the future of call 2

The lines of all calls in flight run together, so no slot is empty while a call finishes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from nanoinfer.batch.files import Checkpoint, Line, Place
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.utils.progress import ProgressBar


@dataclass(frozen=True)
class Result:
    """The record of a line."""

    record: bytes
    """JSON, with a newline."""
    error: str
    """The message of an error record, with its line; "": it is none."""


Results = Future[list[Result]]


@dataclass(eq=False)
class _Call:
    """Lines that were submitted together."""

    num_lines: int
    future: Results = field(default_factory=Future)
    results: list[Result] = field(default_factory=list)


class LineService:
    """Runs a BatchRunner in a thread. Thread-safe.

    Args:
        llm: the model; no other thread uses it.
        options: as of a batch file.
        several: whether records name the file of their line.
    """

    def __init__(self, llm: LLM, options: BatchOptions, several: bool = False) -> None:
        self._traffic = _Traffic(several)
        runner = BatchRunner(llm, options)
        threading.Thread(target=_serve, args=(runner, self._traffic), name="lines", daemon=True).start()

    def submit(self, lines: Sequence[Line]) -> Results:
        """Queue lines; the future has their results in the same order, or the exception that ended the thread."""
        return self._traffic.put(lines)

    def __del__(self) -> None:
        self._traffic.close()


class _Traffic:
    """The lines of all calls, as the runner reads them (a `Source`), and their records as it writes them (a `Sink`)."""

    done = Checkpoint()  # no bar shows how far it is
    total_lines = None  # more may come

    def __init__(self, several: bool) -> None:
        self.num_files = 2 if several else 1
        self._queue: SimpleQueue[tuple[Line, _Call] | None] = SimpleQueue()
        self._reading: deque[_Call] = deque()  # the call of each line without a record, in the order of the lines
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        self._fault: BaseException | None = None

    def put(self, lines: Sequence[Line]) -> Results:
        """Queue the lines of a call."""
        call = _Call(len(lines))
        with self._lock:
            if self._fault is not None:
                call.future.set_exception(self._fault)
            elif not lines:
                call.future.set_result([])
            else:
                self._calls.add(call)
                for line in lines:
                    self._queue.put((line, call))
        return call.future

    def close(self) -> None:
        """End the input after what is queued."""
        self._queue.put(None)

    def fail(self, fault: BaseException) -> None:
        """End all calls, and those to come, with an exception."""
        with self._lock:
            self._fault = fault
            for call in self._calls:
                call.future.set_exception(fault)
            self._calls.clear()

    def __next__(self) -> Line:
        if (item := self._queue.get()) is None:
            raise StopIteration
        line, call = item
        self._reading.append(call)
        return line

    def ready(self) -> bool:
        """Return whether a line is queued."""
        return not self._queue.empty()

    def write(self, record: bytes, place: Place, error: str = "") -> None:
        """Give a record to the call of its line."""
        call = self._reading.popleft()
        call.results.append(Result(record, error))
        if len(call.results) == call.num_lines:
            with self._lock:
                self._calls.discard(call)
            call.future.set_result(call.results)

    def checkpoint(self) -> None:
        """Do nothing: the calls keep the records."""


def _serve(runner: BatchRunner, traffic: _Traffic) -> None:
    try:
        runner.run(traffic, traffic, ProgressBar("lines", False))
    except BaseException as e:  # of the engine: it is the calls that report it
        traffic.fail(e)
