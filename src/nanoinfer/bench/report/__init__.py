"""The report: one self-contained HTML page, and its figures as SVG and PNG files beside it.

    write_report([read(Path("ladder.json")), read(Path("peers.json"))], Path("out"))
    ->  out/index.html  out/ladder-throughput.svg  out/ladder-throughput.png  ...

The page opens from disk and fetches nothing: figures are inside it. Only what the data supports is drawn.
`panels` sorts rows, `figures` and `draw` draw them, `svg` makes the drawings fit the page, `tables` says the
same in numbers, `charts` chooses, `page` puts it together.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from nanoinfer.bench.report.charts import charts
from nanoinfer.bench.report.draw import drawing, style
from nanoinfer.bench.report.page import Section, page
from nanoinfer.bench.report.svg import render
from nanoinfer.bench.report.text import slug
from nanoinfer.bench.results import Results
from nanoinfer.errors import NanoinferError

PAGE = "index.html"


def write_report(results: list[Results], folder: Path) -> list[Path]:
    """Write the report of one or several suites; return the files written, the page first.

    Files of the same names are replaced, once all new ones are on the disk; others in the folder are left alone.

    Args:
        results: a section of the page each, in this order.
        folder: made if it does not exist.

    Raises:
        NanoinferError: no results, matplotlib is not installed, or the folder cannot be written.
    """
    if not results:
        raise NanoinferError("a report of 0 results files has nothing to show: give at least 1")
    return _write(_files(results), folder)


def _files(results: list[Results]) -> dict[str, bytes]:
    """Return the content of every file of the report by its name."""
    labels = dict.fromkeys(row.case.label for each in results for row in each.rows)
    styles = {label: style(i) for i, label in enumerate(labels)}
    files: dict[str, bytes] = {PAGE: b""}
    sections = []
    taken: Counter[str] = Counter()
    with drawing():
        for each in results:
            section = Section(_unique(slug(each.suite), taken), each, [])
            for chart in charts(each, styles):
                name = _unique(f"{section.name}-{chart.name}", taken)
                made = render(chart.figure, name, chart.title, chart.caption)
                section.charts.append((chart, made.inline))
                files |= {f"{name}.svg": made.file, f"{name}.png": made.png}
            sections.append(section)
    files[PAGE] = page(sections).encode()
    return files


def _unique(name: str, taken: Counter[str]) -> str:
    """Return a name that was not given before: "a", then "a-2"."""
    taken[name] += 1
    return name if taken[name] == 1 else _unique(f"{name}-{taken[name]}", taken)


def _write(files: dict[str, bytes], folder: Path) -> list[Path]:
    """Write files into a folder: first all of them into a folder of their own in it, then moved to their places."""
    paths = [folder / name for name in files]
    staging: Path | None = None
    made = False
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if blocked := [path for path in paths if path.is_dir()]:
            raise IsADirectoryError(f"{blocked[0]} is a folder")
        staging = Path(tempfile.mkdtemp(prefix=".report-", dir=folder))
        for name, content in files.items():
            (staging / name).write_bytes(content)
        for path in paths:
            os.replace(staging / path.name, path)
    except OSError as e:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise NanoinferError(f"report folder {folder} cannot be written ({e}): name another one") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return paths
