"""Metrics computed from a measured row and the roofline: bytes and FLOPs a token, MBU, MFU, ceilings, speed-ups."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoinfer.bench.backends import PEERS
from nanoinfer.bench.case import IRREGULAR, Case
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.load import builtin_names
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, WeightFormat
from nanoinfer.roofline.predict import predict
from nanoinfer.roofline.shapes import find_shape
from nanoinfer.roofline.speculative_speedup import best_speculation

if TYPE_CHECKING:
    from nanoinfer.bench.results import Row

NAIVE = ("recompute", "nanogpt")  # backends without a cache
BEST_PEER = "the best peer"  # a baseline: the fastest peer of a shape, in any format
_FORMATS = FORMATS | {  # llama.cpp's: blocks of 32 weights and a 16-bit scale
    "Q8_0": WeightFormat("Q8_0", 8, 2, group_size=32, group_bytes=2),
    "Q4_0": WeightFormat("Q4_0", 4, 2, group_size=32, group_bytes=2),
}


def installed_shape(model: str) -> ModelConfig | None:
    """Return the shape of a model that every installation has: a preset, a built-in or a widened one; else None."""
    source = model.removeprefix("random:").removeprefix("wide:").partition(":")[0]
    with contextlib.suppress(NanoinferError):  # wide:shakespeare:no-preset
        return find_shape(model) if source in (*PRESETS, *builtin_names()) else None
    return None


def costs(case: Case, config: ModelConfig, ceiling: Ceiling) -> dict[str, float]:
    """Return the fields of `results.Row` that follow from a case and the ceiling; without those that are unknown.

    A decode step at the mean length stands for all. Without a cache a step reads and computes the whole prefix.
    """
    fmt = _FORMATS.get(case.format)
    if fmt is None:
        return {}
    cost = (arithmetic.prefill if case.backend in NAIVE else arithmetic.decode)(config, fmt)
    mean = case.mean_length(config.block_size)
    found = {
        "weight_bytes": cost.model.bytes(0, 0),
        "bytes_per_token": cost.model.bytes(case.batch, mean) / case.batch,
        "flops_per_token": cost.model.flops(case.batch, mean) / case.batch,
    }
    with contextlib.suppress(NanoinferError):  # the throughput in this dtype is unknown
        found["predicted_tokens_per_sec"] = case.batch / predict(cost, ceiling, fmt, case.batch, mean).seconds
    return found


def fill_in(row: Row, config: ModelConfig, ceiling: Ceiling) -> None:
    """Set `costs` and the shares of the ceiling of a measured row."""
    if row.figures is None:
        return
    case, speed = row.case, row.figures.decode_tokens_per_sec
    row.update(costs(case, config, ceiling))
    if speed is None or row.bytes_per_token is None or case.workload in IRREGULAR or case.draft is not None:
        return
    row.mbu_percent = 100 * row.bytes_per_token * speed / ceiling.bandwidth_bytes_per_sec
    if row.flops_per_token is not None:
        with contextlib.suppress(NanoinferError):
            row.mfu_percent = 100 * row.flops_per_token * speed / ceiling.throughput(_FORMATS[case.format])


def add_speculation(row: Row, made: dict[str, float], config: ModelConfig, ceiling: Ceiling) -> None:
    """Set what a run proposed, `made`, and the best number of proposals at that acceptance by the roofline."""
    row.draft_share_percent = 100 * made["draft_share"]
    if judged := made["num_accepted"] + made["num_rejected"]:
        acceptance = made["num_accepted"] / judged
        row.acceptance_percent = 100 * acceptance
        row.mean_accepted_length = made["num_accepted"] / made["num_verify_steps"]
        row.predicted_speculation = _best_speculation(row.case, acceptance, config, ceiling)


def _best_speculation(case: Case, acceptance: float, config: ModelConfig, ceiling: Ceiling) -> str | None:
    """Return "k=6, 2.60x"; None for a draft or a format that the roofline does not know."""
    fmt = _FORMATS.get(case.format)
    if fmt is None or case.draft is None:
        return None

    def seconds(cost: arithmetic.StepCost, fmt: WeightFormat) -> float:
        return predict(cost, ceiling, fmt, case.batch, case.mean_length(config.block_size)).seconds

    draft_sec = 0.0
    if case.draft != "prompt-lookup":
        try:  # packed in 8 bits, as speculative/draft_factory.py does
            draft_sec = seconds(arithmetic.decode(find_shape(case.draft), FORMATS["int8"]), FORMATS["int8"])
        except NanoinferError:  # on the Hub, or a copy of the target
            return None
    target_sec = seconds(arithmetic.decode(config, fmt), fmt)

    def verify_cost(num_tokens: int) -> float:
        return seconds(arithmetic.extend(config, fmt, num_tokens), fmt) / target_sec

    best = best_speculation(acceptance, draft_sec / target_sec, verify_cost, max_k=12)
    return f"k={best.speculate_k}, {best.speedup:.2f}x"


def add_speedups(rows: Sequence[Row], baseline: str) -> None:
    """Set each row's speed-up over backend `baseline` in the same shape and dtype; None where there is none.

    BEST_PEER is the fastest peer of the shape in any format. A row with a draft or other settings is compared to its
    own backend without: the median of the ratios in the rounds of both.
    """
    plain = [r for r in rows if r.case == r.case.plain and r.figures is not None]
    alone = {r.case: r for r in plain}

    best = baseline == BEST_PEER
    same = [r for r in plain if r.case.backend in (PEERS if best else [baseline])]
    same = [r for r in same if best or r.case.quantization is None]
    same.sort(key=lambda r: r.number("output_tokens_per_sec") or 0)
    base = {(r.case.shape, best or r.case.dtype): r for r in same}  # of several the fastest
    for row in rows:
        case = row.case
        other = base.get((case.shape, best or case.dtype)) if case == case.plain else alone.get(case.plain)
        row.speedup = None
        if row.figures is not None and other is not None and other.figures is not None:
            row.speedup = row.figures.output_tokens_per_sec / other.figures.output_tokens_per_sec
            if case != case.plain and row.round_sec and other.round_sec:
                ratios = [a / b for a, b in zip(other.round_sec, row.round_sec, strict=False)]
                row.speedup, row.speedup_min, row.speedup_max = statistics.median(ratios), min(ratios), max(ratios)
