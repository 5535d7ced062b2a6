"""Progress of a benchmark on stderr: a bar with the time left on a terminal, a line per case elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nanoinfer.bench.harness import Status


@contextmanager
def progress_bar(suite: str) -> Iterator[Callable[[Status], None]]:
    """Yield the function that shows a status of the harness."""
    console = Console(stderr=True)
    columns = TextColumn(suite), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    last = -1

    def show(status: Status) -> None:
        nonlocal last
        note = "" if status.seconds_left is None else f"{status.seconds_left / 60:.1f} min left, "
        note += status.what
        bar.update(task, completed=status.done, total=status.total, note=note)
        if not console.is_terminal and status.done != last:
            print(f"{suite} {status.done}/{status.total}: {note}", file=sys.stderr, flush=True)
            last = status.done

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(suite, total=1, note="")
        yield show
