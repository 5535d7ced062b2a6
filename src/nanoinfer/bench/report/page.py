"""The page: for each suite its findings and figures, and in folded sections all numbers, the machine and the command.

`page.html.j2` is the template. The page fetches nothing: it contains the charts' library and their data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jinja2

from nanoinfer.bench.columns import COLUMNS
from nanoinfer.bench.formatting import DASH
from nanoinfer.bench.report.headlines import headlines
from nanoinfer.bench.report.marks import VEGA_LITE, Figure
from nanoinfer.bench.results import Results
from nanoinfer.bench.row import Row


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
