"""The figures of a suite: at most MAX_FIGURES, the most important first, and only what the data supports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import altair as alt

from nanoinfer.bench.report.marks import (
    INK,
    TOOLTIP,
    Figure,
    Record,
    bar_chart,
    bits,
    color_of,
    data,
    look,
    record_of,
    x_axis,
    y_axis,
)
from nanoinfer.bench.report.panels import (
    AXES,
    MEMORY,
    TTFT,
    Measure,
    Panel,
    ceiling,
    panels,
    setting,
    sweep_axis,
    varying,
)
from nanoinfer.bench.report.speculation import speculation
from nanoinfer.bench.report.text import clean, digits, number, positive
from nanoinfer.bench.results import Results, Row

MAX_FIGURES = 6
MAX_LINES = 8  # more lines than this cannot be told apart: bars
MIN_POSITIONS = 8  # fewer points are a number, not a curve


def figures(results: Results) -> list[Figure]:
    """Return the figures that the data supports, the most important first."""
    drafted = sum(row.case.draft is not None for row in results.rows)
    found = speculation(results.rows) if 2 * drafted > len(results.rows) else _comparison(results.rows)
    return list(islice(found, MAX_FIGURES))


def _comparison(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the figures that compare backends; rows with a draft are in the table only."""
    axis = sweep_axis(rows)
    plain = [row for row in rows if row.case.draft is None]
    swept = []
    for panel in panels(plain, axis):
        if len(panel.places) < 3 or len(panel.labels) > MAX_LINES:
            for part in panels(panel.rows, axis, split=True):
                yield from _bars(part, part.measure, rows)
        else:
            swept.append(panel)
            yield from _lines(panel, panel.measure, rows)
    for panel in panels(plain, axis):
        yield from _positions(panel, rows)
    if axis == "batch":
        for panel in swept:
            for measure in (TTFT, MEMORY):
                yield from _lines(panel, measure, rows)
    yield from _breakdown(plain, axis)


def _records(rows: Sequence[Row], measure: Measure, axis: str) -> list[Record]:
    return [
        record_of(row, measure, y, x=getattr(row.case, axis)) for row in rows if (y := measure.value(row)) is not None
    ]


