"""Results as tables on the terminal: a row a case by shape, and the layouts of the published tables beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from nanoinfer.bench.case import Case
from nanoinfer.bench.columns import COLUMNS, TERMINAL_ONLY, Column
from nanoinfer.bench.formatting import DASH, clean, digits
from nanoinfer.bench.results import Results, Row

T = TypeVar("T")
_BY_HEAD = {column.head: column for column in (*COLUMNS, *TERMINAL_ONLY) if column.head}
# Headings by importance: as many of them are shown as the terminal has room for.
_PLAIN = ("tok/s", "x", "TTFT ms", "TPOT ms", "MBU %", "MB", "limit", "p99 ms")
_ON_GPU = ("tok/s", "x", "kernels", "launches", "verify", "a layer", "TTFT ms", "TPOT ms", "MBU %", "MB")
_DRAFTED = ("tok/s", "x", "range", "accepted %", "a step", "draft %", "best k", "TTFT ms")


def show(results: Results, console: Console) -> None:
    """Print a results file: the ceiling, every case, and the suite's own layout, in the columns that fit the width."""
    results = clean(results)
    console.print(headline(results), highlight=False)
    console.print(_fitting(lambda columns: _cases(results, columns), _columns(results), console))
    for row in results.failed:
        line = f"{row.case.label}, batch {row.case.batch}: {row.error}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    shapes = list(dict.fromkeys(_shape(row) for row in results.rows))
    if results.suite in ("peers", "gpu"):
        console.print(_fitting(partial(_by_shape, results), shapes, console))


def headline(results: Results) -> str:
    """Return the ceiling of the measured device on one line."""
    flops = ", ".join(f"{name} {value / 1e12:.2f} TFLOP/s" for name, value in results.ceiling["flops_per_sec"].items())
    bandwidth = results.ceiling["read_bytes_per_sec"] / 1e9
    if results.machine.get("gpu_details"):
        name = results.machine.get("gpu")
        return f"ceiling of {name}: copies {bandwidth:,.0f} GB/s, read and written; products {flops}"
    products = f"; products {flops}" if flops else ""
    by_size = results.ceiling.get("read_bytes_per_sec_by_size")
    reads = f"{bandwidth:.1f} GB/s{f' (up to {max(by_size.values()) / 1e9:.1f} from caches)' if by_size else ''}"
    return f"ceiling of this machine: reads {reads}{products} ({results.machine.get('threads', '?')} threads)"


def _new_table(title: str, gap: int = 1) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", show_edge=False,
                 pad_edge=False, padding=(0, gap, 0, 0))  # fmt: skip


def _fitting(build: Callable[[list[T]], Table], items: list[T], console: Console) -> Table:
    """Return the table that `build` makes of the items, without the last ones where the console is too narrow."""
    table = build(items)
    wide = console.options.update(width=10_000)
    if len(items) > 1 and Measurement.get(console, wide, table).maximum > console.width:
        return _fitting(build, items[:-1], console)
    return table


def _columns(results: Results) -> list[Column]:
    """Return the columns of the main table with any value, by importance."""
    on_gpu = any(r.kernels_per_step is not None for r in results.rows)
    heads = _DRAFTED if any(r.case.draft for r in results.rows) else _ON_GPU if on_gpu else _PLAIN
    if results.suite in ("kv-cache", "throughput"):  # their published tables are of seconds
        heads = (*heads[:2], "total s", *heads[2:])
    columns = [_BY_HEAD[head] for head in heads]
    return [c for c in columns if c.head == "tok/s" or any(c.show(r) != DASH for r in results.rows)]


def _cases(results: Results, columns: list[Column]) -> Table:
    """Return the main table: the rows of each shape below its name, those with a draft below the same without."""
    table = _new_table(f"suite {results.suite}, speed-ups over {results.baseline} in the same shape and dtype")
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
            if row.case.draft is None:
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


def _shape(row: Row) -> tuple[str, int, int, str]:
    return row.case.model, row.case.batch, row.case.prompt_tokens, row.case.workload


def _by_shape(results: Results, shapes: list[tuple[str, int, int, str]]) -> Table:
    """Return the tokens/s of a peers table: a row for each system, a column for each shape."""
    several = len({r.case.model for r in results.rows}) > 1
    table = _new_table("tokens/s of all sequences (mixed: output tokens by wall time)", gap=0)
    table.add_column("system", no_wrap=True)
    for model, batch, prompt, workload in shapes:
        lines = [model.removeprefix("random:")] if several else []
        lines += [f"batch {batch}", "mixed" if workload == "mixed" else f"{prompt} in"]
        table.add_column("\n".join(lines), justify="right", no_wrap=True)
    rows = {(r.case.label, _shape(r)): r for r in results.rows}
    for label in dict.fromkeys(r.case.label for r in results.rows):
        cells = [rows.get((label, shape)) for shape in shapes]
        table.add_row(label, *(DASH if r is None else "error" if r.figures is None else _speed(r) for r in cells))
    return table


def _speed(row: Row) -> str:
    mixed = row.case.workload == "mixed"
    return digits(row.number("output_tokens_per_sec" if mixed else "decode_tokens_per_sec"))
