"""Print the table "share of the limit" of docs/benchmarks.md from a results file of suite peers.

    python benchmarks/limits.py [docs/results/peers.json]

Each cell has the share of engine native, then that of the fastest peer with as many bits. With one sequence, the limit
is the read bandwidth for the bytes of a step; with 64, and for a prompt, it is the arithmetic of the instructions that
native uses for the format (causal attention, logits for the last token). tests/house/test_readme.py compares the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from nanoinfer.bench.case import Row
from nanoinfer.bench.results import Results, read
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, find_shape

DEFAULT = Path(__file__).parent.parent / "docs" / "results" / "peers.json"
BITS = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int4"}
COLUMNS = {  # title -> (batch, prompt tokens)
    "memory, 1 sequence": (1, 32), "arithmetic, 64 sequences": (64, 32), "arithmetic, 1,000-token prompt": (1, 1000),
}  # fmt: skip
_Speed = Callable[[Row], float]


def decode_speed(row: Row) -> float:
    """Return decode tokens/s; 0 if it is unknown."""
    return (row.figures.decode_tokens_per_sec if row.figures is not None else None) or 0.0


def prompt_speed(row: Row) -> float:
    """Return prompts per second; 0 if it is unknown."""
    return 1 / row.figures.ttft_sec if row.figures is not None else 0.0


def share(row: Row, batch: int, prompt_tokens: int, ceiling: Ceiling) -> float:
    """Return the share of the limit in percent."""
    if batch == 1 and prompt_tokens == 32:
        return row.mbu_percent or 0.0
    fmt = FORMATS[BITS[row.case.bits]]
    if batch > 1:
        flops = (row.flops_per_token or 0.0) * decode_speed(row)
    else:
        whole = arithmetic.prefill(find_shape(row.case.model), fmt).model.flops  # with all N x N scores
        scores = sum(coefficient for _, n, _, coefficient in whole.terms if n == 2)
        masked = scores * (prompt_tokens**2 - prompt_tokens) // 2
        flops = (whole(1, prompt_tokens) - masked) * prompt_speed(row)
    return 100 * flops / ceiling.throughput(fmt)


def cell(results: Results, width: int, batch: int, prompt_tokens: int) -> str:
    """Return one cell: "80%, openvino int8 57%"."""
    speed: _Speed = decode_speed if prompt_tokens == 32 else prompt_speed
    shape = (batch, prompt_tokens, "uniform")
    same = [r for r in results.rows if (r.case.batch, r.case.prompt_tokens, r.case.workload) == shape]
    same = [r for r in same if r.case.bits == width and r.figures is not None]
    ceiling, said = Ceiling.from_results(results.ceiling), []
    for group in ([r for r in same if r.case.backend == "native"], [r for r in same if r.case.backend != "native"]):
        if group:
            best = max(group, key=speed)
            name = "" if best.case.backend == "native" else f"{best.case.label} "
            said.append(f"{name}{share(best, batch, prompt_tokens, ceiling):.0f}%")
    return ", ".join(said) or "–"


def table(results: Results) -> str:
    """Return the table in Markdown."""
    rows = [f"| weights | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for width, name in BITS.items():
        rows.append(f"| {name} | {' | '.join(cell(results, width, *shape) for shape in COLUMNS.values())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)))
