"""Results as tables on the terminal: a row for each case, by shape."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from nanoinfer.bench.case import Case
from nanoinfer.bench.columns import COLUMNS, TERMINAL_ONLY, Column
from nanoinfer.bench.derived_metrics import BEST_PEER
from nanoinfer.bench.formatting import DASH, clean
from nanoinfer.bench.results import Results, headline
from nanoinfer.bench.row import BUSY

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
