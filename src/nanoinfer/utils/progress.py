"""A progress bar on stderr, for what takes longer than two seconds; where that is no terminal, a line now and then.

rich is imported when the bar is first drawn.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

_Bar = TypeVar("_Bar", bound="ProgressBar")
DELAY_SEC = 2.0  # before a bar is drawn
INTERVAL_SEC = 0.2  # between two drawings
LINE_SEC = 30.0  # between two lines


class ProgressBar:
    """Shows how much is done of how much, the time left and a note. A context manager.

    Args:
        label: what is done.
        show: None: on a terminal, after DELAY_SEC; True: at once, also where stderr is no terminal (one line at the
            end); False: never.
        clock: seconds; a fake one in tests.
        lines: with show=None, whether to print a line each LINE_SEC where stderr is no terminal: for commands.
    """

    def __init__(
        self, label: str, show: bool | None = None, clock: Callable[[], float] = time.monotonic, *, lines: bool = False
    ) -> None:
        self._lines = False
        if show is None and (sys.stderr is None or not sys.stderr.isatty()):
            show, self._lines = False, lines and sys.stderr is not None
        self._label, self._clock = label, clock
        delay = LINE_SEC if self._lines else math.inf if show is False else 0.0 if show else DELAY_SEC
        self._next = clock() + delay
        self._keep = bool(show)  # on the screen when it has ended
        self._bar: Progress | None = None

    def due(self) -> bool:
        """Return whether `update` would draw: ask first where counting takes time."""
        return self._clock() >= self._next

    def update(self, done: int, total: int | None, note: str = "") -> None:
        """Draw the bar if the last drawing is old enough; `total` is None if it is not known."""
        if not self.due():
            return
        self._next = self._clock() + (LINE_SEC if self._lines else INTERVAL_SEC)
        if self._lines:
            parts = (f"{done:,}" + ("" if total is None else f" of {total:,}"), note)
            with suppress(OSError):  # a full or closed stderr
                print(f"nanoinfer: {self._label}: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = self._start(total)
        task = self._bar.tasks[0]
        self._bar.update(task.id, completed=done, total=total, note=note)
        left = task.time_remaining
        self._bar.update(task.id, left="" if left is None else f"{timedelta(seconds=round(left))} left", refresh=True)

    def print(self, line: str) -> None:
        """Print a line on stderr, above the bar; also where there is no bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _start(self, total: int | None) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # the note alone is cut where the terminal is narrow
        # No thread of its own: it would outlive a fork, and a step must not wait for it.
        bar = Progress(
            TextColumn(self._label, markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}", markup=False, table_column=rest),
            console=Console(stderr=True), transient=not self._keep, auto_refresh=False, expand=True,
            get_time=self._clock,
        )  # fmt: skip
        bar.add_task(self._label, total=total, note="", left="")
        bar.start()
        return bar

    def __enter__(self: _Bar) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is None:
            return
        if kind is None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, completed=task.total, left="")
        self._bar.stop()
