"""Rows as HTML tables: what was measured beside what was predicted, failures with their error, a dash for unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.bench.report.panels import (
    memory_mb,
    predicted,
    roofline_point,
    setting,
    share_of_prediction,
    throughput,
    ttft_ms,
    varying,
)
from nanoinfer.bench.report.text import DASH, digits, escape, number, positive
from nanoinfer.bench.results import Row
from nanoinfer.bench.stats import Figures


@dataclass(frozen=True)
class Column:
    """One column: its heading and the text of a row in it, not yet escaped."""

    head: str
    say: Callable[[Row], str]


def _figure(get: Callable[[Figures], float | None], scale: float = 1.0) -> Callable[[Row], str]:
    """Return what says one of a row's figures, scaled."""

    def say(row: Row) -> str:
        found = number(get(row.figures)) if row.figures is not None else None
        return digits(None if found is None else found * scale)

    return say


def _scaled(get: Callable[[Row], float | None], scale: float) -> Callable[[Row], str]:
    """Return what says one of a row's own numbers, scaled."""

    def say(row: Row) -> str:
        found = number(get(row))
        return digits(None if found is None else found * scale)

    return say


def _intensity(row: Row) -> str:
    point = roofline_point(row, 1.0)
    return digits(point[0] if point is not None else None)


def _flops(row: Row, tokens_per_sec: float | None) -> str:
    point = roofline_point(row, tokens_per_sec)
    return digits(point[1] / 1e9 if point is not None else None)


MEASURED = Column("measured, tokens/s", lambda r: digits(throughput(r)))
PREDICTED = Column("predicted, tokens/s", lambda r: digits(positive(r.predicted_tokens_per_sec)))
SHARE = Column("of the predicted, %", lambda r: digits(share_of_prediction(r)))
TTFT = Column("TTFT, ms", lambda r: digits(ttft_ms(r)))
SPREAD = Column("spread, %", _figure(lambda f: f.spread_percent))
PEAK_MEMORY = Column("peak memory, MB", lambda r: digits(memory_mb(r)))
WEIGHTS = Column("weights, MB", _scaled(lambda r: r.weight_bytes, 1e-6))
MBU = Column("MBU, %", lambda r: digits(r.mbu_percent))
MFU = Column("MFU, %", lambda r: digits(r.mfu_percent))
SPEEDUP = Column("speed-up, times", lambda r: digits(r.speedup))
PREFILL = Column("prefill, tokens/s", _figure(lambda f: f.prefill_tokens_per_sec))
OUTPUT = Column("output, tokens/s", _figure(lambda f: f.output_tokens_per_sec))

THROUGHPUT_COLUMNS = (MEASURED, PREDICTED, SHARE, SPREAD)
TTFT_COLUMNS = (TTFT, PREFILL, SPREAD)
KERNELS = Column("kernels a step", lambda r: digits(r.kernels_per_step))
GPU_COLUMNS = (  # shown where a row has any of them
    KERNELS,
    Column("kernels a layer", lambda r: digits(r.kernels_per_layer)),
    Column("launches a step", lambda r: digits(r.launches_per_step)),
    Column("verifying 5 tokens, decodes", lambda r: digits(r.verify_ratio)),
    Column("reserved memory, MB", _scaled(lambda r: r.reserved_memory_bytes, 1e-6)),
    Column("KV cache, MB", _scaled(lambda r: r.kv_cache_bytes, 1e-6)),
)
MEMORY_COLUMNS = (PEAK_MEMORY, WEIGHTS)
LADDER_COLUMNS = (SPEEDUP, OUTPUT)
ROOFLINE_COLUMNS = (
    Column("FLOP per byte", _intensity),
    Column("measured, GFLOP/s", lambda r: _flops(r, throughput(r))),
    Column("predicted, GFLOP/s", lambda r: _flops(r, predicted(r))),
    SHARE,
    MBU,
    MFU,
)
ALL_COLUMNS = (
    MEASURED,
    PREDICTED,
    SHARE,
    SPEEDUP,
    Column("tokens/s a sequence", _figure(lambda f: f.decode_tokens_per_sec_per_seq)),
    OUTPUT,
    TTFT,
    PREFILL,
    Column("TPOT, ms", _figure(lambda f: f.tpot_sec, 1e3)),
    Column("TPOT p90, ms", _figure(lambda f: f.tpot_p90_sec, 1e3)),
    Column("TPOT p99, ms", _figure(lambda f: f.tpot_p99_sec, 1e3)),
    Column("total, s", _figure(lambda f: f.total_sec)),
    SPREAD,
    Column("rounds", lambda r: f"{r.figures.rounds}" if r.figures is not None else DASH),
    PEAK_MEMORY,
    WEIGHTS,
    Column("MB a token", _scaled(lambda r: r.bytes_per_token, 1e-6)),
    Column("GFLOP a token", _scaled(lambda r: r.flops_per_token, 1e-9)),
    MBU,
    MFU,
    Column("proposals right, %", lambda r: digits(r.acceptance_percent)),
    Column("accepted a round", lambda r: digits(r.mean_accepted_length)),
    Column("same tokens", lambda r: DASH if r.same_tokens is None else "yes" if r.same_tokens else "NO"),
)
NOTE = Column("note", lambda r: r.note or DASH)

