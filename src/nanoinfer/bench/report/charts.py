"""Which figures a results file supports, in the page's order, each with its words and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.bench.report import figures, tables
from nanoinfer.bench.report.figures import Styles
from nanoinfer.bench.report.panels import Panel, panels, setting, sweep_axis, varying
from nanoinfer.bench.report.tables import Column
from nanoinfer.bench.report.text import DASH, digits, number
from nanoinfer.bench.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Panel, Styles], "Figure | None"]


@dataclass(frozen=True)
class Chart:
    """One figure of the page."""

    name: str
    """For file names: throughput, ttft, ..."""
    title: str
    caption: str
    """How to read it, and what its rows share; plain text."""
    figure: Figure
    numbers: str
    """The same as HTML tables."""


@dataclass(frozen=True)
class _Kind:
    """One of the figures that are drawn for each panel."""

    name: str
    title: str
    caption: str
    draw: Draw
    columns: Sequence[Column]


_ENDS = " Of a swept size the smallest and the largest are drawn; the numbers have all."
_KINDS = (
    _Kind(
        "ladder",
        "Speed-up ladder",
        "How many times the baseline's output tokens/s in the same shape and dtype; the dotted line is the baseline."
        + _ENDS,
        figures.ladder_figure,
        tables.LADDER_COLUMNS,
    ),
    _Kind(
        "throughput",
        "Throughput",
        "Tokens/s of all sequences together, beside what the roofline allows: the time to read the weights, keys"
        " and values, or to do the arithmetic, whichever is longer.",
        figures.throughput_figure,
        tables.THROUGHPUT_COLUMNS,
    ),
    _Kind(
        "ttft",
        "Time to first token",
        "From the call to the first token, median over the sequences: lower is faster.",
        figures.ttft_figure,
        tables.TTFT_COLUMNS,
    ),
    _Kind(
        "memory",
        "Memory",
        "Peak memory of the contestant's own process, libraries included; on a GPU, of the device.",
        figures.memory_figure,
        tables.MEMORY_COLUMNS,
    ),
)


def charts(results: Results, styles: Styles) -> Iterator[Chart]:
    """Yield the figures that the data supports. Call inside `draw.drawing()`."""
    axis = sweep_axis(results.rows)
    for kind in _KINDS:
        for panel in panels(results.rows, axis):
            if (figure := kind.draw(panel, styles)) is not None:
                title = _title(kind.title, panel, results.rows)
                numbers = tables.table(panel.rows, kind.columns, title)
                yield Chart(kind.name, title, _caption(kind.caption, panel.rows), figure, numbers)
    for panel in panels(results.rows, axis, split=True):
        if (figure := figures.time_per_token_figure(panel, styles)) is not None:
            title = _title("Time per token against position", panel, results.rows)
            caption = (
                "Position 0 is the prompt's first token. The first new token waits for the whole prompt: it is in the"
                " numbers, not in the drawing."
            )
            yield Chart("position", title, _caption(caption, panel.rows), figure, _positions(panel.rows, title))
    if (figure := figures.roofline_figure(results, styles)) is not None:
        title = "Roofline"
        caption = (
            "Each point is one case; the bar above it is the prediction for the same case. Left of"
            " a roof's corner reading bounds the speed, right of it arithmetic does. Larger batches lie further right."
        )
        numbers = tables.table(results.rows, tables.ROOFLINE_COLUMNS, title)
        yield Chart("roofline", title, _caption(caption, results.rows), figure, numbers)
    for panel in panels(results.rows, axis):
        if (figure := figures.breakdown_figure(panel)) is not None:
            title = _title("Where the time goes", panel, results.rows)
            rows = [row for row in panel.rows if row.breakdown_percent]
            caption = "Shares of a decoding step in percent, from left to right in the order of the legend." + _ENDS
            yield Chart("breakdown", title, _caption(caption, rows), figure, _breakdown(rows, title))


def _title(text: str, panel: Panel, rows: Sequence[Row]) -> str:
    """Return a title with what tells the panel from the suite's others: "Memory: 1,000-token prompts"."""
    different = [field for field in varying(rows) if field != panel.axis or len(panel.places) == 1]
    return ": ".join(filter(None, (text, setting(panel.rows, different))))


def _caption(text: str, rows: Sequence[Row]) -> str:
    """Return a caption with what the rows share, their notes, and how many of them could not be drawn."""
    failed = sum(row.error is not None for row in rows)
    missing = f" {failed:,} of {len(rows):,} cases failed: their errors are in the numbers." if failed else ""
    noted: dict[str, dict[str, None]] = {}  # note -> the labels that have it, once each
    for row in rows:
        if row.note:
            noted.setdefault(row.note, {})[row.case.label] = None
    notes = "".join(f" {', '.join(labels)}: {note}." for note, labels in noted.items())
    return f"{text} Shown: {setting(rows)}.{missing}{notes}"


def _positions(rows: Sequence[Row], title: str) -> str:
    """Return the table of times by position, contestants side by side, and the errors of those that have none."""
    timed = [row for row in rows if row.per_position_sec]
    places = sorted({row.case.prompt_tokens + i for row in timed for i in range(len(row.per_position_sec or ()))})

    def say(row: Row, place: int) -> str:
        times, i = row.per_position_sec or [], place - row.case.prompt_tokens
        found = number(times[i]) if 0 <= i < len(times) else None
        return digits(None if found is None else 1e3 * found)

    heads = ["position", *(f"{row.case.label}, ms" for row in timed)]
    lines = [[f"{place:,}", *(say(row, place) for row in timed)] for place in places]
    made = tables.grid(heads, lines, f"{title}. {setting(rows)}")
    failed = [row for row in rows if row.error is not None]
    return made + (tables.table(failed, (Column("", lambda _: DASH),), "Failed") if failed else "")


def _breakdown(rows: Sequence[Row], title: str) -> str:
    """Return the table of shares: a line for each row, a column for each part."""
    parts = list(dict.fromkeys(part for row in rows for part in row.breakdown_percent or {}))
    fields = varying(rows)
    heads = ["contestant", *(f.replace("_", " ") for f in fields), *(f"{part}, %" for part in parts)]
    lines = [
        [row.case.label, *(str(getattr(row.case, f)) for f in fields)]
        + [digits((row.breakdown_percent or {}).get(part)) for part in parts]
        for row in rows
    ]
    return tables.grid(heads, lines, f"{title}. {setting(rows)}")
