"""Results as tables on the terminal: one row a case, and the layouts of the published tables beside them."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from nanoinfer.bench.case import Case
from nanoinfer.bench.results import Results, Row

MIB = 1 << 20


def show(results: Results, console: Console) -> None:
    """Print a results file: the ceiling, every case, and the suite's own layout."""
    console.print(headline(results), highlight=False, soft_wrap=True)
    console.print(_cases(results))
    for row in results.failed:
        console.print(f"{row.case.label}, batch {row.case.batch}: {row.error}", highlight=False, soft_wrap=True)
    if results.suite in ("kv-cache", "throughput"):
        console.print(_with_and_without(results))
    if results.suite in ("peers", "gpu"):
        title = "tokens/s, all sequences together (mixed: output tokens by wall time)"
        console.print(_by_shape(results, title, _speed))
    if results.suite == "gpu":
        console.print(_by_shape(results, "peak memory of the GPU, MiB", _memory))


def headline(results: Results) -> str:
    """Return the ceiling on one line: of the device that was measured."""
    flops = ", ".join(f"{name} {value / 1e12:.2f} TFLOP/s" for name, value in results.ceiling["flops_per_sec"].items())
    bandwidth = results.ceiling["read_bytes_per_sec"] / 1e9
    if results.machine.get("gpu_details"):
        return (
            f"ceiling of {results.machine.get('gpu')}: copies {bandwidth:,.0f} GB/s, read and written; products {flops}"
        )
    threads = results.machine.get("threads", "?")
    products = f"; products {flops}" if flops else ""
    return f"ceiling of this machine: reads {bandwidth:.1f} GB/s{products} ({threads} threads)"


def number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    """Return a number for a cell: number(0.01234, 1, 1e3) -> "12.3"; None -> "–"."""
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _figure(row: Row, name: str) -> float | None:
    """Return a figure of a row, None where the row has none."""
    value: float | None = getattr(row.figures, name, None)
    return value


def _in_and_out(case: Case) -> str:
    """ "32+64"; "copy 96+64"; "mixed"."""
    if case.workload == "mixed":
        return "mixed"
    sizes = f"{case.prompt_tokens}+{case.output_tokens}"
    words = [w for w in (case.workload, case.sampler) if w not in ("uniform", "greedy")]
    return " ".join([*words, sizes])


_LONGEST_WORD = len("transformers-dynamic")  # of a backend's name, which breaks between words alone
_Column = tuple[str, Callable[[Row], str]]
_LIMITS: list[_Column] = [
    ("TPOT ms", lambda r: number(_figure(r, "tpot_sec"), 1, 1e3)),
    ("p99", lambda r: number(_figure(r, "tpot_p99_sec"), 1, 1e3)),
    ("MiB", lambda r: number(r.peak_memory_bytes, 0, 1 / MIB)),
    ("MBU %", lambda r: number(r.mbu_percent, 0)),
    ("limit", lambda r: number(r.predicted_tokens_per_sec, 0)),
]
_LAUNCHES: list[_Column] = [
    ("kernels", lambda r: number(r.kernels_per_step, 0)),
    ("a layer", lambda r: number(r.kernels_per_layer, 0)),
    ("launches", lambda r: number(r.launches_per_step, 0)),
]
_LESS = ("p99", "limit")  # what makes room for them
_VERIFY: list[_Column] = [("verify", lambda r: number(r.verify_ratio, 2))]
_SPECULATION: list[_Column] = [
    ("right %", lambda r: number(r.acceptance_percent, 0)),
    ("a round", lambda r: number(r.mean_accepted_length, 1)),
    ("draft %", lambda r: number(r.draft_share_percent, 0)),
    ("roofline", lambda r: r.predicted_speculation or "–"),
    ("range", lambda r: f"{r.speedup_min:.2f}-{r.speedup_max:.2f}" if r.speedup_min and r.speedup_max else "–"),
]