_IDENTITY = {
    "model": Column("model", lambda r: r.case.model),
    "sampler": Column("sampler", lambda r: r.case.sampler),
    "batch": Column("batch", lambda r: f"{r.case.batch:,}"),
    "prompt_tokens": Column("prompt, tokens", lambda r: f"{r.case.prompt_tokens:,}"),
    "output_tokens": Column("out, tokens", lambda r: f"{r.case.output_tokens:,}"),
    "workload": Column("workload", lambda r: r.case.workload),
    "device": Column("device", lambda r: r.case.device),
}


def all_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return ALL_COLUMNS, and of what only a GPU has the columns in which any row says something."""
    return (*ALL_COLUMNS, *(c for c in GPU_COLUMNS if any(c.say(row) != DASH for row in rows)))


def table(rows: Sequence[Row], columns: Sequence[Column], caption: str) -> str:
    """Return rows as an HTML table: who, what the cases differ in, then `columns`; errors in the columns' place.

    Args:
        rows: in the order to show.
        columns: after the identity; a column in which every row has a dash is shown all the same.
        caption: what the table is; what all rows share is added.
    """
    if any(row.note for row in rows):
        columns = (*columns, NOTE)
    identity = [_IDENTITY[f] for f in varying(rows)]
    lines = []
    for row in rows:
        cells = [column.say(row) for column in identity]
        if row.error is not None:
            lines.append(_line(row.case.label, cells, row.error, len(columns)))
        else:
            lines.append(_line(row.case.label, cells + [column.say(row) for column in columns]))
    heads = ["contestant", *(column.head for column in (*identity, *columns))]
    return _html(heads, lines, ". ".join(filter(None, (caption, setting(rows)))))


def grid(heads: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> str:
    """Return texts as an HTML table; the first of each line is its heading."""
    return _html(heads, [_line(line[0], line[1:]) for line in lines], caption)


def _line(name: str, cells: Sequence[str], error: str | None = None, span: int = 0) -> str:
    """Return one table row; an error takes the place of `span` cells."""
    made = f'<th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    if error is not None:
        made += f'<td class="error" colspan="{span}"><strong>failed:</strong> {escape(error)}</td>'
    return f"<tr>{made}</tr>"


def _html(heads: Sequence[str], lines: Sequence[str], caption: str) -> str:
    """Return the table in a box that scrolls by itself, also by keyboard."""
    head = "".join(f'<th scope="col">{_head(text)}</th>' for text in heads)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table><caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _head(text: str) -> str:
    """Return a heading with its unit on a line of its own: "TTFT, ms" -> "TTFT,<br>ms"."""
    name, comma, unit = text.rpartition(", ")
    return f"{escape(name)},<br>{escape(unit)}" if comma else escape(text)
