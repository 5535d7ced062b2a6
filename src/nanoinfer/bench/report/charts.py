"""The figures of a suite as Vega-Lite charts: at most MAX_FIGURES, and only what the data supports.

A backend has one colour in every figure, and a weight format one dash and one marker. Text and axes are drawn in
"currentColor", so that a chart suits a light and a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import altair as alt
import vl_convert

from nanoinfer.bench.case import Case
from nanoinfer.bench.report.panels import (
    AXES,
    DECODE,
    MEMORY,
    TTFT,
    Measure,
    Panel,
    ceiling,
    panels,
    setting,
    share_of_ceiling,
    sweep_axis,
    varying,
)
from nanoinfer.bench.report.text import clean, digits, number, positive
from nanoinfer.bench.results import Results, Row

MAX_FIGURES = 6
MAX_LINES = 8  # more lines than this cannot be told apart: bars
MIN_POSITIONS = 8  # fewer points are a number, not a curve
INK = "currentColor"
GREY = "#808080"
VEGA_LITE = "6.4"
SVG_WIDTH = 640
_SVG_STYLE = "<style>svg{color:#1b1f24}@media(prefers-color-scheme:dark){svg{color:#e4e7eb}}</style>"
_CONFIG = {
    "background": "transparent",
    "font": "system-ui, Segoe UI, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **dict.fromkeys(("labelColor", "titleColor"), INK), **dict.fromkeys(("domainColor", "tickColor"), GREY),
        "gridColor": GREY, "gridOpacity": 0.2, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal",
    },
    "legend": {"labelColor": INK, "labelFontSize": 11},
    "text": {"fontSize": 11},
}  # fmt: skip
COLORS = {  # contrast of 3 and more on white and on the dark page
    "native": "#eb4613", "triton": "#cd35cd", "cuda_graph": "#9455db", "compiled": "#6464d8", "static": "#247be0",
    "dynamic": "#1498b8", "paged": "#1b9783", "recompute": "#7b828a", "nanogpt": "#967651", "llama.cpp": "#279b44",
    "ctranslate2": "#b68d0a", "transformers-dynamic": "#dd3c7f", "transformers-static": "#dc7284",
}  # fmt: skip
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}
_DASHES = {32: [1, 0], 16: [7, 3], 8: [3, 2], 4: [8, 3, 2, 3]}
_SHAPES = {32: "circle", 16: "square", 8: "triangle-up", 4: "diamond"}
_TOOLTIP = [alt.Tooltip(f"{name}:N", title=name) for name in ("backend", "case", "value", "spread", "ceiling", "note")]
Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    name: str
    """For file names: throughput, ttft, ..."""
    title: str
    caption: str
    chart: alt.LayerChart | alt.Chart

    @property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification."""
        made: dict[str, Any] = self.chart.to_dict()
        return made | {"config": _CONFIG}


def svg(figure: Figure) -> bytes:
    """Return a figure as a file that stands alone, and follows the colour scheme of whoever looks at it."""
    alone = figure.spec | {"width": SVG_WIDTH, "config": _CONFIG | {"aria": False}}
    made: str = vl_convert.vegalite_to_svg(alone, vl_version=VEGA_LITE)
    return made.replace(">", f' role="img"><title>{html.escape(figure.title)}</title>{_SVG_STYLE}', 1).encode()


def figures(results: Results) -> list[Figure]:
    """Return the figures that the data supports, the most important first."""
    drafted = sum(row.case.draft is not None for row in results.rows)
    found = _speculation(results.rows) if 2 * drafted > len(results.rows) else _comparison(results.rows)
    return list(islice(found, MAX_FIGURES))


def bits(case: Case) -> int:
    """Return the bits of a weight; 0 for an unknown format."""
    return BITS.get(case.quantization or case.dtype, 0)


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


def _record(row: Row, measure: Measure, value: float, **more: Any) -> Record:
    """Return one mark with what is shown when the pointer is on it."""
    spread = row.figures.spread_percent if row.figures is not None else None
    share = share_of_ceiling(row) if measure.ceiling else None
    return {
        "backend": clean(row.case.label), "case": setting([row]), "y": value,
        "value": measure.say(value), "label": digits(value),
        "spread": f"{digits(spread)}% over {row.figures.rounds} rounds" if row.figures is not None else "",
        "ceiling": f"{digits(share)}% of {measure.say(ceiling(row) or 0)}" if share is not None else "",
        "note": clean(row.note), **more,
    }  # fmt: skip


def _records(rows: Sequence[Row], measure: Measure, axis: str) -> list[Record]:
    return [
        _record(row, measure, y, x=getattr(row.case, axis)) for row in rows if (y := measure.value(row)) is not None
    ]


