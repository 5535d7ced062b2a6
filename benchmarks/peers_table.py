"""Print the table of docs/benchmarks.md from a results file of suite peers.

    python benchmarks/peers_table.py [docs/results/peers.json]

A row is a system with the format of its weights; rows are in the order of the suite, the most bits first.
tests/house/test_readme.py compares the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanoinfer.bench.case import Row
from nanoinfer.bench.results import read

DEFAULT = Path(__file__).parent.parent / "docs" / "results" / "peers.json"
DECODE, FIRST, OUTPUT = "decode_tokens_per_sec", "ttft_sec", "output_tokens_per_sec"
COLUMNS = {  # title -> (batch, prompt tokens), figure
    "decode 1 x 32 (tok/s)": ((1, 32), DECODE),
    "decode 8 x 32": ((8, 32), DECODE),
    "decode 64 x 32": ((64, 32), DECODE),
    "decode 1 x 1,000": ((1, 1000), DECODE),
    "TTFT 1 x 1,000 (ms)": ((1, 1000), FIRST),
    "output 8 x 1,000 (tok/s)": ((8, 1000), OUTPUT),
}


def figure(rows: list[Row], label: str, shape: tuple[int, int], key: str) -> str:
    """Return a figure as pages show it: 90.18 -> "90.2", 3465.0 -> "3,465", none -> "–"."""
    for row in rows:
        case = row.case
        if (case.label, case.batch, case.prompt_tokens, case.workload) == (label, *shape, "uniform") and row.figures:
            value = getattr(row.figures, key) * (1000 if key == FIRST else 1)
            return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return "–"


def table(rows: list[Row]) -> str:
    """Return the table in Markdown."""
    lines = [f"| weights | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    bits = {row.case.label: row.case.bits for row in rows}
    for label in sorted(bits, key=lambda label: -bits[label]):
        cells = [figure(rows, label, *column) for column in COLUMNS.values()]
        name = f"**{label}**" if label.startswith("native") else label
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT).rows))