def _cases(results: Results) -> Table:
    table = Table(
        box=box.SIMPLE, title=f"suite {results.suite}, speed-ups over {results.baseline} in the same shape and dtype"
    )
    launches = any(r.kernels_per_step is not None for r in results.rows)
    limits = [c for c in _LIMITS if not launches or c[0] not in _LESS]
    columns: list[_Column] = [
        ("backend", lambda r: r.case.label),
        *(
            [("model", lambda r: r.case.model.removeprefix("random:"))]
            if len({r.case.model for r in results.rows}) > 1
            else []
        ),
        ("batch", lambda r: str(r.case.batch)),
        (
            "in+out",
            lambda r: _in_and_out(r.case),
        ),
        ("tok/s", lambda r: number(_figure(r, "decode_tokens_per_sec"), 1)),
        ("TTFT ms", lambda r: number(_figure(r, "ttft_sec"), 1, 1e3)),
        *(_SPECULATION if any(r.case.draft for r in results.rows) else limits),
        *(_LAUNCHES if launches else []),
        *(_VERIFY if any(r.verify_ratio is not None for r in results.rows) else []),
        ("x", lambda r: number(r.speedup, 2)),
        ("", lambda r: "error" if r.error else "~" if "extrapolated" in r.note else ""),
    ]
    for i, (name, _) in enumerate(columns):
        table.add_column(
            name, justify="left" if i == 0 else "right", no_wrap=i > 0, min_width=_LONGEST_WORD if i == 0 else None
        )
    for row in results.rows:
        table.add_row(*(cell(row) for _, cell in columns))
    table.caption = "tok/s: all sequences; limit: what the roofline allows; ~: extrapolated from a few lengths"
    if _SPECULATION[0] in columns:
        table.caption = (
            "tok/s: all sequences; right: of the proposals that were judged; a round: accepted at a time;"
            " draft: share of the time; roofline: the best k at that acceptance; x: over the row without a draft, the"
            " median of the rounds; range: the smallest and the largest of a round"
        )
    if launches:
        table.caption = (
            "tok/s: all sequences; kernels, launches: of a decode step (at batch 1, a token); a layer: its kernels;"
            " verify: a step of 5 tokens over one of 1; ~: extrapolated"
        )
    return table


def _with_and_without(results: Results) -> Table:
    """The layout of the KV-cache tables: seconds without and with, and the ratio."""
    table = Table(box=box.SIMPLE, title="with and without a cache")
    for name in ("new tokens", "batch", "dtype", "engine", "without s", "with s", "speed-up"):
        table.add_column(name, justify="left" if name in ("dtype", "engine") else "right")
    for row in results.rows:
        base = next(
            (
                r
                for r in results.rows
                if r.case.backend == results.baseline
                and r.case.shape == row.case.shape
                and r.case.dtype == row.case.dtype
            ),
            None,
        )
        if row.case.backend == results.baseline or base is None or row.case.draft is not None:
            continue
        table.add_row(
            str(row.case.output_tokens), str(row.case.batch), row.case.dtype, row.case.backend,
            number(_figure(base, "total_sec"), 2), number(_figure(row, "total_sec"), 2),
            number(row.speedup, 2),
        )  # fmt: skip
    return table


def _by_shape(results: Results, title: str, say: Callable[[Row], str]) -> Table:
    """The layout of a peers table: a row each, and one figure of it in every shape."""
    several = len({r.case.model for r in results.rows}) > 1
    shapes = list(
        dict.fromkeys((r.case.model, r.case.batch, r.case.prompt_tokens, r.case.workload) for r in results.rows)
    )
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("system")
    for model, batch, prompt, workload in shapes:
        where = f"{model.removeprefix('random:')}, " if several else ""
        table.add_column(where + ("mixed" if workload == "mixed" else f"batch {batch}, {prompt} in"), justify="right")
    rows = {(r.case.label, r.case.model, r.case.batch, r.case.prompt_tokens, r.case.workload): r for r in results.rows}
    for label in dict.fromkeys(r.case.label for r in results.rows):
        cells = [rows.get((label, *shape)) for shape in shapes]
        said = ["–" if row is None else "error" if row.figures is None else say(row) for row in cells]
        table.add_row(label, *said)
    return table


def _speed(row: Row) -> str:
    name = "output_tokens_per_sec" if row.case.workload == "mixed" else "decode_tokens_per_sec"
    return number(_figure(row, name), 1)


def _memory(row: Row) -> str:
    return number(row.peak_memory_bytes, 0, 1 / MIB)