def _lines(panel: Panel, measure: Measure, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a measure against the panel's axis; the ceilings dotted, one for each format of backends with a cache."""
    records = _records(panel.rows, measure, panel.axis)
    if not records:
        return
    seen = {record["backend"] for record in records}
    color, dash, shape = look([row for row in panel.rows if clean(row.case.label) in seen])
    limits = _ceilings(panel) if measure.ceiling else []
    x, y = x_axis(sorted({record["x"] for record in records}), AXES[panel.axis]), y_axis(measure, [*records, *limits])
    base = data(records)
    layers = [
        base.mark_line(strokeWidth=2).encode(x, y, color, dash),
        base.mark_point(filled=True, size=55, opacity=1).encode(x, y, color, shape, tooltip=TOOLTIP),
    ]
    if limits:
        line = data(limits).encode(x, y, detail="format:N", tooltip=alt.Tooltip("value:N", title="ceiling"))
        layers.insert(0, line.mark_line(color=INK, strokeWidth=1, strokeDash=[1, 3]))
        names = data(_ceiling_names(limits)).encode(x, y, text="format:N")
        layers.append(names.mark_text(color=INK, align="right", dy=-7, fontSize=10))
    yield _figure(measure, panel.rows, rows, panel.axis, alt.layer(*layers).properties(width="container", height=240))


def _ceilings(panel: Panel) -> list[Record]:
    """Return the highest ceiling of each format and place; a backend without a cache has one of its own, not drawn."""
    found: dict[tuple[str, int], float] = {}
    for row in panel.rows:
        if row.case.backend not in ("recompute", "nanogpt") and (limit := ceiling(row)) is not None:
            key = row.case.quantization or row.case.dtype, getattr(row.case, panel.axis)
            found[key] = max(limit, found.get(key, 0.0))
    return [
        {"format": clean(fmt), "x": x, "y": y, "value": f"{clean(fmt)}: {digits(y)} tokens/s"}
        for (fmt, x), y in found.items()
    ]


def _ceiling_names(limits: Sequence[Record]) -> list[Record]:
    """Return the names of the ceilings at the right end; those too near each other share one."""
    last = max(record["x"] for record in limits)
    named: list[Record] = []
    for record in sorted((r for r in limits if r["x"] == last), key=lambda r: -r["y"]):
        if named and named[-1]["y"] < 1.6 * record["y"]:
            named[-1] = named[-1] | {"format": f"{named[-1]['format']}, {record['format']}"}
        else:
            named.append(record | {"format": f"ceiling {record['format']}"})
    return named


def _bars(panel: Panel, measure: Measure, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a measure of one size as bars, by bits of a weight and then by value; ceilings as ticks."""
    ranked = sorted(panel.rows, key=lambda r: (-bits(r.case), (measure.value(r) or 0) * (1 if measure is TTFT else -1)))
    records = _records(ranked, measure, panel.axis)
    if not records:
        return
    limits = [
        {"backend": clean(row.case.label), "y": limit}
        for row in ranked
        if measure.ceiling and measure.value(row) is not None and (limit := ceiling(row)) is not None
    ]
    longest = max(record["y"] for record in records)
    inside = [limit for limit in limits if limit["y"] <= 3 * longest]
    colors = [color_of(row.case) for row in ranked if measure.value(row) is not None]
    chart = bar_chart(records, measure.axis, [record["backend"] for record in records], colors, inside)
    yield _figure(measure, panel.rows, rows, panel.axis, chart)


def _positions(panel: Panel, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the time of each token against its position, at the largest size that was swept."""
    timed = [row for row in panel.rows if len(_points(row)) >= MIN_POSITIONS]
    timed = [row for row in timed if getattr(row.case, panel.axis) == max(getattr(r.case, panel.axis) for r in timed)]
    if not timed:
        return
    records = [record_of(row, _TIME, 1e3 * sec, x=place) for row in timed for place, sec in _points(row)]
    color, dash, _ = look(timed, lines=True)
    x = alt.X("x:Q", axis=alt.Axis(title="position of the token", format=",~r", tickCount=6))
    chart = data(records).mark_line(strokeWidth=1.5).encode(x, y_axis(_TIME, records), color, dash, tooltip=TOOLTIP)
    yield _figure(_TIME, timed, rows, panel.axis, chart.properties(width="container", height=240))


def _points(row: Row) -> list[tuple[float, float]]:
    """Return (position, seconds) of a row, without what no axis can show."""
    found = [(number(p[0]), positive(p[1])) for p in row.per_position_sec or () if len(p) == 2]
    return [(place, sec) for place, sec in found if place is not None and sec is not None]


_TIME = Measure("position", "Time per token against position", "time per token (ms)", lambda row: None, "ms")


def _breakdown(rows: Sequence[Row], axis: str) -> Iterator[Figure]:
    """Yield the shares of a decode step at the smallest and the largest size that have any, as stacked bars."""
    timed = [row for row in rows if row.breakdown_percent]
    places = [getattr(row.case, axis) for row in timed]
    ends = [row for row, at in zip(timed, places, strict=True) if at in (min(places), max(places))]
    parts = list(dict.fromkeys(clean(part) for row in ends for part in row.breakdown_percent or {}))
    several = min(places, default=0) != max(places, default=0)
    records = [
        {
            "backend": clean(row.case.label) + (f", {axis.partition('_')[0]} {getattr(row.case, axis)}" * several),
            "part": clean(part), "y": share, "order": parts.index(clean(part)),
            "value": f"{clean(part)} {digits(share)}%",
        }
        for row in ends
        for part, percent in (row.breakdown_percent or {}).items()
        if (share := number(percent)) is not None
    ]  # fmt: skip
    if not records:
        return
    shades = [0.9, 0.65, 0.45, 0.28, 0.15]
    opacity = alt.Opacity(
        "part:N",
        scale=alt.Scale(type="ordinal", domain=parts, range=[shades[i % len(shades)] for i in range(len(parts))]),
        legend=alt.Legend(
            title=None, orient="bottom", columns=2, symbolType="square", symbolFillColor=INK, symbolStrokeWidth=0
        ),
    )
    names = list(dict.fromkeys(str(record["backend"]) for record in records))
    chart = data(records).mark_bar(fill=INK, height={"band": 0.75}).encode(
        alt.X("y:Q", stack="zero", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(title="share of a decode step (%)")),
        alt.Y("backend:N", sort=names, axis=alt.Axis(title=None, labelLimit=230, domain=False, ticks=False)),
        opacity, order="order:Q", tooltip=[alt.Tooltip("backend:N"), alt.Tooltip("value:N", title="share")],
    )  # fmt: skip
    yield Figure("breakdown", "Where the time goes", "", chart.properties(width="container", height=alt.Step(17)))


def _figure(measure: Measure, rows: Sequence[Row], every: Sequence[Row], axis: str, chart: Any) -> Figure:
    """Return a figure whose title says what tells it from the suite's others, and whose caption what its rows share."""
    fixed = [f for f in varying(every) if f != axis or len({getattr(row.case, axis) for row in rows}) == 1]
    title = ": ".join(filter(None, (measure.title, setting(rows, fixed))))
    failed = sum(row.error is not None for row in rows)
    extrapolated = any("extrapolated" in row.note for row in rows)
    caption = ". ".join(
        filter(None, (
            setting(rows), "Dotted lines and ticks: ceilings" if measure.ceiling else "",
            f"{failed} of {len(rows)} cases failed" if failed else "",
            "Backends without a cache are extrapolated" if extrapolated else "",
        ))
    )  # fmt: skip
    return Figure(measure.name, title, f"{caption}.", chart)
