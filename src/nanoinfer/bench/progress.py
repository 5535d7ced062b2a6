"""Progress of a benchmark on stderr: a bar on a terminal, a line per case elsewhere."""

from __future__ import annotations

import sys

from nanoinfer.bench.harness import Status
from nanoinfer.progress import ProgressBar


class Progress(ProgressBar):
    """Shows where a suite is. Use as a context manager."""

    def __init__(self, suite: str) -> None:
        super().__init__(suite)
        self._suite, self._live, self._last = suite, sys.stderr.isatty(), -1

    def show(self, status: Status) -> None:
        """Show a status of the harness."""
        self.update(status.done, status.total, status.what, status.seconds_left)
        if not self._live and status.done != self._last:
            left = "" if status.seconds_left is None else f"{status.seconds_left / 60:.1f} min left, "
            self.print(f"{self._suite} {status.done}/{status.total}: {left}{status.what}")
            self._last = status.done
