"""Rows of a results file sorted into panels, the rows of one figure, and the findings of a suite in a few sentences.

The rows of a panel differ in backend, format and one size.

rows of ladder.json  ->  panel "random:gpt2, greedy, 32-token prompts, 16 tokens out, cpu"      x = batch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from nanoinfer.bench.case import IRREGULAR, MIXED_HIGH, MIXED_LOW, OWN_TOKENS, Case, Row
from nanoinfer.bench.formatting import digits, number, positive
from nanoinfer.bench.results import Results
from nanoinfer.engines.registry import ENGINES

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
MAX_SENTENCES = 6
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


def headlines(results: Results) -> list[str]:
    """Return the findings: over peers, over the same without a draft or a prefix cache, or over the baseline."""
    rows = [row for row in results.rows if row.figures is not None]
    backends = {row.case.backend for row in rows}
    set_beside = [row for row in rows if row.case.draft is not None or row.case.prefix_caching]
    if backends - {*ENGINES, "nanogpt"}:
        found = [line for part in panels(rows, "batch", split=True) if (line := _over_peers(part, rows))]
        found += _over_plain(set_beside, rows)
    elif set_beside and "nanogpt" not in backends:
        found = list(_over_plain(set_beside, rows))
    else:
        found = list(_over_baseline(rows, results.baseline))
    return found[:MAX_SENTENCES]


def _over_peers(panel: Panel, every: list[Row]) -> str | None:
    """Return our best engine over the best peer, in 8 bits if both have it, else in the format that both have."""
    measure = panel.measure
    sign = -1 if measure is TTFT else 1
    for width in (8, 16, 32, 4):
        same = measure.of([r for r in panel.rows if r.case.draft is None and r.case.bits == width])
        ours = [each for each in same if each[0].case.backend in ENGINES]
        peers = [each for each in same if each[0].case.backend not in ENGINES]
        if ours and peers:
            (a, x), (b, y) = (max(group, key=lambda each: sign * each[1]) for group in (ours, peers))
            what = measure.axis if sign > 0 else "ms to the first token"
            ratio = f"{a.case.label}: {digits((x / y) ** sign)}x {b.case.label}"
            where = setting(panel.rows, varying(every))
            return ", ".join(filter(None, (f"{ratio} ({digits(x)} against {digits(y)} {what})", where)))
    return None


def _over_baseline(rows: list[Row], baseline: str) -> Iterator[str]:
    """Yield the best speed-up over the baseline at the smallest and the largest size of each panel."""
    axis = sweep_axis(rows)
    plain = [r for r in rows if r.case.draft is None and r.case.dtype == "float32"]
    for panel in panels(plain, axis):
        for place in dict.fromkeys((panel.places[0], panel.places[-1])):
            here = [r for r in panel.rows if getattr(r.case, axis) == place]
            base = next((r for r in here if r.case.backend == baseline), None)
            others = [r for r in here if r.speedup and r.case.backend != baseline]
            if base is not None and others:
                best = max(others, key=lambda r: r.speedup or 0)
                speeds = [digits(row.number("output_tokens_per_sec")) for row in (best, base)]
                over = f"{base.case.label}{' (extrapolated)' if 'extrapolated' in base.note else ''}"
                where = setting([best], [f for f in varying(rows) if f != axis] + [axis])
                said = f"{best.case.label}: {digits(best.speedup)}x {over}"
                yield f"{said} ({' against '.join(speeds)} output tokens/s), {where}"


def _over_plain(rows: list[Row], every: list[Row]) -> Iterator[str]:
    """Yield the best speed-up of each plain case that a draft or the prefix cache made faster, the highest first."""
    best: dict[object, Row] = {}
    for row in sorted((r for r in rows if r.speedup), key=lambda r: -(r.speedup or 0)):
        best.setdefault(row.case.plain, row)
    for row in best.values():
        speed = digits(getattr(row.figures, "output_tokens_per_sec", None))
        over = (
            f"{row.case.label}: {digits(row.speedup)}x the same without {'it' if row.case.draft is None else 'a draft'}"
        )
        yield f"{over} ({speed} output tokens/s), {setting([row], varying(every))}"
