"""Progress of a benchmark on stderr: a bar with the time left on a terminal, a line per case elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nanoinfer.bench.harness import Show


@contextmanager
def progress_bar(suite: str) -> Iterator[Show]:
    """Yield the function that shows the harness's progress."""
    console = Console(stderr=True)
    columns = TextColumn(suite), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    last = -1

    def show(what: str, done: int, total: int, seconds_left: float | None) -> None:
        nonlocal last
        note = what if seconds_left is None else f"{seconds_left / 60:.1f} min left, {what}"
        bar.update(task, completed=done, total=total, note=note)
        if not console.is_terminal and done != last:
            print(f"{suite} {done}/{total}: {note}", file=sys.stderr, flush=True)
            last = done

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(suite, total=1, note="")
        yield show
