"""The page: what was measured, where and when, then for each suite its figures and all of its numbers.

`page.html.in` holds the frame and the style; this file fills it. No script, no link, nothing to fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from nanoinfer.bench.report import tables
from nanoinfer.bench.report.charts import Chart
from nanoinfer.bench.report.svg import palette_css
from nanoinfer.bench.report.text import DASH, clean, digits, escape, number, si
from nanoinfer.bench.results import Results

Facts = dict[str, str]


@dataclass(frozen=True)
class Section:
    """One suite on the page."""

    name: str
    """Unique on the page; for ids and file names."""
    results: Results
    charts: list[tuple[Chart, str]]
    """Each with its <svg> element."""


def page(sections: Sequence[Section]) -> str:
    """Return the HTML document."""
    template = Template((Path(__file__).parent / "page.html.in").read_text(encoding="utf-8"))
    facts = [_facts(section.results) for section in sections]
    shared = {name: said for name, said in facts[0].items() if all(other.get(name) == said for other in facts)}
    own = [{name: said for name, said in each.items() if name not in shared} for each in facts]
    suites = ", ".join(section.results.suite for section in sections)
    return template.substitute(
        title=escape(f"nanoinfer bench: {suites}"),
        palette_light=palette_css(0),
        palette_dark=palette_css(1),
        facts=_fact_list(shared),
        contents=_contents(sections) if len(sections) > 1 else "",
        sections="\n".join(_section(section, each) for section, each in zip(sections, own, strict=True)),
    )


def _facts(results: Results) -> Facts:
    """Return what a reader must know of a results file, as plain text by name."""
    return {
        "Date": results.created,
        "Commit": results.commit or DASH,
        "Command": results.command,
        "Baseline": results.baseline,
        "Machine": _said(results.machine),
        "Versions": _said(results.versions),
        "Ceiling": _said(results.ceiling),
    }


def _said(found: Any) -> str:
    """Return a record as text: {"cores": 2, "memory_bytes": 1e9} -> "cores 2, memory 1.00 GB"."""
    if not isinstance(found, dict):  # a results file is written by others
        return clean(found)
    return ", ".join(_entry(str(name), value) for name, value in found.items()) or DASH


def _entry(name: str, value: Any) -> str:
    """Return one entry of a record with its unit, which is the end of its name."""
    if isinstance(value, dict):
        inner = {f"{key}_{name}" if name == "flops_per_sec" else str(key): each for key, each in value.items()}
        return _said(inner)
    for end, unit in (("_bytes_per_sec", "B/s"), ("_flops_per_sec", "FLOP/s"), ("_bytes", "B"), ("_sec", "s")):
        if name.endswith(end):
            return f"{name.removesuffix(end).replace('_', ' ')} {si(value, unit)}"
    if isinstance(value, list):
        value = " ".join(map(str, value))
    elif value is None:
        value = DASH
    elif type(value) is int:
        value = f"{value:,}"
    elif number(value) is not None:
        value = digits(value)
    return f"{name.replace('_', ' ')} {value}"


def _fact_list(facts: Facts) -> str:
    """Return facts as a description list; nothing for none."""
    items = "\n".join(
        f'<div class="fact {name.lower()}"><dt>{escape(name)}</dt><dd>{escape(said)}</dd></div>'
        for name, said in facts.items()
    )
    return f"<dl>\n{items}\n</dl>" if facts else ""


def _contents(sections: Sequence[Section]) -> str:
    """Return links to the suites on this page."""
    items = "".join(f'<li><a href="#{s.name}">{escape(s.results.suite)}</a></li>' for s in sections)
    return f'<nav aria-label="Suites"><ul>{items}</ul></nav>'


def _section(section: Section, facts: Facts) -> str:
    """Return one suite: how many cases, its figures with their numbers, and the whole table."""
    rows, failed = section.results.rows, len(section.results.failed)
    count = f"{len(rows):,} {'case' if len(rows) == 1 else 'cases'}, {failed:,} failed."
    every = tables.table(rows, tables.all_columns(rows), f"All numbers of {section.results.suite}") if rows else ""
    figures = "\n".join(_figure(f"{section.name}-{i}", *each) for i, each in enumerate(section.charts))
    return (
        f'<section id="{section.name}">\n<h2>{escape(section.results.suite)}</h2>\n<p>{count}</p>\n{_fact_list(facts)}'
        f'\n<div class="figures">\n{figures}\n</div>\n<h3>All numbers, measured beside predicted</h3>\n{every}\n'
        "</section>"
    )


def _figure(name: str, chart: Chart, svg: str) -> str:
    """Return one figure: drawing, caption, and its numbers behind a click."""
    return (
        f'<figure aria-labelledby="{name}-heading">\n<h3 id="{name}-heading">{escape(chart.title)}</h3>\n{svg}\n'
        f"<figcaption>{escape(chart.caption)}</figcaption>\n"
        f"<details><summary>The numbers</summary>\n{chart.numbers}\n</details>\n</figure>"
    )
