"""Progress on stderr of what takes longer than two seconds: one line on a terminal, which is drawn again and again;
elsewhere a line now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

_Bar = TypeVar("_Bar", bound="ProgressBar")
DELAY_SEC = 2.0  # before the line is drawn
INTERVAL_SEC = 0.2  # between two drawings
LINE_SEC = 30.0  # between two lines where stderr is no terminal


class ProgressBar:
    """Shows how much is done of how much, a note and the time left. A context manager.

    Args:
        label: what is done.
        show: None: on a terminal, after DELAY_SEC; True: at once, also where stderr is no terminal; False: never.
        clock: seconds; a fake one in tests.
        lines: with show=None, whether to print a line each LINE_SEC where stderr is no terminal: for commands.
    """

    def __init__(
        self, label: str, show: bool | None = None, clock: Callable[[], float] = time.monotonic, *, lines: bool = False
    ) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if show is None and not is_terminal:
            show = None if lines and sys.stderr is not None else False
        self._label, self._clock, self._is_drawn = label, clock, False
        self._first: tuple[float, int] | None = None  # time and count of the first update
        self._in_place = is_terminal or bool(show)
        self._interval = INTERVAL_SEC if self._in_place else LINE_SEC
        delay = math.inf if show is False else 0.0 if show else DELAY_SEC if self._in_place else LINE_SEC
        self._next = clock() + delay

    def due(self) -> bool:
        """Return whether `update` would draw: for callers whose counting takes time."""
        return self._clock() >= self._next

    def update(self, done: int, total: int | None, note: str = "") -> None:
        """Draw the line if the last drawing is old enough; `total` is None if it is not known."""
        now = self._clock()
        first_time, first_done = self._first = self._first or (now, done)
        if now < self._next:
            return
        self._next = now + self._interval
        parts = [f"{done:,}" + ("" if total is None else f" of {total:,}"), note]
        if total is not None and first_done < done:
            parts.append(f"{timedelta(seconds=round((now - first_time) / (done - first_done) * (total - done)))} left")
        line = f"{self._label}: {', '.join(filter(None, parts))}"
        if self._in_place:
            import shutil

            self._write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            self._is_drawn = True
        else:
            self._write(f"nanoinfer: {line}\n")

    def print(self, line: str) -> None:
        """Print a line on stderr, above the progress; also where nothing is drawn."""
        self._write(("\r\x1b[K" if self._is_drawn else "") + f"{line}\n")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a full or closed stderr
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self: _Bar) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._write("\n")
