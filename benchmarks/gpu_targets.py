"""The goals of the GPU engines, and the values that the rows of suite `gpu` reached.

Each goal is judged by the engine that decodes fastest in bfloat16, which it names with its tokens/s. Goals at batch 1
are shares of the copy bandwidth that was measured on the same machine: GPT-2 XL 64%, then 78%; GPT-2 124M, which
launches limit, 33%, then 46% (690, 840, 4,400 and 6,200 tokens/s where copies reach 3.35 TB/s). If a row that a goal
needs is missing or failed, its value is unknown (None), which is not met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoinfer.bench.case import Row
from nanoinfer.bench.suites import GPU_LARGE, SUITES
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import slot_tokens
from nanoinfer.roofline.formats import find_shape

GPU_SMALL = SUITES["gpu"].model
NAMES = ("compiled", "cuda_graph", "triton")
LARGE_BATCH = 512
SHARE = "share of the measured copy bandwidth"


@dataclass(frozen=True)
class Goal:
    """One line of the table; `wanted` is a lower limit, or an upper one if `unit` begins with "at most"."""

    name: str
    wanted: float
    unit: str
    row: Row | None
    value: float | None

    @property
    def met(self) -> bool:
        sign = -1 if self.unit.startswith("at most") else 1
        return self.value is not None and sign * self.value >= sign * self.wanted

    def __str__(self) -> str:
        reached = "unknown" if self.value is None else f"{self.value:,.2f} {'met' if self.met else 'MISSED'}"
        speed = self.row.number("decode_tokens_per_sec") if self.row is not None else None
        engine = f" ({self.row.case.backend}, {speed or 0:,.0f} tokens/s)" if self.row is not None else ""
        return f"{self.name:56} {self.wanted:7,g} {self.unit:16} {reached}{engine}"


def judge(rows: Sequence[Row]) -> list[Goal]:
    """Return every goal with the value that these rows of suite gpu reached."""

    def find(backend: str, model: str, batch: int = 1, fmt: str = "bfloat16") -> Row | None:
        wanted = (backend, model, batch, fmt, None)
        found = (r for r in rows if (r.case.backend, r.case.model, r.case.batch, r.case.format, r.error) == wanted)
        return next(found, None)

    def best(model: str, batch: int = 1) -> Row | None:
        found = [row for name in NAMES if (row := find(name, model, batch)) is not None]
        return max(found, key=lambda r: r.number(decode) or 0.0, default=None)

    def ratio(above: Row | None, below: Row | None, name: str) -> float | None:
        a, b = (row.number(name) if row is not None else None for row in (above, below))
        return a / b if a and b else None

    decode, output = "decode_tokens_per_sec", "output_tokens_per_sec"
    small, large, many = best(GPU_SMALL), best(GPU_LARGE), best(GPU_SMALL, LARGE_BATCH)
    alone = find(many.case.backend, GPU_SMALL) if many is not None else None
    int8, int4 = (find("triton", GPU_LARGE, fmt=fmt) for fmt in ("int8", "int4"))
    peer, static = find("transformers-dynamic", GPU_SMALL), find("static", GPU_SMALL, LARGE_BATCH)
    own = [
        *((f"GPT-2 XL, batch 1: {SHARE}", share, "%", large, "mbu_percent") for share in (64.0, 78.0)),
        *((f"GPT-2 124M, batch 1: {SHARE}", share, "%", small, "mbu_percent") for share in (33.0, 46.0)),
        ("GPT-2 124M: verifying 5 tokens", 1.15, "at most, decodes", small, "verify_ratio"),
        ("GPT-2 XL: verifying 5 tokens", 1.15, "at most, decodes", large, "verify_ratio"),
    ]
    times = [
        ("GPT-2 124M, batch 1, over transformers' generate", 15.0, "times", small, ratio(small, peer, output)),
        (f"GPT-2 124M, batch {LARGE_BATCH}: decoding over static", 5.0, "times", many, ratio(many, static, decode)),
        ("GPT-2 XL: int4 over int8", 1.25, "times", int4, ratio(int4, int8, decode)),
        ("Memory that a sequence adds, over its KV cache", 1.1, "at most, times", many, growth(alone, many)),
    ]
    goals = [Goal(*about, row, row.number(name) if row is not None else None) for *about, row, name in own]
    return [*goals, *(Goal(*goal) for goal in times)]


def growth(alone: Row | None, many: Row | None) -> float | None:
    """Return the memory that each sequence of a batch adds, over the keys and values that its slot reserves.

    growth of (3 GB at batch 1, 23 GB at 512), where a slot has 0.04 GB, is 20 / (511 * 0.04).
    """
    if alone is None or many is None or None in (sizes := [r.number("peak_memory_bytes") for r in (alone, many)]):
        return None
    config = find_shape(many.case.model)
    slot = slot_tokens(ENGINES[many.case.backend].memory, config.block_size) * config.kv_bytes_per_token(2)
    return (sizes[1] - sizes[0]) / (slot * (many.case.batch - alone.case.batch))  # type: ignore[operator]
