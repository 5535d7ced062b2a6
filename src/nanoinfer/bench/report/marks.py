"""What every chart is drawn with: colours, markers, axes, bars, and the record of one mark.

A backend has one colour in every figure, and a weight format one dash and one marker. Text and axes are drawn in
"currentColor", so that a chart suits a light and a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

from nanoinfer.bench.case import Case
from nanoinfer.bench.report.panels import Measure, ceiling, setting, share_of_ceiling
from nanoinfer.bench.report.text import clean, digits
from nanoinfer.bench.results import Row

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
TOOLTIP = [alt.Tooltip(f"{name}:N", title=name) for name in ("backend", "case", "value", "spread", "ceiling", "note")]
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


def bits(case: Case) -> int:
    """Return the bits of a weight; 0 for an unknown format."""
    return BITS.get(case.quantization or case.dtype, 0)


def record_of(row: Row, measure: Measure, value: float, **more: Any) -> Record:
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


def data(records: Sequence[Record]) -> alt.Chart:
    """Return a chart of some records, inside its specification."""
    return alt.Chart(alt.InlineData(values=list(records)))


def look(rows: Sequence[Row], *, lines: bool = False) -> tuple[alt.Color, alt.StrokeDash, alt.Shape]:
    """Return colour, dash and marker of each label: by its backend, and by its format.

    lines: whether the chart has lines without markers, which the legend then shows.
    """
    cases = {clean(row.case.label): row.case for row in rows}
    domain = list(cases)
    legend = alt.Legend(orient="bottom", columns=2, labelLimit=300, symbolSize=70,
        symbolStrokeWidth=2 * lines, symbolType="stroke" if lines else alt.Undefined,
    )  # fmt: skip

    def scale(values: list[Any]) -> alt.Scale:
        return alt.Scale(domain=domain, range=values)

    return (
        alt.Color("backend:N", scale=scale([color_of(c) for c in cases.values()]), title=None, legend=legend),
        alt.StrokeDash("backend:N", scale=scale([_DASHES.get(bits(c), [1, 0]) for c in cases.values()]), title=None),
        alt.Shape("backend:N", scale=scale([_SHAPES.get(bits(c), "cross") for c in cases.values()]), title=None),
    )


def color_of(case: Case) -> str:
    """Return the colour of a case's backend, grey for one that is not known."""
    return COLORS.get(case.backend, GREY)


def x_axis(places: Sequence[int], title: str) -> alt.X:
    """Return a logarithmic axis with ticks at the sizes that were swept."""
    values = list(places)
    scale = alt.Scale(type="log", domain=[values[0], values[-1]], nice=False, padding=8)
    return alt.X("x:Q", scale=scale, axis=alt.Axis(values=values, title=title, format=",~r", labelOverlap=False))


def y_axis(measure: Measure, records: Sequence[Record]) -> alt.Y:
    """Return the axis of a measure: logarithmic with ticks at 1, 2, 5, 10, ..., or from 0."""
    low, high = (f(record["y"] for record in records) for f in (min, max))
    steps = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high))) for m in (1, 2, 5)]
    ticks = [step for step in steps if low <= step <= high] if measure.log else None
    scale = alt.Scale(type="log", nice=False, padding=14) if measure.log else alt.Scale(zero=True)
    axis = alt.Axis(title=measure.axis, format=",~r", **({"values": ticks} if ticks else {"tickCount": 5}))
    return alt.Y("y:Q", scale=scale, axis=axis)


def bar_chart(
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
    base = data(records)
    layers = [
        base.mark_bar(height={"band": 0.75}).encode(x, y, color, tooltip=TOOLTIP),
        base.mark_text(align="right", color=INK).encode(x=alt.value("width"), y=y, text="label:N"),
    ]
    if ticks:
        layers.append(data(ticks).mark_tick(color=INK, thickness=2, height={"band": 0.9}).encode(x, y))
    chart: alt.LayerChart = alt.layer(*layers).properties(width="container", height=alt.Step(17))
    return chart
