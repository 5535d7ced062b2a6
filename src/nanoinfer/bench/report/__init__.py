"""The report: one self-contained HTML page with interactive charts, and the charts as SVG files beside it.

`panels` sorts rows into figures, `charts` fills the Vega-Lite templates of charts.json (`marks`), `headlines` computes
the findings, and `page` renders the template page.html.j2.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nanoinfer.bench.formatting import clean, slug
from nanoinfer.bench.results import Results
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.utils.files import write_folder

PAGE = "index.html"


def write_report(results: list[Results], folder: Path) -> list[Path]:
    """Write the report of some suites, a section each; return the files written, the page first.

    Files of the same names are replaced. Raises NanoinferError without results, a package, or a writable folder.
    """
    if not results:
        raise NanoinferError("a report of 0 results files has nothing to show: give at least 1")
    files = _files(clean(results))
    write_folder(folder, files)
    return [folder / name for name in files]


def _files(results: list[Results]) -> dict[str, bytes]:
    """Return the content of every file of the report by its name."""
    try:
        import vl_convert  # noqa: F401  which draws them: its modules import it where they use it

        from nanoinfer.bench.report.charts import figures
        from nanoinfer.bench.report.page import page, section
    except ImportError as e:
        raise NanoinferError(f"the report cannot be written: {missing_extra(e.name or 'a package', 'bench')}") from None
    files: dict[str, bytes] = {PAGE: b""}
    sections = []
    taken: Counter[str] = Counter()
    for each in results:
        name, drawn = _unique(slug(each.suite), taken), figures(each)
        sections.append(section(name, each, drawn))
        for figure in drawn:
            files[f"{_unique(f'{name}-{figure.name}', taken)}.svg"] = figure.svg
    files[PAGE] = page(sections).encode()
    return files


def _unique(name: str, taken: Counter[str]) -> str:
    """Return a name that was not given before: "a", then "a-2"."""
    taken[name] += 1
    return name if taken[name] == 1 else _unique(f"{name}-{taken[name]}", taken)
