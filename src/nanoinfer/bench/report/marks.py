"""What every chart is made of: the Vega-Lite templates of charts.json, colours, markers, axes, and records.

A backend has one colour in every figure, and a weight format one dash and one marker. Text and axes are drawn in
"currentColor", so that a chart suits a light and a dark page; as a file of its own it has a background.
"""

from __future__ import annotations

import copy
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.bench.formatting import digits
from nanoinfer.bench.report.panels import Measure, ceiling, setting, share_of_ceiling
from nanoinfer.bench.row import Row

GREY = "#808080"
VEGA_LITE = "6.4"
SVG_WIDTH = 640
_SVG_STYLE = (  # the background, too: a page may be light where the system's colour scheme is dark
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e4e7eb;background:#15181c}}</style>"
)
_TEMPLATES: dict[str, Any] = json.loads((Path(__file__).parent / "charts.json").read_text(encoding="utf-8"))
COLORS = {  # contrast of 3 and more on white and on the dark page
    "native": "#eb4613", "triton": "#cd35cd", "cuda_graph": "#9455db", "compiled": "#6464d8", "static": "#247be0",
    "dynamic": "#1498b8", "paged": "#1b9783", "recompute": "#7b828a", "nanogpt": "#967651", "llama.cpp": "#279b44",
    "ctranslate2": "#b68d0a", "transformers-dynamic": "#dd3c7f", "transformers-static": "#dc7284",
    "ik_llama.cpp": "#6f8f1f", "openvino": "#a8623f", "vllm": "#5b7fa6",
}  # fmt: skip
_MARKS = {
    "float32": ([1, 0], "circle"), "bfloat16": ([7, 3], "square"), "float16": ([14, 3], "cross"),
    "int8": ([3, 2], "triangle-up"), "Q8_0": ([1, 2], "triangle-down"),
    "int4": ([8, 3, 2, 3], "diamond"), "Q4_0": ([8, 3, 2, 3, 2, 3], "triangle-right"),
}  # fmt: skip
"""Dash and marker of each weight format."""
_UNKNOWN_MARK = ([1, 0], "triangle-left")
Record = dict[str, Any]
Channel = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    name: str
    """For file names: throughput, ttft, ..."""
    title: str
    caption: str
    spec: dict[str, Any]
    """The Vega-Lite specification."""

    @property
    def svg(self) -> bytes:
        """The figure as a file of its own, which follows the colour scheme of the viewer."""
        import vl_convert

        alone = self.spec | {"width": SVG_WIDTH, "config": self.spec["config"] | {"aria": False}}
        made: str = vl_convert.vegalite_to_svg(alone, vl_version=VEGA_LITE)
        made = re.sub("<[^>]*>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), made)  # hundredths of a pixel
        return made.replace(">", f' role="img"><title>{html.escape(self.title)}</title>{_SVG_STYLE}', 1).encode()


def chart(
    kind: str, records: Sequence[Record], *, more: Mapping[str, Sequence[Record]] | None = None, **channels: Channel
) -> dict[str, Any]:
    """Return a template of charts.json with its data: `records`, and those of `more`, which other layers draw.

    A layer without records is left out. `channels` are added to the encoding wherever the template has them.
    """
    spec: dict[str, Any] = copy.deepcopy(_TEMPLATES[kind])
    spec |= {"$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE}.json", "config": _TEMPLATES["config"]}
    spec["datasets"] = {name: list(found) for name, found in {"records": records, **(more or {})}.items() if found}
    if "layer" in spec:
        spec["layer"] = [layer for layer in spec["layer"] if layer["data"]["name"] in spec["datasets"]]
    for encoding in (part["encoding"] for part in (spec, *spec.get("layer", ()))):
        for name, added in channels.items():
            if own := encoding.get(name):
                encoding[name] = own | {k: own[k] | v if isinstance(own.get(k), dict) else v for k, v in added.items()}
    return spec


def record_of(row: Row, measure: Measure, value: float, **more: Any) -> Record:
    """Return one mark with its tooltip."""
    share = share_of_ceiling(row) if measure.ceiling else None
    figures = row.figures
    return {
        "backend": row.case.label, "case": setting([row]), "y": value,
        "value": measure.show(value), "label": digits(value),
        "spread": "" if figures is None else f"{digits(figures.spread_percent)}% over {figures.rounds} rounds",
        "ceiling": f"{digits(share)}% of {measure.show(ceiling(row) or 0)}" if share is not None else "",
        "note": row.note, **more,
    }  # fmt: skip


def look(rows: Sequence[Row]) -> dict[str, Channel]:
    """Return colour, dash and marker of each label: by its backend, and by its format."""
    cases = {row.case.label: row.case for row in rows}
    dashes, shapes = map(list, zip(*(_MARKS.get(c.format, _UNKNOWN_MARK) for c in cases.values()), strict=True))
    colors = [COLORS.get(c.backend, GREY) for c in cases.values()]
    ranges: dict[str, Sequence[object]] = {"color": colors, "strokeDash": dashes, "shape": shapes}
    return {channel: {"scale": {"domain": list(cases), "range": values}} for channel, values in ranges.items()}


def y_axis(measure: Measure, records: Sequence[Record]) -> Channel:
    """Return the axis of a measure: logarithmic with ticks at 1, 2, 5, 10, ..., or from 0."""
    if not measure.log:
        return {"scale": {"zero": True}, "axis": {"title": measure.axis, "tickCount": 5}}
    low, high = (f(record["y"] for record in records) for f in (min, max))
    steps = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high))) for m in (1, 2, 5)]
    ticks = [step for step in steps if low <= step <= high]
    axis = {"values": ticks} if ticks else {"tickCount": 5}
    return {"scale": {"type": "log", "nice": False, "padding": 14}, "axis": {"title": measure.axis, **axis}}


def bar_chart(
    records: Sequence[Record], title: str, colors: Sequence[str], **others: Sequence[Record]
) -> dict[str, Any]:
    """Return bars, from top to bottom, with their values beside them.

    A record's `backend` names the bar, in one or two lines, `y` is its length, and `label` the number at the right.
    Others: `ceilings`, records with `backend` and `y` drawn as ticks; `rule`, lines at `y`.
    """
    names = [record["backend"] for record in records]
    most = 1.2 * max(record["y"] for record in (*records, *others.get("ceilings", ())))  # room for the values
    x = {"scale": {"domain": [0, most]}, "axis": {"title": title}}
    scale = {"scale": {"domain": names, "range": list(colors)}}
    two_lines = any("\n" in name for name in names)
    y = {"sort": names, "axis": {"labelOffset": -6 if two_lines else 0}}  # half a line: the first one would be centred
    spec = chart("bars", records, more=others, x=x, y=y, color=scale)
    return spec | {"height": {"step": 30 if two_lines else 17}}
