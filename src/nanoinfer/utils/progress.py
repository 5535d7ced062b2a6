"""A progress bar on stderr, for what takes longer than two seconds. rich is imported when the bar is first drawn."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

_Bar = TypeVar("_Bar", bound="ProgressBar")
DELAY_SEC = 2.0  # before a bar is drawn
INTERVAL_SEC = 0.2  # between two drawings


class ProgressBar:
    """Shows how much is done of how much, the time left and a note. A context manager.

    Args:
        label: what is done.
        show: None: on a terminal, after DELAY_SEC; True: at once, also where stderr is no terminal (one line at the
            end); False: never.
        clock: seconds; a fake one in tests.
    """

    def __init__(self, label: str, show: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if show is None and (sys.stderr is None or not sys.stderr.isatty()):
            show = False
        self._label, self._clock = label, clock
        self._next = math.inf if show is False else clock() + (0.0 if show else DELAY_SEC)
        self._keep = bool(show)  # on the screen when it has ended
        self._bar: Progress | None = None

    def due(self) -> bool:
        """Return whether `update` would draw: ask first where counting takes time."""
        return self._clock() >= self._next

    def update(self, done: int, total: int | None, note: str = "") -> None:
        """Draw the bar if the last drawing is old enough; `total` is None if it is not known."""
        if not self.due():
            return
        self._next = self._clock() + INTERVAL_SEC
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
