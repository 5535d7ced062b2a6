"""Progress of a benchmark on stderr: a bar with the time left on a terminal, a line per case elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from nanoinfer.bench.harness import Status


class Progress:
    """Shows where a suite is. Use as a context manager."""

    def __init__(self, suite: str) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal
        self._bar = Bar(
            TextColumn(suite), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            console=console, transient=True, disable=not self._live,
        )  # fmt: skip
        self._task = self._bar.add_task(suite, total=1, note="")
        self._suite = suite
        self._last = -1

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, status: Status) -> None:
        """Show a status of the harness."""
        left = "" if status.seconds_left is None else f"{status.seconds_left / 60:.1f} min left, "
        self._bar.update(self._task, completed=status.done, total=status.total, note=left + status.what)
        if not self._live and status.done != self._last:
            print(f"{self._suite} {status.done}/{status.total}: {left}{status.what}", file=sys.stderr, flush=True)
            self._last = status.done
