"""The report: one self-contained HTML page with interactive charts, and the charts as SVG files beside it.

`panels` sorts rows into figures and computes the findings, `charts` draws them, and the template `page.html.j2` shows
for each suite its findings and figures, and in folded sections all numbers, the machine and the command. The page
fetches nothing: it contains the charts' library and their data.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from nanoinfer.bench.case import Row
from nanoinfer.bench.formatting import DASH, clean, slug
from nanoinfer.bench.report.charts import VEGA_LITE, Figure, figures
from nanoinfer.bench.report.panels import headlines
from nanoinfer.bench.results import Results
from nanoinfer.bench.table import COLUMNS
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
        import vl_convert  # noqa: F401  which draws them: `charts` imports it where it uses it
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


def page(sections: Sequence[dict[str, Any]]) -> str:
    """Return the HTML document of some `section`s."""
    loader = jinja2.PackageLoader("nanoinfer.bench.report", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    title = f"nanoinfer bench: {', '.join(section['suite'] for section in sections)}"
    return environment.get_template("page.html.j2").render(title=title, sections=sections, bundle=_bundle())


@functools.cache
def _bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`."""
    import vl_convert

    made: str = cast(Any, vl_convert).javascript_bundle(vl_version=VEGA_LITE)  # its stub asks for a snippet
    return made.replace("</script", "<\\/script")


def section(name: str, results: Results, figures: list[Figure]) -> dict[str, Any]:
    """Return what the template shows of a suite; `name` is unique on the page."""
    heads, lines = table(results.rows)
    count = f"{len(results.rows):,} {'case' if len(results.rows) == 1 else 'cases'}, {len(results.failed):,} failed."
    where = ", ".join(str(results.machine[key]) for key in ("gpu", "cpu") if results.machine.get(key))
    date, commit = results.created, results.commit or DASH
    facts = {"date": date, "commit": commit, "command": results.command,
             "speed-ups over": results.baseline, "machine": _listing(results.machine),
             "versions": _listing(results.versions), "ceiling": _listing(results.ceiling)}  # fmt: skip
    summary = f"{count} {where}, {date[:10]}, commit {commit}."
    return {"name": name, "suite": results.suite, "headlines": headlines(results), "summary": summary,
            "figures": figures, "heads": heads, "lines": lines, "facts": facts}  # fmt: skip


def _listing(found: dict[str, Any]) -> str:
    """Return a record as a string: {"cores": 2, "flops": {"float32": 1}} -> "cores 2, flops: float32 1"."""
    return ", ".join(
        f"{name.replace('_', ' ')}{f': {_listing(value)}' if isinstance(value, dict) else f' {value}'}"
        for name, value in found.items()
        if value is not None
    )


_IDENTITY: dict[str, Callable[[Row], str]] = {
    "model": lambda r: r.case.model,
    "workload": lambda r: f"{r.case.workload} {r.case.sampler}",
    "batch": lambda r: f"{r.case.batch:,}",
    "tokens in": lambda r: f"{r.case.prompt_tokens:,}",
    "tokens out": lambda r: f"{r.case.output_tokens:,}",
}


def table(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, list[str], str]]]:
    """Return the columns with any value, and each row's label, cells and error (in the place of its figures)."""
    columns = [c for c in COLUMNS if any(c.show(row) != DASH for row in rows if row.error is None)]
    lines = []
    for row in rows:
        cells = [show(row) for show in _IDENTITY.values()]
        cells += [] if row.error is not None else [column.show(row) for column in columns]
        lines.append((row.case.label, cells, row.error or ""))
    return [*_IDENTITY, *([column.name for column in columns] or ["error"])], lines
