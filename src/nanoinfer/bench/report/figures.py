"""The figures of the report, one function each: from rows to a matplotlib Figure, or None where no data supports it.

Call them inside `draw.drawing()`. Nothing here knows of HTML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.bench.report import draw
from nanoinfer.bench.report.draw import INK, Bar, Style
from nanoinfer.bench.report.panels import (
    AXES,
    Panel,
    Points,
    Value,
    at_ends,
    memory_mb,
    predicted,
    roofline_point,
    throughput,
    ttft_ms,
)
from nanoinfer.bench.report.text import number, positive, short, si
from nanoinfer.bench.results import Results

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Styles = dict[str, Style]
AXES_HEIGHT = 3.0  # inches, the legend apart
MAX_LINES = 8  # contestants; the lines of more are not told apart
MIN_POSITIONS = 31  # tokens after the first; fewer are a number, not a curve


def throughput_figure(panel: Panel, styles: Styles) -> Figure | None:
    """Draw tokens/s of all sequences against the batch, with what the roofline allows."""
    what = "output" if panel.rows[0].case.workload == "mixed" else "decode"
    return _sweep(panel, throughput, predicted, f"{what} tokens/s, all sequences", styles)


def ttft_figure(panel: Panel, styles: Styles) -> Figure | None:
    """Draw the time to first token."""
    return _sweep(panel, ttft_ms, None, "time to first token (ms)", styles)


def memory_figure(panel: Panel, styles: Styles) -> Figure | None:
    """Draw the peak memory of each contestant's process."""
    return _sweep(panel, memory_mb, None, "peak memory (MB)", styles)


def _sweep(panel: Panel, value: Value, limit: Value | None, y_label: str, styles: Styles) -> Figure | None:
    """Draw a measure over the panel's x: lines; bars where x has one value only, or lines would be too many."""
    series = panel.series(value)
    if not series:
        return None
    limits = panel.series(limit) if limit is not None else {}
    limits = {label: points for label, points in limits.items() if label in series}
    places = sorted({x for points in series.values() for x, _ in points})
    if len(places) == 1 or len(series) > MAX_LINES:
        groups = {
            panel.at(x): [Bar(k, dict(v)[x], dict(limits.get(k, [])).get(x)) for k, v in series.items() if x in dict(v)]
            for x in places
        }
        return draw.bars(groups, y_label, styles, one_scale=False)
    names = [*map(short, series), *_limit_names(limits)]
    figure, axes = draw.canvas(AXES_HEIGHT + draw.legend_height(names))
    handles = draw.lines(axes, series, styles)
    handles += _draw_limits(axes, limits, styles)
    axes.set_xlabel(AXES[panel.axis])
    draw.scale_x(axes, panel.places)
    draw.scale_y(axes, [y for points in (*series.values(), *limits.values()) for _, y in points], y_label)
    draw.grid(axes, "both")
    draw.legend(figure, handles, names)
    return figure


def _merged(limits: dict[str, Points]) -> list[tuple[list[str], Points]]:
    """Return each distinct prediction once, with the contestants that share it."""
    groups: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for label, points in limits.items():
        groups.setdefault(tuple(points), []).append(label)
    return [(labels, list(points)) for points, labels in groups.items()]


def _limit_names(limits: dict[str, Points]) -> list[str]:
    """Return the legend of the predictions: "roofline: float32" where several share one, else one for all."""
    merged = _merged(limits)
    formats = [sorted({label.rpartition(" ")[2] for label in labels}) for labels, _ in merged if len(labels) > 1]
    single = ["hollow: own roofline"] if any(len(labels) == 1 for labels, _ in merged) else []
    return [short("roofline: " + ", ".join(names)) for names in formats] + single


def _draw_limits(axes: Axes, limits: dict[str, Points], styles: Styles) -> list[Artist]:
    """Draw the predictions dotted: shared ones in ink, others hollow in the contestant's own look."""
    shared: list[Artist] = []
    single: list[Artist] = []
    ways: tuple[Any, ...] = (":", "-.", (0, (1, 3)), (0, (8, 2, 1, 2, 1, 2)))
    for labels, points in _merged(limits):
        xs, ys = zip(*points, strict=True)
        look = styles[labels[0]]
        common: dict[str, Any] = {"linewidth": 1.3, "label": f"roofline: {', '.join(labels)}", "zorder": 1.5}
        if len(labels) > 1:
            shared += axes.plot(xs, ys, color=INK, linestyle=ways[len(shared) % len(ways)], **common)
        else:
            single += axes.plot(
                xs, ys, color=look.color, linestyle=":", marker=look.marker, markersize=5.5, markerfacecolor="none",
                **common,
            )  # fmt: skip
    return shared + single[:1]


def time_per_token_figure(panel: Panel, styles: Styles) -> Figure | None:
    """Draw the time of each token against its position: the prompt's length and the tokens before it.

    Without each text's first token, which waits for the whole prompt, and without texts too short for a curve.
    """
    series: dict[str, Points] = {}
    for row in panel.rows:
        times = [(row.case.prompt_tokens + i, positive(t)) for i, t in enumerate(row.per_position_sec or ())]
        points = [(float(x), 1e3 * t) for x, t in times[1:] if t is not None]
        if len(points) >= MIN_POSITIONS:
            series[row.case.label] = points
    if not series:
        return None
    names = list(map(short, series))
    figure, axes = draw.canvas(AXES_HEIGHT + draw.legend_height(names))
    handles = draw.lines(axes, series, styles)
    axes.set_xlabel("position of the token")
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:,.10g}")
    draw.scale_y(axes, [y for points in series.values() for _, y in points], "time per token (ms)")
    draw.grid(axes, "both")
    draw.legend(figure, handles, names)
    return figure


