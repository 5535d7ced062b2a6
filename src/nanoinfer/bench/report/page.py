"""The page: for each suite what was found, its figures, and behind a click all of its numbers and where they were made.

`page.html.j2` is the document. It fetches nothing: the charts' library and their data are inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2
import vl_convert

from nanoinfer.bench.report.headlines import headlines
from nanoinfer.bench.report.marks import VEGA_LITE, Figure
from nanoinfer.bench.report.panels import ceiling, share_of_ceiling
from nanoinfer.bench.report.text import DASH, clean, digits, number
from nanoinfer.bench.results import Results, Row


@dataclass(frozen=True)
class Section:
    """One suite on the page."""

    name: str
    """Unique on the page."""
    results: Results
    figures: list[Figure]


def page(sections: Sequence[Section]) -> str:
    """Return the HTML document."""
    loader = jinja2.PackageLoader("nanoinfer.bench.report", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["clean"] = clean
    suites = ", ".join(clean(section.results.suite) for section in sections)
    return environment.get_template("page.html.j2").render(
        title=f"nanoinfer bench: {suites}", sections=[_section(section) for section in sections], bundle=_bundle()
    )


@functools.cache
def _bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`."""
    made: str = cast(Any, vl_convert).javascript_bundle(vl_version=VEGA_LITE)  # its stub asks for a snippet
    return made.replace("</script", "<\\/script")


def _section(section: Section) -> dict[str, Any]:
    """Return what the template shows of a suite."""
    results = section.results
    heads, lines = table(results.rows)
    failed = len(results.failed)
    count = f"{len(results.rows):,} {'case' if len(results.rows) == 1 else 'cases'}, {failed:,} failed."
    machine = results.machine
    where = ", ".join(clean(machine[key]) for key in ("gpu", "cpu") if machine.get(key))
    return {
        "name": section.name,
        "results": results,
        "headlines": headlines(results),
        "summary": f"{count} {where}, {clean(results.created)[:10]}, commit {clean(results.commit or DASH)}.",
        "figures": section.figures,
        "heads": heads,
        "lines": lines,
        "facts": _facts(results),
    }


def _facts(results: Results) -> list[tuple[str, str]]:
    return [
        ("date", clean(results.created)),
        ("commit", clean(results.commit or DASH)),
        ("command", clean(results.command)),
        ("speed-ups over", clean(results.baseline)),
        ("machine", _said(results.machine)),
        ("versions", _said(results.versions)),
        ("ceiling", _said(results.ceiling)),
    ]


def _said(found: dict[str, Any]) -> str:
    """Return a record as text: {"cores": 2, "flops": {"float32": 1}} -> "cores 2, flops: float32 1"."""
    return ", ".join(
        f"{clean(name).replace('_', ' ')}{f': {_said(value)}' if isinstance(value, dict) else f' {clean(value)}'}"
        for name, value in found.items()
        if value is not None
    )


def _of(name: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Return the function that says a number of a row or of its figures, scaled."""

    def say(row: Row) -> str:
        found = number(getattr(row, name, None) if hasattr(row, name) else getattr(row.figures, name, None))
        return digits(None if found is None else found * scale)

    return say


_IDENTITY: dict[str, Callable[[Row], str]] = {
    "model": lambda r: clean(r.case.model),
    "workload": lambda r: f"{r.case.workload} {r.case.sampler}",
    "batch": lambda r: f"{r.case.batch:,}",
    "tokens in": lambda r: f"{r.case.prompt_tokens:,}",
    "tokens out": lambda r: f"{r.case.output_tokens:,}",
}
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "decode tokens/s": _of("decode_tokens_per_sec"),
    "ceiling": lambda r: digits(ceiling(r)),
    "of it, %": lambda r: digits(share_of_ceiling(r)),
    "spread, %": _of("spread_percent"),
    "output tokens/s": _of("output_tokens_per_sec"),
    "speed-up": _of("speedup"),
    "prefill tokens/s": _of("prefill_tokens_per_sec"),
    "TTFT, ms": _of("ttft_sec", 1e3),
    "TPOT, ms": _of("tpot_sec", 1e3),
    "p90": _of("tpot_p90_sec", 1e3),
    "p99": _of("tpot_p99_sec", 1e3),
    "total, s": _of("total_sec"),
    "rounds": _of("rounds"),
    "peak memory, MB": _of("peak_memory_bytes", 1e-6),
    "reserved, MB": _of("reserved_memory_bytes", 1e-6),
    "KV cache, MB": _of("kv_cache_bytes", 1e-6),
    "weights, MB": _of("weight_bytes", 1e-6),
    "MB a token": _of("bytes_per_token", 1e-6),
    "GFLOP a token": _of("flops_per_token", 1e-9),
    "MBU, %": _of("mbu_percent"),
    "MFU, %": _of("mfu_percent"),
    "accepted, %": _of("acceptance_percent"),
    "accepted a step": _of("mean_accepted_length"),
    "time in the draft, %": _of("draft_share_percent"),
    "kernels a step": _of("kernels_per_step"),
    "kernels a layer": _of("kernels_per_layer"),
    "launches a step": _of("launches_per_step"),
    "verifying 5 tokens, decodes": _of("verify_ratio"),
    "same tokens": lambda r: DASH if r.same_tokens is None else "yes" if r.same_tokens else "NO",
    "note": lambda r: clean(r.note) or DASH,
}


def table(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, list[str], str]]]:
    """Return the columns that say anything, and each row's label, cells and error (in the place of its figures)."""
    heads = [name for name, say in _COLUMNS.items() if any(say(row) != DASH for row in rows if row.error is None)]
    lines = []
    for row in rows:
        own = [say(row) for say in _IDENTITY.values()]
        cells = own if row.error is not None else own + [_COLUMNS[name](row) for name in heads]
        lines.append((clean(row.case.label), cells, clean(row.error or "")))
    return [*_IDENTITY, *(heads or ["error"])], lines
