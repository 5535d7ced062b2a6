"""A progress bar on stderr, for what takes longer than two seconds. rich is imported when the bar is first drawn."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_SEC = 2.0  # before a bar is drawn
INTERVAL_SEC = 0.2  # between two drawings


class ProgressBar:
    """Shows how much is done of how much, and the time left. A context manager.

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

    def update(self, done: int, total: int) -> None:
        """Draw the bar, where it is time to."""
        if not self.due():
            return
        self._next = self._clock() + INTERVAL_SEC
        if self._bar is None:
            self._bar = self._start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, refresh=True)

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(self._label), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
        # No thread of its own: it would outlive a fork, and a step must not wait for it.
        bar = Progress(*columns, console=Console(stderr=True), transient=not self._keep, auto_refresh=False)
        bar.add_task(self._label, total=None)
        bar.start()
        return bar

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is None:
            return
        if kind is None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, completed=task.total)
        self._bar.stop()
