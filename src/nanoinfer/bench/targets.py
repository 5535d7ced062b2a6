"""What the GPU rungs are to reach, and what a run of suite `gpu` reached: pure arithmetic over its rows.

    for t in judge(results.rows): print(t.name, t.wanted, t.value, t.met)

Each target is judged by the engine of ours that does it best in bfloat16, which it names. Where a row that it needs
is missing or failed, its value is unknown (None), which is not met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.bench.results import Row
from nanoinfer.bench.suites import GPU_LARGE, SUITES

GPU_SMALL = SUITES["gpu"].model
RUNGS = ("compiled", "cuda_graph", "triton")
"""Engines of ours that targets are about."""
OLD_RUNG, PEER, LARGE_BATCH = "static", "transformers-dynamic", 512


@dataclass(frozen=True)
class Target:
    """One line of the table."""

    name: str
    wanted: float
    at_most: bool
    """Whether `wanted` is a limit from above; else from below."""
    unit: str
    value: float | None
    """What was reached; None: not measured."""
    who: str | None
    """The contestant that reached it."""
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the target was reached; what was not measured is not."""
        if self.value is None:
            return False
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


def judge(rows: Sequence[Row]) -> list[Target]:
    """Return every target beside what these rows reached.

    Args:
        rows: of suite gpu; failed rows count as missing.
    """
    measured = [r for r in rows if r.figures is not None]
    small = best(measured, GPU_SMALL, 1)
    large = best(measured, GPU_LARGE, 1)
    peer = find(measured, PEER, GPU_SMALL, 1)
    static, many = find(measured, OLD_RUNG, GPU_SMALL, LARGE_BATCH), best(measured, GPU_SMALL, LARGE_BATCH)
    alone = find(measured, many.case.contestant, GPU_SMALL, 1) if many is not None else None
    times_static, times_peer = _over(static, decode_speed), _over(peer, whole_speed)
    return [
        _at_least("GPT-2 XL, batch 1: share of the measured copy bandwidth", 64.0, "%", large, lambda r: r.mbu_percent),
        _at_least("GPT-2 XL, batch 1", 690.0, "tokens/s", large, decode_speed),
        _at_least("GPT-2 124M, batch 1", 4400.0, "tokens/s", small, decode_speed),
        _at_least("GPT-2 124M, batch 1, over transformers' generate", 15.0, "times", small, times_peer),
        _at_least(f"GPT-2 124M, batch {LARGE_BATCH}: decoding over static", 5.0, "times", many, times_static),
        _at_most("Memory that a text adds, over its KV cache", 1.1, "times", many, lambda r: growth(alone, r)),
        _at_most("GPT-2 124M: verifying 5 tokens", 1.1, "decodes", small, lambda r: r.verify_ratio),
        _at_most("GPT-2 XL: verifying 5 tokens", 1.1, "decodes", large, lambda r: r.verify_ratio),
    ]  # fmt: skip


def find(rows: Sequence[Row], contestant: str, model: str, batch: int) -> Row | None:
    """Return a contestant's bfloat16 row; None where there is none."""
    for row in rows:
        c = row.case
        key = (c.contestant, c.model, c.batch, c.dtype, c.quantization)
        if key == (contestant, model, batch, "bfloat16", None) and row.figures is not None:
            return row
    return None


def best(rows: Sequence[Row], model: str, batch: int) -> Row | None:
    """Return the row of the rung that decodes fastest in bfloat16; None where none was measured."""
    found = [row for name in RUNGS if (row := find(rows, name, model, batch)) is not None]
    return max(found, key=lambda r: decode_speed(r) or 0.0, default=None)


def decode_speed(row: Row) -> float | None:
    """Return decode tokens/s, all texts together."""
    return row.figures.decode_tokens_per_sec if row.figures is not None else None


def whole_speed(row: Row) -> float | None:
    """Return output tokens by wall time, prompt included: what a caller of generate sees."""
    return row.figures.output_tokens_per_sec if row.figures is not None else None


def growth(alone: Row | None, many: Row) -> float | None:
    """Return the memory that each text of a batch adds, over what its keys and values take; None if unknown.

    1.0 is memory that is flat but for the cache: growth of (3 GB at batch 1, 23 GB at 512), of which the caches are
    0.04 and 20 GB, is 20 / 19.96.
    """
    if alone is None:
        return None
    sizes = (many.peak_memory_bytes, alone.peak_memory_bytes, many.kv_cache_bytes, alone.kv_cache_bytes)
    if None in sizes:
        return None
    peak, peak_alone, cache, cache_alone = (size or 0 for size in sizes)
    return (peak - peak_alone) / (cache - cache_alone) if cache > cache_alone else None


def _over(base: Row | None, speed: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    """Return what gives a row's speed over the base's; unknown without a base."""

    def ratio(row: Row) -> float | None:
        below, above = (speed(base) if base is not None else None), speed(row)
        return above / below if above and below else None

    return ratio


def _at_least(name: str, wanted: float, unit: str, row: Row | None, value: Callable[[Row], float | None]) -> Target:
    return _target(name, wanted, unit, row, value, at_most=False)


def _at_most(name: str, wanted: float, unit: str, row: Row | None, value: Callable[[Row], float | None]) -> Target:
    return _target(name, wanted, unit, row, value, at_most=True)


def _target(
    name: str, wanted: float, unit: str, row: Row | None, value: Callable[[Row], float | None], *, at_most: bool
) -> Target:
    reached = value(row) if row is not None else None
    note = "" if reached is not None else "not measured: a row that it needs is missing or failed"
    return Target(name, wanted, at_most, unit, reached, row.case.contestant if row is not None else None, note)
