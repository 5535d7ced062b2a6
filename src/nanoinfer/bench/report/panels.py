"""Rows of a results file sorted into panels: the rows of one figure, which differ in backend, format and one size.

rows of ladder.json  ->  panel "random:gpt2, greedy, 32-token prompts, 16 tokens out, cpu"      x = batch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nanoinfer.bench.case import IRREGULAR, MIXED_HIGH, MIXED_LOW, OWN_TOKENS, Case, Row
from nanoinfer.bench.formatting import digits, number, positive

AXES = {  # sizes that a suite may sweep -> title of the axis
    "batch": "batch (sequences)",
    "prompt_tokens": "prompt (tokens)",
    "output_tokens": "output (tokens)",
}
_WORKLOADS = {
    "uniform": "",
    "mixed": f"{MIXED_LOW} to {MIXED_HIGH} tokens in and out",
    "prefix": f"prompts equal but for {OWN_TOKENS} tokens",
    "arrival": "a long prompt arrives",
    "text": "passages of text",
    "copy": "repeating passages",
}
_FIELDS: dict[str, Callable[[Case], str]] = {  # fields in which cases differ, besides backend and format -> as prose
    "model": lambda c: c.model,
    "sampler": lambda c: c.sampler,
    "batch": lambda c: f"batch {c.batch:,}",
    "prompt_tokens": lambda c: "" if c.workload == "mixed" else f"{c.prompt_tokens:,}-token prompts",
    "output_tokens": lambda c: "" if c.workload == "mixed" else f"{c.output_tokens:,} tokens out",
    "workload": lambda c: _WORKLOADS[c.workload],
    "device": lambda c: c.device,
}
PROMPT_DOMINATED = 8  # a prompt this many times the output: the time is the prompt's


@dataclass(frozen=True)
class Measure:
    """A quantity that a figure shows."""

    name: str
    """For file names."""
    title: str
    axis: str
    """Title of the axis, with the unit."""
    unit: str
    field: str = ""
    """What `Row.number` reads; empty: drawn from `Row.per_position_sec`."""
    scale: float = 1.0
    log: bool = True
    ceiling: bool = False
    """Whether `ceiling` limits it."""

    def value(self, row: Row) -> float | None:
        """Return the value of a row; None if it is unknown or not above 0."""
        return positive(row.number(self.field, self.scale))

    def of(self, rows: Sequence[Row]) -> list[tuple[Row, float]]:
        """Return the rows whose value is known, each with it."""
        return [(row, value) for row in rows if (value := self.value(row)) is not None]

    def show(self, value: float) -> str:
        """Return a value with its unit: "1,235 tokens/s"."""
        return f"{digits(value)} {self.unit}"


DECODE = Measure(
    "throughput", "Decode throughput", "decode tokens/s", "tokens/s", "decode_tokens_per_sec", ceiling=True
)
OUTPUT = Measure("output", "Output throughput with prompts", "output tokens/s", "tokens/s", "output_tokens_per_sec")
TTFT = Measure("ttft", "Time to first token", "time to first token (ms)", "ms", "ttft_sec", 1e3)
MEMORY = Measure("memory", "Peak memory of the process", "peak memory (MB)", "MB", "peak_memory_bytes", 1e-6, log=False)
SPEEDUP = Measure("speedup", "Speed-up", "times plain decoding", "x", "speedup")
WORST_GAP = Measure("gap", "Longest time between two tokens", "longest gap (ms)", "ms", "worst_gap_sec", 1e3)
TIME = Measure("position", "Time per token against position", "time per token (ms)", "ms")


@dataclass(frozen=True)
class Panel:
    """Rows that one figure compares, failed ones too."""

    axis: str
    """The field that goes along x, one of AXES."""
    rows: list[Row]

    @property
    def places(self) -> list[int]:
        """The values on x, rising."""
        return sorted({getattr(row.case, self.axis) for row in self.rows})

    @property
    def measure(self) -> Measure:
        """The most informative measure: decoding, unless prompts take most of the time or few rows have a rate."""
        case = self.rows[0].case
        together = [DECODE.value(row) is not None for row in self.rows if row.figures is not None]
        if case.workload == "arrival":
            return WORST_GAP
        if case.workload in IRREGULAR or 2 * sum(together) < len(together):
            return OUTPUT
        if case.prompt_tokens < PROMPT_DOMINATED * case.output_tokens:
            return DECODE
        return TTFT if case.batch == 1 else OUTPUT


def ceiling(row: Row) -> float | None:
    """Return the tokens/s that the machine allows, for a case that ran."""
    known = row.figures is not None and row.case.workload not in IRREGULAR
    return positive(row.predicted_tokens_per_sec) if known else None


def share_of_ceiling(row: Row) -> float | None:
    """Return the decode tokens/s in percent of the ceiling."""
    measured, limit = DECODE.value(row), ceiling(row)
    return None if measured is None or limit is None else number(100 * measured / limit)


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the fields in which the cases differ, backend and format apart."""
    return [f for f in _FIELDS if len({getattr(row.case, f) for row in rows}) > 1]


def setting(rows: Sequence[Row], fields: Collection[str] = tuple(_FIELDS)) -> str:
    """Return what the cases share of `fields`: "gpt2, greedy, batch 1, 32-token prompts, 64 tokens out, cpu"."""
    different = varying(rows)
    parts = [_FIELDS[field](rows[0].case) for field in fields if rows and field not in different]
    return ", ".join(filter(None, parts))


def sweep_axis(rows: Sequence[Row]) -> str:
    """Return what a suite sweeps: of batch, prompt's and output's length, the first with the most values."""
    uniform = [row.case for row in rows if row.case.workload == "uniform"]
    return max(AXES, key=lambda axis: len({getattr(case, axis) for case in uniform}))


def panels(rows: Sequence[Row], axis: str, *, split: bool = False) -> list[Panel]:
    """Return the rows in panels: in each, the cases differ in backend, weight format and, unless split, `axis` only."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = tuple(getattr(row.case, f) for f in _FIELDS if split or f != axis)
        groups.setdefault(key, []).append(row)
    return [Panel(axis, group) for group in groups.values()]
