"""Results as tables on the terminal: a row for each case, by shape, in the columns that fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from nanoinfer.bench.case import BUSY, DASH, Case, Row, digits
from nanoinfer.bench.results import BEST_PEER, Results, headline


class Column(NamedTuple):
    """A column: the text that it shows of a row, and the meaning of its heading."""

    show: Callable[[Row], str]
    legend: str = ""


def _figure(name: str, scale: float = 1.0, legend: str = "") -> Column:
    """Return the column that shows `Row.number`."""
    return Column(lambda row: digits(row.number(name, scale)), legend)


def _range(row: Row) -> str:
    return f"{row.speedup_min:.2f}-{row.speedup_max:.2f}" if row.speedup_min and row.speedup_max else DASH


COLUMNS = {
    "tok/s": _figure("decode_tokens_per_sec", legend="all sequences"),
    "limit": Column(lambda row: digits(row.ceiling), "the roofline's"),
    "output/s": _figure("output_tokens_per_sec", legend="tokens, by wall time"),
    "x": _figure("speedup", legend="speed-up"),
    "range": Column(_range, "of the rounds' speed-ups"),
    "TTFT ms": _figure("ttft_sec", 1e3),
    "TPOT ms": _figure("tpot_sec", 1e3),
    "p99 ms": _figure("tpot_p99_sec", 1e3),
    "gap ms": _figure("worst_gap_sec", 1e3, "the longest between two tokens of a sequence"),
    "total s": _figure("total_sec"),
    "MB": _figure("peak_memory_bytes", 1e-6),
    "MBU %": _figure("mbu_percent"),
    "accepted %": _figure("acceptance_percent"),
    "a step": _figure("mean_accepted_length", legend="accepted in a verify step"),
    "draft %": _figure("draft_share_percent", legend="share of the time"),
    "kernels": _figure("kernels_per_step", legend="of a decode step"),
    "a layer": _figure("kernels_per_layer", legend="kernels"),
    "launches": _figure("launches_per_step", legend="of a decode step"),
    "verify": _figure("verify_ratio", legend="a step of 5 tokens over one of 1"),
}
# Headings by importance: as many of them are shown as the terminal has room for.
_PLAIN = ("tok/s", "x", "TTFT ms", "TPOT ms", "MBU %", "MB", "limit", "p99 ms")
_ON_GPU = ("tok/s", "x", "kernels", "launches", "verify", "a layer", "TTFT ms", "TPOT ms", "MBU %", "MB")
_SERVING = ("output/s", "x", "tok/s", "TTFT ms", "p99 ms", "gap ms", "total s", "MB")
_DRAFTED = ("tok/s", "x", "range", "accepted %", "a step", "draft %", "TTFT ms")


def show(results: Results, console: Console) -> None:
    """Print a results file: the ceiling, and every case in the columns that fit the width."""
    console.print(headline(results), highlight=False)
    heads, wide = _heads(results), console.options.update(width=10_000)
    while len(heads) > 1 and Measurement.get(console, wide, _cases(results, heads)).maximum > console.width:
        heads.pop()
    console.print(_cases(results, heads))
    for row in results.rows:
        if why := row.error or (row.note if BUSY in row.note else None):
            line = f"{row.case.label}, batch {row.case.batch}: {why}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _heads(results: Results) -> list[str]:
    """Return the headings of the columns with any value, by importance."""
    on_gpu = any(r.kernels_per_step is not None for r in results.rows)
    heads = _DRAFTED if any(r.case.draft for r in results.rows) else _ON_GPU if on_gpu else _PLAIN
    heads = _SERVING if results.suite == "serving" else heads
    return [h for h in heads if h == "tok/s" or any(COLUMNS[h].show(r) != DASH for r in results.rows)]


def _cases(results: Results, heads: list[str]) -> Table:
    """Return the table: the rows of each shape below its name, those with a draft below the same without."""
    within = "shape" if results.baseline == BEST_PEER else "shape and dtype"
    title = f"suite {results.suite}, speed-ups over {results.baseline} in the same {within}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", show_edge=False,
                  pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    table.add_column("backend", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
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
            table.add_row(f"  {label}{mark}", *(COLUMNS[head].show(row) for head in heads))
    legends = [f"{head}: {legend}" for head in heads if (legend := COLUMNS[head].legend)]
    legends += ["~: extrapolated from a few lengths"] * any("extrapolated" in r.note for r in results.rows)
    table.caption = "; ".join(legends)
    return table


def shape_name(case: Case, *, several_models: bool = False) -> str:
    """Return the name of a shape: "batch 8, 32+64 tokens"; "gpt2-xl, batch 1, copy sampled 96+64 tokens"."""
    sizes = "" if case.workload == "mixed" else f"{case.prompt_tokens}+{case.output_tokens} tokens"
    kind = [x for x in (case.workload, case.sampler) if x not in ("uniform", "greedy")]
    model = [case.model.removeprefix("random:")] if several_models else []
    return ", ".join([*model, f"batch {case.batch}", " ".join(filter(None, [*kind, sizes]))])
