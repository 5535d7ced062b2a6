"""How the report's figures look, whatever they show: colours, markers, lines over a swept size, bars.

Told apart without colour too: each contestant has a marker and a dash of its own, bars carry their names.
The six colours differ for readers with protanopia, deuteranopia and tritanopia, and have a contrast of 3:1
or more with the page in light and in dark (computed after Machado, Oliveira and Fernandes 2009). What is
drawn in INK takes the colour of the text around the figure (see `svg`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoinfer.bench.report.panels import Points
from nanoinfer.bench.report.text import digits, short
from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INK = "#010203"
PAPER = "#fdfeff"
PALETTE = (  # on white, on the dark page
    ("#123a5e", "#7ca4f4"),
    ("#c2781a", "#e0602a"),
    ("#3f9a76", "#6aeeb4"),
    ("#e23fae", "#b0648a"),
    ("#4a3208", "#f5d04a"),
    ("#7c2cf0", "#8a5cf6"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", "*", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oo", "++++")
PREDICTED = "roofline's prediction"
WIDTH = 4.8  # inches: about a phone's width at 1 CSS pixel a point
LOG_ABOVE = 20.0  # the largest value over the smallest beyond which y is logarithmic
RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,  # a model's name may hold a $
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "nanoinfer",  # the same figure is the same file
}


@dataclass(frozen=True)
class Style:
    """How one contestant is drawn, in every figure of a page."""

    color: str
    marker: str
    dash: Any


@dataclass(frozen=True)
class Bar:
    """One bar, and the tick of the prediction on it."""

    label: str
    value: float
    limit: float | None = None


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in the report's style inside; matplotlib's own settings are as before after it.

    Raises:
        NanoinferError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise NanoinferError(
            "matplotlib is not installed, and the report's figures are drawn with it: pip install 'nanoinfer[bench]'"
        ) from None
    with matplotlib.rc_context(RC):
        yield


def style(index: int) -> Style:
    """Return the style of the contestant that appears as number `index`; 132 of them differ."""
    return Style(PALETTE[index % len(PALETTE)][0], MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)])


def canvas(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the page's width and a height in inches, with one pair of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    return figure, axes


def legend_columns(names: Iterable[str]) -> int:
    """Return how many names fit side by side."""
    return 2 if max(map(len, names), default=0) <= 21 else 1


def legend_height(names: Sequence[str]) -> float:
    """Return the height of a legend below the axes in inches."""
    return 0.12 + 0.2 * math.ceil(len(names) / legend_columns(names))


def legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Put the legend below the axes."""
    columns = legend_columns(names)
    figure.legend(
        handles, names, loc="outside lower left", ncols=columns, frameon=False, handlelength=2.8, borderpad=0.1,
        columnspacing=1.2, labelspacing=0.3,
    )  # fmt: skip


def grid(axes: Axes, which: str) -> None:
    """Draw faint lines along "x", "y" or "both"."""
    axes.grid(visible=True, axis=which, color=INK, alpha=0.14, linewidth=0.7)  # type: ignore[arg-type]
    axes.tick_params(length=3)