def _data(records: Sequence[Record]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(records)))


def _look(rows: Sequence[Row]) -> tuple[alt.Color, alt.StrokeDash, alt.Shape]:
    """Return colour, dash and marker of each label: by its backend, and by its format."""
    cases = {clean(row.case.label): row.case for row in rows}
    domain = list(cases)
    legend = alt.Legend(orient="bottom", columns=2, labelLimit=300, symbolStrokeWidth=0, symbolSize=70)

    def scale(values: list[Any]) -> alt.Scale:
        return alt.Scale(domain=domain, range=values)

    return (
        alt.Color("backend:N", scale=scale([_color(c) for c in cases.values()]), title=None, legend=legend),
        alt.StrokeDash("backend:N", scale=scale([_DASHES.get(bits(c), [1, 0]) for c in cases.values()]), title=None),
        alt.Shape("backend:N", scale=scale([_SHAPES.get(bits(c), "cross") for c in cases.values()]), title=None),
    )


def _color(case: Case) -> str:
    return COLORS.get(case.backend, GREY)


def _x(places: Sequence[int], title: str) -> alt.X:
    values = list(places)
    scale = alt.Scale(type="log", domain=[values[0], values[-1]], nice=False, padding=8)
    return alt.X("x:Q", scale=scale, axis=alt.Axis(values=values, title=title, format=",~r", labelOverlap=False))


def _y(measure: Measure, records: Sequence[Record]) -> alt.Y:
    """Return the axis of a measure: logarithmic with ticks at 1, 2, 5, 10, ..., or from 0."""
    low, high = (f(record["y"] for record in records) for f in (min, max))
    steps = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high))) for m in (1, 2, 5)]
    ticks = [step for step in steps if low <= step <= high] if measure.log else None
    scale = alt.Scale(type="log", nice=False, padding=14) if measure.log else alt.Scale(zero=True)
    axis = alt.Axis(title=measure.axis, format=",~r", **({"values": ticks} if ticks else {"tickCount": 5}))
    return alt.Y("y:Q", scale=scale, axis=axis)


