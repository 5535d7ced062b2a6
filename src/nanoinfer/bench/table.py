"""Results as tables: the columns of page and terminal, and on the terminal a row for each case, by shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from nanoinfer.bench.case import BUSY, Case, Row
from nanoinfer.bench.derived_metrics import BEST_PEER
from nanoinfer.bench.formatting import DASH, clean, digits
from nanoinfer.bench.report.panels import ceiling, share_of_ceiling
from nanoinfer.bench.results import Results, headline


class Column(NamedTuple):
    """One column: its heading on the page, what it shows of a row, its heading on the terminal, and what that means.

    Columns without a heading on the terminal are on the page only.
    """

    name: str
    show: Callable[[Row], str]
    head: str = ""
    legend: str = ""


def figure(name: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Return the function that shows `Row.number`."""
    return lambda row: digits(row.number(name, scale))


def _range(row: Row) -> str:
    return f"{row.speedup_min:.2f}-{row.speedup_max:.2f}" if row.speedup_min and row.speedup_max else DASH


COLUMNS = (
    Column("decode tokens/s", figure("decode_tokens_per_sec"), "tok/s", "all sequences"),
    Column("ceiling", lambda r: digits(ceiling(r)), "limit", "the roofline's"),
    Column("of it, %", lambda r: digits(share_of_ceiling(r))),
    Column("spread, %", figure("spread_percent")),
    Column("output tokens/s", figure("output_tokens_per_sec"), "output/s", "tokens, by wall time"),
    Column("speed-up", figure("speedup"), "x", "speed-up"),
    Column("prefill tokens/s", figure("prefill_tokens_per_sec")),
    Column("TTFT, ms", figure("ttft_sec", 1e3), "TTFT ms"),
    Column("TPOT, ms", figure("tpot_sec", 1e3), "TPOT ms"),
    Column("p90", figure("tpot_p90_sec", 1e3)),
    Column("p99", figure("tpot_p99_sec", 1e3), "p99 ms"),
    Column("longest gap, ms", figure("worst_gap_sec", 1e3), "gap ms", "the longest between two tokens of a sequence"),
    Column("total, s", figure("total_sec"), "total s"),
    Column("rounds", figure("rounds")),
    Column("peak memory, MB", figure("peak_memory_bytes", 1e-6), "MB"),
    Column("weights, MB", figure("weight_bytes", 1e-6)),
    Column("MB a token", figure("bytes_per_token", 1e-6)),
    Column("GFLOP a token", figure("flops_per_token", 1e-9)),
    Column("MBU, %", figure("mbu_percent"), "MBU %"),
    Column("MFU, %", figure("mfu_percent")),
    Column("accepted, %", figure("acceptance_percent"), "accepted %"),
    Column("accepted a step", figure("mean_accepted_length"), "a step", "accepted in a verify step"),
    Column("time in the draft, %", figure("draft_share_percent"), "draft %", "share of the time"),
    Column("kernels a step", figure("kernels_per_step"), "kernels", "of a decode step"),
    Column("kernels a layer", figure("kernels_per_layer"), "a layer", "kernels"),
    Column("launches a step", figure("launches_per_step"), "launches", "of a decode step"),
    Column("verifying 5 tokens, decodes", figure("verify_ratio"), "verify", "a step of 5 tokens over one of 1"),
    Column("same tokens", lambda r: DASH if r.same_tokens is None else "yes" if r.same_tokens else "NO"),
    Column("note", lambda r: r.note or DASH),
)
TERMINAL_ONLY = (
    Column("", _range, "range", "of the rounds' speed-ups"),
    Column("", lambda r: r.predicted_speculation or DASH, "best k", "by the roofline at that acceptance"),
)
_BY_HEAD = {column.head: column for column in (*COLUMNS, *TERMINAL_ONLY) if column.head}
# Headings by importance: as many of them are shown as the terminal has room for.
_PLAIN = ("tok/s", "x", "TTFT ms", "TPOT ms", "MBU %", "MB", "limit", "p99 ms")
_ON_GPU = ("tok/s", "x", "kernels", "launches", "verify", "a layer", "TTFT ms", "TPOT ms", "MBU %", "MB")
_SERVING = ("output/s", "x", "tok/s", "TTFT ms", "p99 ms", "gap ms", "total s", "MB")
_DRAFTED = ("tok/s", "x", "range", "accepted %", "a step", "draft %", "best k", "TTFT ms")


def show(results: Results, console: Console) -> None:
    """Print a results file: the ceiling, and every case in the columns that fit the width."""
    results = clean(results)
    console.print(headline(results), highlight=False)
    columns, wide = _columns(results), console.options.update(width=10_000)
    while len(columns) > 1 and Measurement.get(console, wide, _cases(results, columns)).maximum > console.width:
        columns.pop()
    console.print(_cases(results, columns))
    for row in results.rows:
        if why := row.error or (row.note if BUSY in row.note else None):
            line = f"{row.case.label}, batch {row.case.batch}: {why}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _columns(results: Results) -> list[Column]:
    """Return the columns of the main table with any value, by importance."""
    on_gpu = any(r.kernels_per_step is not None for r in results.rows)
    heads = _DRAFTED if any(r.case.draft for r in results.rows) else _ON_GPU if on_gpu else _PLAIN
    heads = _SERVING if results.suite == "serving" else heads
    if results.suite in ("kv-cache", "throughput"):  # their published tables are of seconds
        heads = (*heads[:2], "total s", *heads[2:])
    columns = [_BY_HEAD[head] for head in heads]
    return [c for c in columns if c.head == "tok/s" or any(c.show(r) != DASH for r in results.rows)]


def _cases(results: Results, columns: list[Column]) -> Table:
    """Return the main table: the rows of each shape below its name, those with a draft below the same without."""
    within = "shape" if results.baseline == BEST_PEER else "shape and dtype"
    title = f"suite {results.suite}, speed-ups over {results.baseline} in the same {within}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", show_edge=False,
                  pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("backend", no_wrap=True)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    several = len({r.case.model for r in results.rows}) > 1
    plain: Case | None = None
    for _, rows in groupby(results.rows, key=lambda r: r.case.shape):
        for i, row in enumerate(rows):
            if i == 0:
                table.add_section()
                table.add_row(shape_name(row.case, several_models=several), style="bold")
            label = row.case.label
            if row.case == row.case.plain:
                plain = row.case
            elif row.case.plain == plain:
                label = f"  + {label.removeprefix(f'{plain.label} + ')}"
            mark = " (error)" if row.error else " ~" if "extrapolated" in row.note else ""
            table.add_row(f"  {label}{mark}", *(column.show(row) for column in columns))
    legends = [f"{c.head}: {c.legend}" for c in columns if c.legend]
    legends += ["~: extrapolated from a few lengths"] * any("extrapolated" in r.note for r in results.rows)
    table.caption = "; ".join(legends)
    return table


def shape_name(case: Case, *, several_models: bool = False) -> str:
    """Return the name of a shape: "batch 8, 32+64 tokens"; "gpt2-xl, batch 1, copy sampled 96+64 tokens"."""
    sizes = "" if case.workload == "mixed" else f"{case.prompt_tokens}+{case.output_tokens} tokens"
    kind = [x for x in (case.workload, case.sampler) if x not in ("uniform", "greedy")]
    model = [case.model.removeprefix("random:")] if several_models else []
    return ", ".join([*model, f"batch {case.batch}", " ".join(filter(None, [*kind, sizes]))])
