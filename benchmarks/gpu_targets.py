"""The goals of the GPU engines, and the values that the rows of suite `gpu` reached.

    for goal in judge(results.rows): print(goal.name, goal.wanted, goal.value, goal.met)

Each goal is judged by the engine that decodes fastest in bfloat16, which it names. If a row that it needs is
missing or failed, its value is unknown (None), which is not met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoinfer.bench.results import Row
from nanoinfer.bench.suites import GPU_LARGE, SUITES
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import slot_tokens
from nanoinfer.roofline.shapes import find_shape

GPU_SMALL = SUITES["gpu"].model
NAMES = ("compiled", "cuda_graph", "triton")
LARGE_BATCH = 512


@dataclass(frozen=True)
class Goal:
    """One line of the table; `wanted` is an upper limit if `at_most`, else a lower one."""

    name: str
    wanted: float
    at_most: bool
    unit: str
    value: float | None
    engine: str | None

    @property
    def met(self) -> bool:
        return self.value is not None and (self.value <= self.wanted if self.at_most else self.value >= self.wanted)


def judge(rows: Sequence[Row]) -> list[Goal]:
    """Return every goal with the value that these rows of suite gpu reached."""
    small, large, many = (best(rows, *case) for case in ((GPU_SMALL, 1), (GPU_LARGE, 1), (GPU_SMALL, LARGE_BATCH)))
    peer, static = find(rows, "transformers-dynamic", GPU_SMALL, 1), find(rows, "static", GPU_SMALL, LARGE_BATCH)
    alone = find(rows, many.case.backend, GPU_SMALL, 1) if many is not None else None
    decode, output = "decode_tokens_per_sec", "output_tokens_per_sec"
    found: list[tuple[str, float, bool, str, Row | None, float | None]] = [
        ("GPT-2 XL, batch 1: share of the measured copy bandwidth", 64.0, False, "%", large,
         number(large, "mbu_percent")),
        ("GPT-2 XL, batch 1", 690.0, False, "tokens/s", large, number(large, decode)),
        ("GPT-2 124M, batch 1", 4400.0, False, "tokens/s", small, number(small, decode)),
        ("GPT-2 124M, batch 1, over transformers' generate", 15.0, False, "times", small,
         over(number(small, output), number(peer, output))),
        (f"GPT-2 124M, batch {LARGE_BATCH}: decoding over static", 5.0, False, "times", many,
         over(number(many, decode), number(static, decode))),
        ("Memory that a sequence adds, over its KV cache", 1.1, True, "times", many, growth(alone, many)),
        ("GPT-2 124M: verifying 5 tokens", 1.1, True, "decodes", small, number(small, "verify_ratio")),
        ("GPT-2 XL: verifying 5 tokens", 1.1, True, "decodes", large, number(large, "verify_ratio")),
    ]  # fmt: skip
    return [Goal(*goal, value, row.case.backend if row is not None else None) for *goal, row, value in found]


def find(rows: Sequence[Row], backend: str, model: str, batch: int) -> Row | None:
    """Return a backend's bfloat16 row; None if there is none or it failed."""
    wanted = (backend, model, batch, "bfloat16")
    measured = [r for r in rows if r.figures is not None]
    return next((r for r in measured if (r.case.backend, r.case.model, r.case.batch, r.case.format) == wanted), None)


def best(rows: Sequence[Row], model: str, batch: int) -> Row | None:
    """Return the row of the engine that decodes fastest in bfloat16; None if none was measured."""
    found = [row for name in NAMES if (row := find(rows, name, model, batch)) is not None]
    return max(found, key=lambda r: r.number("decode_tokens_per_sec") or 0.0, default=None)


def number(row: Row | None, name: str) -> float | None:
    return row.number(name) if row is not None else None


def over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def growth(alone: Row | None, many: Row | None) -> float | None:
    """Return the memory that each sequence of a batch adds, over its keys and values; None if unknown.

    1.0 is memory that is constant but for the cache: growth of (3 GB at batch 1, 23 GB at 512), of which the caches are
    0.04 and 20 GB, is 20 / 19.96.
    """
    a, b = number(alone, "peak_memory_bytes"), number(many, "peak_memory_bytes")
    if alone is None or many is None or a is None or b is None:
        return None
    return over(b - a, cache_bytes(many) - cache_bytes(alone))


def cache_bytes(row: Row) -> int:
    """Return the size of the keys and values that an engine with slots reserves for a bfloat16 row."""
    config = find_shape(row.case.model)
    tokens = row.case.batch * slot_tokens(ENGINES[row.case.backend].memory, config.block_size)
    return tokens * config.kv_bytes_per_token(2)
