"""The figures of a suite: at most MAX_FIGURES, the most important first, and only what the data supports.

They fill the Vega-Lite templates of charts.json. A backend has one colour in every figure, and a weight format one dash
and one marker. Text and axes are drawn in "currentColor", so that a chart suits a light and a dark page; as a file of
its own it has a background.
"""

from __future__ import annotations

import copy
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nanoinfer.bench.case import Case, Row
from nanoinfer.bench.derived_metrics import NAIVE
from nanoinfer.bench.formatting import digits
from nanoinfer.bench.report import panels
from nanoinfer.bench.report.panels import Measure, ceiling, setting, share_of_ceiling
from nanoinfer.bench.results import Results

MAX_FIGURES = 6
MAX_LINES = 8  # more lines than this cannot be told apart: bars
MIN_POSITIONS = 8  # fewer points are a number, not a curve
_SHADES = [0.9, 0.65, 0.45, 0.28, 0.15]
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


def figures(results: Results) -> list[Figure]:
    """Return the figures that the data supports, the most important first."""
    drafted = sum(row.case.draft is not None for row in results.rows)
    found = _speculation(results.rows) if 2 * drafted > len(results.rows) else _comparison(results.rows)
    return list(islice(found, MAX_FIGURES))


def _comparison(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the figures that compare backends; rows with a draft are in the table only."""
    axis = panels.sweep_axis(rows)
    plain = [row for row in rows if row.case.draft is None]
    swept = []
    for panel in panels.panels(plain, axis):
        if len(panel.places) < 3 or len({row.case.label for row in panel.rows}) > MAX_LINES:
            for part in panels.panels(panel.rows, axis, split=True):
                yield from _bars(part, rows)
        else:
            swept.append(panel)
            yield from _lines(panel, panel.measure, rows)
    for panel in panels.panels(plain, axis):
        yield from _positions(panel, rows)
    if axis == "batch":
        for panel in swept:
            for measure in (panels.TTFT, panels.MEMORY):
                yield from _lines(panel, measure, rows)
    yield from _breakdown(plain, axis)


def _lines(panel: panels.Panel, measure: panels.Measure, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a measure against the panel's axis; the ceilings dotted, one for each format of backends with a cache."""
    if not (shown := measure.of(panel.rows)):
        return
    records = [record_of(row, measure, y, x=getattr(row.case, panel.axis)) for row, y in shown]
    limits = _ceilings(panel) if measure.ceiling else []
    places = sorted({record["x"] for record in records})
    scale = {"type": "log", "domain": [places[0], places[-1]], "nice": False, "padding": 8}
    axis = {"values": places, "title": panels.AXES[panel.axis], "format": ",~r", "labelOverlap": False}
    named = {"ceilings": limits, "names": _ceiling_names(limits)}
    seen = {row.case.label for row, _ in shown}
    styles = look([row for row in panel.rows if row.case.label in seen])
    styles |= {"x": {"scale": scale, "axis": axis}, "y": y_axis(measure, [*records, *limits])}
    yield _figure(measure, panel.rows, rows, panel.axis, chart("lines", records, more=named, **styles))


def _ceilings(panel: panels.Panel) -> list[Record]:
    """Return the highest ceiling of each format and place; those of backends without a cache are not shown."""
    found: dict[tuple[str, int], float] = {}
    for row in panel.rows:
        if row.case.backend not in NAIVE and (limit := panels.ceiling(row)) is not None:
            key = row.case.format, getattr(row.case, panel.axis)
            found[key] = max(limit, found.get(key, 0.0))
    return [{"format": fmt, "x": x, "y": y, "value": f"{fmt}: {digits(y)} tokens/s"} for (fmt, x), y in found.items()]


def _ceiling_names(limits: Sequence[Record]) -> list[Record]:
    """Return the names of the ceilings at the right end; those too near each other share one."""
    last = max((record["x"] for record in limits), default=0)
    named: list[Record] = []
    for record in sorted((r for r in limits if r["x"] == last), key=lambda r: -r["y"]):
        if named and named[-1]["y"] < 1.6 * record["y"]:
            named[-1] = named[-1] | {"format": f"{named[-1]['format']}, {record['format']}"}
        else:
            named.append(record | {"format": f"ceiling {record['format']}"})
    return named


def _bars(panel: panels.Panel, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the measure of a panel of one size as bars, by bits of a weight and then by value; ceilings as ticks."""
    measure = panel.measure
    sign = 1 if measure.unit == "ms" else -1
    if not (shown := sorted(measure.of(panel.rows), key=lambda each: (-each[0].case.bits, sign * each[1]))):
        return
    longest = max(y for _, y in shown)
    limits = [(row, panels.ceiling(row)) for row, _ in shown] if measure.ceiling else []
    inside = [{"backend": row.case.label, "y": y} for row, y in limits if y is not None and y <= 3 * longest]
    records = [record_of(row, measure, y, x=getattr(row.case, panel.axis)) for row, y in shown]
    bars = bar_chart(records, measure.axis, [COLORS.get(row.case.backend, GREY) for row, _ in shown], ceilings=inside)
    yield _figure(measure, panel.rows, rows, panel.axis, bars)


def _positions(panel: panels.Panel, rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the time of each token against its position, at the largest size that was swept."""
    timed = [row for row in panel.rows if len(row.per_position_sec or ()) >= MIN_POSITIONS]
    timed = [row for row in timed if getattr(row.case, panel.axis) == max(getattr(r.case, panel.axis) for r in timed)]
    points = [(row, at, sec) for row in timed for at, sec in row.per_position_sec or () if sec > 0]  # the axis is a log
    if points:
        records = [record_of(row, panels.TIME, 1e3 * sec, x=at) for row, at, sec in points]
        spec = chart("positions", records, y=y_axis(panels.TIME, records), **look(timed))
        yield _figure(panels.TIME, timed, rows, panel.axis, spec)


def _breakdown(rows: Sequence[Row], axis: str) -> Iterator[Figure]:
    """Yield the shares of a decode step at the smallest and the largest size that have any, as stacked bars."""
    timed = [(row, getattr(row.case, axis)) for row in rows if row.breakdown_percent]
    places = [place for _, place in timed]
    ends = [(row, place) for row, place in timed if place in (min(places), max(places))]
    parts = list(dict.fromkeys(part for row, _ in ends for part in row.breakdown_percent or {}))
    several = len(set(places)) > 1
    records: list[Record] = [
        {
            "backend": row.case.label + (f", {axis.partition('_')[0]} {place}" if several else ""),
            "part": part, "y": share, "order": parts.index(part),
            "value": f"{part} {digits(share)}%",
        }
        for row, place in ends
        for part, share in (row.breakdown_percent or {}).items()
    ]  # fmt: skip
    if records:
        names = list(dict.fromkeys(record["backend"] for record in records))
        shades = {"domain": parts, "range": [_SHADES[i % len(_SHADES)] for i in range(len(parts))]}
        spec = chart("shares", records, y={"sort": names}, opacity={"scale": shades})
        yield Figure("breakdown", "Where the time goes", "", spec)


def _figure(
    measure: panels.Measure, rows: Sequence[Row], every: Sequence[Row], axis: str, spec: dict[str, Any]
) -> Figure:
    """Return a figure: its title tells it apart from the suite's others, its caption lists what its rows share."""
    fixed = [f for f in panels.varying(every) if f != axis or len({getattr(row.case, axis) for row in rows}) == 1]
    failed = sum(row.error is not None for row in rows)
    extrapolated = any("extrapolated" in row.note for row in rows)
    caption = (
        panels.setting(rows),
        "Dotted lines and ticks: ceilings" if measure.ceiling else "",
        f"{failed} of {len(rows)} cases failed" if failed else "",
        "Backends without a cache are extrapolated" if extrapolated else "",
    )
    title = ": ".join(filter(None, (measure.title, panels.setting(rows, fixed))))
    return Figure(measure.name, title, f"{'. '.join(filter(None, caption))}.", spec)


# Suites with drafts --------------------------------------------------------------------------------------------


def _speculation(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield tokens/s against the number of proposals, then each draft and each situation over plain decoding."""
    plain = {row.case: row for row in rows if row.case.draft is None}
    drafted = [row for row in rows if row.case.draft is not None]
    first = drafted[0].case
    yield from _against_k([r for r in drafted if (r.case.draft, r.case.shape) == (first.draft, first.shape)], plain)
    same = [r for r in drafted if r.case.plain == first.plain and r.case.speculate_k == "auto"]
    others = [r for r in drafted if r.case.shape != first.shape]
    yield from _speedups("drafts", "Drafts", same)
    yield from _speedups("situations", "Other prompts, samplers and batches", others)


def _against_k(swept: list[Row], plain: dict[Case, Row]) -> Iterator[Figure]:
    """Yield the decode throughput of one draft against the number of proposals, 0 for plain decoding."""
    bases = [plain[case] for case in dict.fromkeys(row.case.plain for row in swept) if case in plain]
    records = [
        record_of(row, panels.DECODE, y, x=str(k), backend=row.case.plain.label)
        for row, k in [*((row, 0) for row in bases), *((row, row.case.speculate_k) for row in swept)]
        if (y := panels.DECODE.value(row)) is not None
    ]
    if not records:
        return
    ks = sorted({record["x"] for record in records} - {"auto"}, key=int)
    x = {"type": "ordinal", "sort": [*ks, "auto"], "axis": {"title": "proposals at a time (k)", "labelAngle": 0}}
    spec = chart("lines", records, x=x, y=y_axis(panels.DECODE, records), **look(bases))
    spec["layer"][0]["transform"] = [{"filter": "datum.x != 'auto'"}]  # auto is a point beside the line
    caption = f"Draft {swept[0].case.draft}; 0 is decoding without a draft. {panels.setting(swept)}."
    yield Figure("k", "Decode throughput against k", caption, spec)


def _speedups(name: str, title: str, rows: list[Row]) -> Iterator[Figure]:
    """Yield the speed-ups of drafts over plain decoding as bars."""
    if shown := panels.SPEEDUP.of(rows):
        records = [
            record_of(row, panels.SPEEDUP, y, backend=_situation(row.case, name == "situations")) for row, y in shown
        ]
        colors = [COLORS.get(row.case.backend, GREY) for row, _ in shown]
        spec = bar_chart(records, panels.SPEEDUP.axis, colors, rule=[{"y": 1}])
        yield Figure(name, f"{title}: speed-up over the same case without a draft", f"{panels.setting(rows)}.", spec)


def _situation(case: Case, other: bool) -> str:
    """Return the name of a bar: where the draft is used, a line of its own, and the draft with its options."""
    workload = "random" if case.workload == "uniform" else case.workload
    sampler = "" if case.sampler == "greedy" else f" {case.sampler}"
    where = f"{workload}{sampler}, batch {case.batch}\n" if other else ""
    return where + case.label.partition(" + ")[2]