def plain_ticks(axis: Any, low: float, high: float, say: Callable[[float], str] = lambda v: f"{v:,.10g}") -> None:
    """Write the ticks of a logarithmic axis as plain numbers: 50, 100, 200; over many decades 1, 10, 100."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    steps = (1, 2, 5) if high / low < 1e3 else (1,)
    axis.set_major_locator(LogLocator(base=10, subs=steps, numticks=14))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: say(v)))


def title_y(axes: Axes, text: str) -> None:
    """Write what y measures above the axis, where it can be read without tilting the head."""
    axes.set_title(text, loc="left", fontsize=10.5)


def scale_y(axes: Axes, values: Sequence[float], text: str) -> None:
    """Let y begin at 0; over a wide range make it logarithmic and say so."""
    from matplotlib.ticker import FuncFormatter

    low, high = min(values), max(values)
    if low > 0 and high / low > LOG_ABOVE:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.4, high * 1.4)
        plain_ticks(axes.yaxis, low, high)
        title_y(axes, f"{text}, logarithmic")
    else:
        axes.set_ylim(0, high * 1.08 or 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
        title_y(axes, text)


def scale_x(axes: Axes, places: Sequence[int]) -> None:
    """Let x be logarithmic, with a tick at each place that was measured (at most 10 of them)."""
    axes.set_xscale("log", base=2)
    ticks = places[:: math.ceil(len(places) / 10)]
    axes.set_xticks(ticks, labels=[f"{t:,}" for t in ticks])
    axes.minorticks_off()


def lines(axes: Axes, series: dict[str, Points], styles: dict[str, Style], num_markers: int = 12) -> list[Artist]:
    """Draw a line for each contestant; return them for the legend."""
    found: list[Artist] = []
    for label, points in series.items():
        look, (xs, ys) = styles[label], zip(*points, strict=True)
        every = max(1, len(xs) // num_markers)
        found += axes.plot(
            xs, ys, color=look.color, marker=look.marker, linestyle=look.dash, linewidth=1.7, markersize=5.5,
            markevery=every, label=short(label),
        )  # fmt: skip
    return found


def bars(groups: dict[str, list[Bar]], x_label: str, styles: dict[str, Style], *, one_scale: bool = True) -> Figure:
    """Return horizontal bars from 0, the first on top, each with its name and number.

    Args:
        groups: from heading to bars; one group needs no heading.
        x_label: what the bars measure, with its unit.
        styles: by contestant.
        one_scale: whether groups can be compared with each other; otherwise each has a scale of its own.
    """
    from matplotlib.figure import Figure

    limits = any(bar.limit is not None for group in groups.values() for bar in group)
    sizes = [len(group) + 0.4 for group in groups.values()]
    scales = len(groups) if not one_scale else 1
    height = 0.29 * sum(sizes) + 0.28 * (len(groups) - 1) + 0.3 * scales + 0.3 + (0.3 if limits else 0)
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
    rows = figure.subplots(
        len(groups), 1, squeeze=False, sharex=one_scale, height_ratios=sizes, subplot_kw={"facecolor": "none"}
    )
    longest = [max(max(b.value, b.limit or 0) for b in group) for group in groups.values()]
    for axes, (heading, group), own in zip(rows[:, 0], groups.items(), longest, strict=True):
        if len(groups) > 1:
            axes.set_title(heading, loc="left", fontsize=10.5, fontweight="bold")
        _draw_bars(axes, group, styles, max(longest) if one_scale else own)
        axes.set_xlim(0, (max(longest) if one_scale else own) * (1.6 if limits else 1.25) or 1)
    rows[-1, 0].set_xlabel(x_label, loc="right")  # long ones reach under the names, not out of the figure
    if limits:
        legend(figure, [_limit_mark([], [])], [PREDICTED])
    return figure


def _limit_mark(xs: Sequence[float], ys: Sequence[float]) -> Line2D:
    """Return the tick of a prediction on a bar."""
    from matplotlib.lines import Line2D

    return Line2D(xs, ys, linestyle="none", marker="|", markersize=13, markeredgewidth=2, color=INK)


def _draw_bars(axes: Axes, group: Sequence[Bar], styles: dict[str, Style], longest: float) -> None:
    """Draw one group of bars, with numbers at their ends."""
    for y, bar in enumerate(group):
        axes.barh(y, bar.value, height=0.62, color=styles[bar.label].color, label=short(bar.label))
        said = digits(bar.value)
        if bar.limit is not None:
            axes.add_line(_limit_mark([bar.limit], [y]))
            said = f"{said} of {digits(bar.limit)}"
        end = max(bar.value, bar.limit or 0) + (0.02 if bar.limit is None else 0.04) * longest
        under = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}  # keeps lines behind it from crossing it
        axes.text(end, y, said, va="center", fontsize=10, bbox=under)
    axes.set_yticks(range(len(group)), labels=[short(bar.label) for bar in group])
    axes.set_ylim(len(group) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:,.10g}")
    axes.spines["left"].set_visible(False)
    grid(axes, "x")
    axes.tick_params(axis="y", length=0)
