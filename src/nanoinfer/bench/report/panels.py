"""Rows of a results file sorted into panels: the rows that belong into one figure, and what they share.

rows of ladder.json  ->  panel "gpt2, greedy, 32-token prompts, 64 tokens out"      x = batch
                         panel "gpt2, greedy, 1,000-token prompts, 64 tokens out"   x = batch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nanoinfer.bench.case import MIXED_HIGH, MIXED_LOW, Case
from nanoinfer.bench.report.text import clean, number, positive
from nanoinfer.bench.results import Row

Value = Callable[[Row], float | None]
Points = list[tuple[float, float]]

AXES = {  # what a suite may sweep -> how an axis says it
    "batch": "batch (sequences at a time)",
    "prompt_tokens": "prompt (tokens)",
    "output_tokens": "output (tokens)",
}
_WORKLOADS = {
    "uniform": "",
    "mixed": f"{MIXED_LOW} to {MIXED_HIGH} tokens in and out",
    "text": "passages of text",
    "copy": "repeating passages",
}
_FIELDS: dict[str, Callable[[Case], str]] = {  # what cases differ in, contestant apart -> how it is said
    "model": lambda c: clean(c.model),
    "sampler": lambda c: c.sampler,
    "batch": lambda c: f"batch {c.batch:,}",
    "prompt_tokens": lambda c: "" if c.workload == "mixed" else f"{c.prompt_tokens:,}-token prompts",
    "output_tokens": lambda c: "" if c.workload == "mixed" else f"{c.output_tokens:,} tokens out",
    "workload": lambda c: _WORKLOADS[c.workload],
    "device": lambda c: clean(c.device),
}


@dataclass(frozen=True)
class Panel:
    """Rows that one figure compares."""

    axis: str
    """The field that goes along x, one of AXES."""
    rows: list[Row]
    """Failed ones too."""

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return setting(self.rows)

    @property
    def places(self) -> list[int]:
        """The values on x, rising."""
        return sorted({getattr(row.case, self.axis) for row in self.rows})

    def at(self, place: float) -> str:
        """Return a value on x in words: "batch 8"."""
        return f"{AXES[self.axis].split(' ')[0]} {place:,.0f}"

    def series(self, value: Value) -> dict[str, Points]:
        """Return for each contestant that has any (x, value), by x; failed rows and unknown values are left out."""
        found: dict[str, Points] = {}
        for row in self.rows:
            if (y := value(row)) is not None:
                found.setdefault(row.case.label, []).append((float(getattr(row.case, self.axis)), y))
        return {label: sorted(points) for label, points in found.items()}


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the fields in which the cases differ, who ran them apart."""
    return [f for f in _FIELDS if len({getattr(row.case, f) for row in rows}) > 1]


def setting(rows: Sequence[Row], fields: Collection[str] = tuple(_FIELDS)) -> str:
    """Return what the cases share of `fields`: "gpt2, greedy, batch 1, 32-token prompts, 64 tokens out, cpu"."""
    if not rows:
        return ""
    different = varying(rows)
    said = [_FIELDS[field](rows[0].case) for field in fields if field not in different]
    return ", ".join(filter(None, said))


def sweep_axis(rows: Sequence[Row]) -> str:
    """Return what a suite sweeps: of batch, prompt's and output's length, the first with the most values."""
    uniform = [row.case for row in rows if row.case.workload == "uniform"]
    return max(AXES, key=lambda axis: len({getattr(case, axis) for case in uniform}))


def at_ends(axis: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows at the smallest and at the largest value of `axis`."""
    places = [getattr(row.case, axis) for row in rows]
    return [row for row, place in zip(rows, places, strict=True) if place in (min(places), max(places))]


def panels(rows: Sequence[Row], axis: str, *, split: bool = False) -> list[Panel]:
    """Return the rows in panels: in each, the cases differ in contestant, weight format and `axis` only.

    Args:
        rows: of one suite, in order.
        axis: one of AXES.
        split: whether a panel has one value of `axis` only.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = tuple(getattr(row.case, f) for f in _FIELDS if split or f != axis)
        groups.setdefault(key, []).append(row)
    return [Panel(axis, group) for group in groups.values()]


def throughput(row: Row) -> float | None:
    """Return tokens/s of all sequences: decoding; of a mixed workload, output tokens by wall time."""
    if row.figures is None:
        return None
    mixed = row.case.workload == "mixed"
    return positive(row.figures.output_tokens_per_sec if mixed else row.figures.decode_tokens_per_sec)


def predicted(row: Row) -> float | None:
    """Return the tokens/s that the roofline allows, for a case that ran."""
    return positive(row.predicted_tokens_per_sec) if row.figures is not None else None


def share_of_prediction(row: Row) -> float | None:
    """Return the measured tokens/s in percent of the predicted."""
    measured, limit = throughput(row), predicted(row)
    return None if measured is None or limit is None else number(100 * measured / limit)


def ttft_ms(row: Row) -> float | None:
    """Return the time to first token in milliseconds."""
    seconds = positive(row.figures.ttft_sec) if row.figures is not None else None
    return None if seconds is None else positive(1e3 * seconds)


def memory_mb(row: Row) -> float | None:
    """Return the peak memory in megabytes (10^6 bytes)."""
    found = number(row.peak_memory_bytes)
    return None if found is None else found / 1e6


def roofline_point(row: Row, tokens_per_sec: float | None) -> tuple[float, float] | None:
    """Return (FLOP per byte, FLOP/s) of decoding at a speed; None where any part of it is unknown."""
    flops, num_bytes = positive(row.flops_per_token), positive(row.bytes_per_token)
    if flops is None or num_bytes is None or tokens_per_sec is None:
        return None
    x, y = positive(flops / num_bytes), positive(flops * tokens_per_sec)  # absurd numbers overflow
    return None if x is None or y is None else (x, y)