def roofline_figure(results: Results, styles: Styles) -> Figure | None:
    """Draw FLOP/s against FLOP per byte: the machine's ceilings, and every measurement as a point below them."""
    bandwidth = positive(results.ceiling.get("read_bytes_per_sec"))
    peaks = _peaks(results)
    points: dict[str, Points] = {}
    limits: Points = []
    for row in results.rows:
        if (point := roofline_point(row, throughput(row))) is not None:
            points.setdefault(row.case.label, []).append(point)
            if (limit := roofline_point(row, predicted(row))) is not None:
                limits.append(limit)
    if bandwidth is None or not peaks or not points:
        return None
    names = [*map(short, points), *([draw.PREDICTED] if limits else [])]
    figure, axes = draw.canvas(AXES_HEIGHT + 0.3 + draw.legend_height(names))
    every = [*limits, *(p for group in points.values() for p in group)]
    left = min(x for x, _ in every) / 2
    right = max(*(x for x, _ in every), *(peak / bandwidth for peak in peaks.values())) * 4
    _draw_roofs(axes, bandwidth, peaks, left, right)
    handles: list[Artist] = []
    for label, group in points.items():
        xs, ys = zip(*group, strict=True)
        look = styles[label]
        handles += axes.plot(xs, ys, color=look.color, marker=look.marker, linestyle="none", label=short(label))
    if limits:
        xs, ys = zip(*limits, strict=True)
        handles += axes.plot(xs, ys, color=INK, marker="_", markersize=9, linestyle="none", label=draw.PREDICTED)
    low, high = min(y for _, y in every) / 2, max(*peaks.values(), *(y for _, y in every)) * 3
    axes.set_ylim(low, high)
    draw.plain_ticks(axes.yaxis, low, high, lambda v: si(v, "").replace(".00", "").replace(".0", "").rstrip())
    draw.grid(axes, "both")
    draw.legend(figure, handles, names)
    return figure


def _peaks(results: Results) -> dict[str, float]:
    """Return the measured FLOP/s by dtype, as far as they are known."""
    found = results.ceiling.get("flops_per_sec")
    return {str(k): v for k, raw in found.items() if (v := positive(raw))} if isinstance(found, dict) else {}


def _draw_roofs(axes: Axes, bandwidth: float, peaks: dict[str, float], left: float, right: float) -> None:
    """Draw the slope of the bandwidth up to the highest peak, and each dtype's flat roof from the slope on."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    top = max(peaks.values())
    axes.plot([left, top / bandwidth], [left * bandwidth, top], color=INK, linewidth=1.2, label="bandwidth")
    for (name, peak), dash in zip(peaks.items(), ("-", "--", "-.", ":") * len(peaks), strict=False):
        axes.plot([peak / bandwidth, right], [peak, peak], color=INK, linewidth=1.2, linestyle=dash, label=name)
        axes.text(right, peak * 1.08, f"{short(name)}, {si(peak, 'FLOP/s')}", ha="right", va="bottom", fontsize=9.5)
    axes.set_xlim(left, right)
    axes.set_xlabel(f"FLOP per byte read (slope: {si(bandwidth, 'B/s')})")
    draw.title_y(axes, "FLOP/s")
    draw.plain_ticks(axes.xaxis, left, right)


def ladder_figure(panel: Panel, styles: Styles) -> Figure | None:
    """Draw the speed-ups over the baseline as bars: at the smallest and the largest batch that have any."""
    series = panel.series(lambda row: number(row.speedup) if row.figures is not None else None)
    places = sorted({x for points in series.values() for x, _ in points})
    if not places:
        return None
    groups = {
        panel.at(place): [Bar(label, y) for label, points in series.items() for x, y in points if x == place]
        for place in dict.fromkeys((places[0], places[-1]))
    }
    figure = draw.bars(groups, "times the baseline's output tokens/s", styles)
    for axes in figure.axes:
        axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    return figure


def breakdown_figure(panel: Panel) -> Figure | None:
    """Draw where the time of a step goes: a stacked bar each at the smallest and the largest place."""
    rows = at_ends(panel.axis, [row for row in panel.rows if row.breakdown_percent])
    parts = list(dict.fromkeys(part for row in rows for part in row.breakdown_percent or {}))
    if not parts:
        return None
    names = [short(part) for part in parts]
    figure, axes = draw.canvas(0.66 * len(rows) + 0.75 + draw.legend_height(names))
    several = len({getattr(row.case, panel.axis) for row in rows}) > 1
    handles: dict[str, Artist] = {}
    for y, row in enumerate(rows):
        where = f", {panel.at(getattr(row.case, panel.axis))}" if several else ""
        axes.text(0, y - 0.5, short(f"{row.case.label}{where}", 60), va="center", fontweight="bold", fontsize=10)
        left = 0.0
        for i, part in enumerate(parts):
            share = number((row.breakdown_percent or {}).get(part)) or 0.0
            bar = axes.barh(
                y, share, left=left, height=0.32, color=draw.style(i).color, label=short(part),
                hatch=draw.HATCHES[i % len(draw.HATCHES)], edgecolor=draw.PAPER, linewidth=0.8,
            )  # fmt: skip
            handles.setdefault(part, bar[0])
            if share >= 5:
                axes.text(left + share / 2, y - 0.27, f"{share:.0f}", ha="center", va="center", fontsize=9.5)
            left += share
    axes.set_ylim(len(rows) - 0.7, -0.75)
    axes.set_yticks([])
    axes.set_xlabel("share of a step (%)")
    axes.spines["left"].set_visible(False)
    draw.legend(figure, list(handles.values()), names)
    return figure