def _lines(panel: Panel, measure: Measure, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a measure against the panel's axis; the ceilings dotted, one for each format of backends with a cache."""
    records = _records(panel.rows, measure, panel.axis)
    if not records:
        return
    seen = {record["backend"] for record in records}
    color, dash, shape = _look([row for row in panel.rows if clean(row.case.label) in seen])
    limits = _ceilings(panel) if measure.ceiling else []
    x, y = _x(sorted({record["x"] for record in records}), AXES[panel.axis]), _y(measure, [*records, *limits])
    base = _data(records)
    layers = [
        base.mark_line(strokeWidth=2).encode(x, y, color, dash),
        base.mark_point(filled=True, size=55, opacity=1).encode(x, y, color, shape, tooltip=_TOOLTIP),
    ]
    if limits:
        line = _data(limits).encode(x, y, detail="format:N", tooltip=alt.Tooltip("value:N", title="ceiling"))
        layers.insert(0, line.mark_line(color=INK, strokeWidth=1, strokeDash=[1, 3]))
        names = _data(_ceiling_names(limits)).encode(x, y, text="format:N")
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
    colors = [_color(row.case) for row in ranked if measure.value(row) is not None]
    chart = _bar_chart(records, measure.axis, [record["backend"] for record in records], colors, inside)
    yield _figure(measure, panel.rows, rows, panel.axis, chart)


def _bar_chart(
    records: Sequence[Record], title: str, names: Sequence[str], colors: Sequence[str], ticks: Sequence[Record] = ()
) -> alt.LayerChart:
    """Return bars with their values beside them.

    Args:
        records: `backend` names the bar, `y` is its length, `label` the number at the right.
        title: of the axis.
        names: the bars from top to bottom.
        colors: of each.
        ticks: records with `backend` and `y`, drawn as ceilings.
    """
    most = 1.2 * max(record["y"] for record in (*records, *ticks))  # room for the values
    x = alt.X(
        "y:Q", scale=alt.Scale(domain=[0, most], nice=False), axis=alt.Axis(title=title, format=",~r", tickCount=4)
    )
    y = alt.Y("backend:N", sort=list(names), axis=alt.Axis(title=None, labelLimit=230, domain=False, ticks=False))
    color = alt.Color("backend:N", scale=alt.Scale(domain=list(names), range=list(colors)), legend=None)
    base = _data(records)
    layers = [
        base.mark_bar(height={"band": 0.75}).encode(x, y, color, tooltip=_TOOLTIP),
        base.mark_text(align="right", color=INK).encode(x=alt.value("width"), y=y, text="label:N"),
    ]
    if ticks:
        layers.append(_data(ticks).mark_tick(color=INK, thickness=2, height={"band": 0.9}).encode(x, y))
    chart: alt.LayerChart = alt.layer(*layers).properties(width="container", height=alt.Step(17))
    return chart


def _positions(panel: Panel, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the time of each token against its position, at the largest size that was swept."""
    timed = [row for row in panel.rows if len(_points(row)) >= MIN_POSITIONS]
    timed = [row for row in timed if getattr(row.case, panel.axis) == max(getattr(r.case, panel.axis) for r in timed)]
    if not timed:
        return
    records = [_record(row, _TIME, 1e3 * sec, x=place) for row in timed for place, sec in _points(row)]
    color, dash, _ = _look(timed)
    x = alt.X("x:Q", axis=alt.Axis(title="position of the token", format=",~r", tickCount=6))
    chart = _data(records).mark_line(strokeWidth=1.5).encode(x, _y(_TIME, records), color, dash, tooltip=_TOOLTIP)
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
    chart = _data(records).mark_bar(fill=INK, height={"band": 0.75}).encode(
        alt.X("y:Q", stack="zero", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(title="share of a decode step (%)")),
        alt.Y("backend:N", sort=names, axis=alt.Axis(title=None, labelLimit=230, domain=False, ticks=False)),
        opacity, order="order:Q", tooltip=[alt.Tooltip("backend:N"), alt.Tooltip("value:N", title="share")],
    )  # fmt: skip
    yield Figure("breakdown", "Where the time goes", "", chart.properties(width="container", height=alt.Step(17)))


def _speculation(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield tokens/s against the number of proposals, then each draft and each situation over plain decoding."""
    plain = {row.case: row for row in rows if row.case.draft is None}
    drafted = [row for row in rows if row.case.draft is not None]
    if not drafted:
        return
    first = drafted[0].case
    swept = [row for row in drafted if row.case.draft == first.draft and row.case.shape == first.shape]
    records = [
        _record(
            row, DECODE, y, x=str(row.case.speculate_k if row.case.draft else 0), backend=clean(row.case.plain.label)
        )
        for row in [*(plain[c] for c in dict.fromkeys(r.case.plain for r in swept) if c in plain), *swept]
        if (y := DECODE.value(row)) is not None
    ]
    if records:
        color, dash, shape = _look([plain[row.case.plain] for row in swept if row.case.plain in plain])
        ks = sorted({r["x"] for r in records} - {"auto"}, key=int)
        x = alt.X("x:O", sort=[*ks, "auto"], axis=alt.Axis(title="proposals at a time (k)", labelAngle=0))
        speed = _y(DECODE, records)
        base, numbered = _data(records), _data([r for r in records if r["x"] != "auto"])
        chart = alt.layer(
            numbered.mark_line(strokeWidth=2).encode(x, speed, color, dash),
            base.mark_point(filled=True, size=55, opacity=1).encode(x, speed, color, shape, tooltip=_TOOLTIP),
        ).properties(width="container", height=240)
        caption = f"Draft {clean(first.draft)}; 0 is decoding without a draft. {setting(swept)}."
        yield Figure("k", "Decode throughput against k", caption, chart)
    same = [row for row in drafted if row.case.shape == first.shape and row.case.plain == first.plain]
    others = [row for row in drafted if row.case.plain.shape != first.shape]
    for name, title, some in (
        ("drafts", "Drafts", same),
        ("situations", "Other prompts, samplers and batches", others),
    ):
        best = [row for row in some if row.case.speculate_k == "auto" or name == "situations"]
        records = [
            _record(row, _SPEEDUP, row.speedup, backend=_situation(row.case, name == "situations"))
            for row in best
            if positive(row.speedup) is not None and row.speedup is not None
        ]
        if records:
            names = [record["backend"] for record in records]
            rule = _data([{"y": 1}]).mark_rule(color=INK, strokeDash=[3, 3]).encode(x="y:Q")
            chart = _bar_chart(records, _SPEEDUP.axis, names, [COLORS.get(first.backend, GREY)] * len(names)) + rule
            yield Figure(name, f"{title}: speed-up over the same case without a draft", f"{setting(best)}.", chart)


_SPEEDUP = Measure("speedup", "Speed-up", "times the output tokens/s without a draft", lambda row: row.speedup, "x")


def _situation(case: Case, other: bool) -> str:
    """Return the name of a bar: the draft, and where and how it is used."""
    rule = " reject" if case.speculate_rule == "reject" else ""
    name = f"{case.draft} k={case.speculate_k}{rule}"
    words = ("random" if case.workload == "uniform" else case.workload, case.sampler.replace("greedy", ""))
    where = f"{' '.join(filter(None, words))}, batch {case.batch}: " if other else ""
    return clean(where + name)


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
