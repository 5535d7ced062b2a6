"""Progress of a benchmark on stderr: a bar on a terminal, a line per case elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nanoinfer.bench.harness import Show
from nanoinfer.progress import ProgressBar


@contextmanager
def progress_bar(suite: str) -> Iterator[Show]:
    """Yield the function that shows the harness's progress."""
    live, last = sys.stderr.isatty(), -1

    def show(what: str, done: int, total: int, seconds_left: float | None) -> None:
        nonlocal last
        bar.update(done, total, what, seconds_left)
        if not live and done != last:
            left = "" if seconds_left is None else f"{seconds_left / 60:.1f} min left, "
            bar.print(f"{suite} {done}/{total}: {left}{what}")
            last = done

    with ProgressBar(suite) as bar:
        yield show
