"""What the roofline says of a row: bytes and FLOPs a token, MBU, MFU, and what the machine would allow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nanoinfer.bench.case import Case
from nanoinfer.bench.results import Row
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, WeightFormat
from nanoinfer.roofline.predict import predict
from nanoinfer.roofline.shapes import find_shape
from nanoinfer.roofline.speculative_speedup import Speculation, best_speculation

_LLAMA_CPP = {  # blocks of 32 weights and a 16-bit scale
    "Q8_0": WeightFormat("Q8_0", 8, 2, group_size=32, group_bytes=2),
    "Q4_0": WeightFormat("Q4_0", 4, 2, group_size=32, group_bytes=2),
}


def weight_format(dtype: str, quantization: str | None) -> WeightFormat | None:
    """Return the roofline's format of a case's weights, None for one that it does not know."""
    return (FORMATS | _LLAMA_CPP).get(quantization or dtype)


def fill_in(row: Row, config: ModelConfig, ceiling: Ceiling, *, naive: bool) -> None:
    """Add the arithmetic to a measured row.

    A decode step at the mean length of the run stands for all of them. Without a cache a step reads and
    computes the whole prefix.

    Args:
        row: with figures; changed in place.
        config: the model's shape.
        ceiling: the machine.
        naive: whether the backend keeps no cache.
    """
    case, figures = row.case, row.figures
    fmt = weight_format(case.dtype, case.quantization)
    if fmt is None or figures is None:
        return
    mean = min(config.block_size, case.prompt_tokens + max(1, case.output_tokens // 2))
    cost = (arithmetic.prefill if naive else arithmetic.decode)(config, fmt).model
    num_bytes, flops = cost.bytes(case.batch, mean), cost.flops(case.batch, mean)
    row.weight_bytes = cost.bytes(0, 0)
    row.bytes_per_token, row.flops_per_token = num_bytes / case.batch, flops / case.batch
    seconds = num_bytes / ceiling.bandwidth_bytes_per_sec
    throughput = ceiling.flops_per_sec.get(case.dtype if fmt.is_float else ceiling.compute_dtype(fmt))
    if throughput is not None:
        row.predicted_tokens_per_sec = case.batch / max(seconds, flops / throughput)
    if (speed := figures.decode_tokens_per_sec) is not None and case.workload != "mixed" and case.draft is None:
        row.mbu_percent = 100 * row.bytes_per_token * speed / ceiling.bandwidth_bytes_per_sec
        if throughput is not None:
            row.mfu_percent = 100 * row.flops_per_token * speed / throughput


def add_speculation(row: Row, made: dict[str, float], config: ModelConfig, ceiling: Ceiling) -> None:
    """Add to a row what a run proposed, and what the roofline would propose at that acceptance.

    Args:
        row: changed in place.
        made: totals of `outputs.SpeculationMetrics` over the run's requests; empty where there were none.
        config: the target's shape.
        ceiling: the machine.
    """
    judged = made.get("num_accepted", 0) + made.get("num_rejected", 0)
    row.draft_share_percent = 100 * made.get("draft_share", 0.0)
    if not judged:
        return
    row.acceptance_percent = 100 * made["num_accepted"] / judged
    row.mean_accepted_length = made["num_accepted"] / made["num_verify_steps"]
    best = _best_speculation(row.case, made["num_accepted"] / judged, config, ceiling)
    row.predicted_speculation = f"k={best.speculate_k}, {best.speedup:.2f}x" if best is not None else None


def _best_speculation(case: Case, acceptance: float, config: ModelConfig, ceiling: Ceiling) -> Speculation | None:
    """Return the best number of proposals by the roofline; None for a draft or a format that it does not know."""
    fmt = weight_format(case.dtype, case.quantization)
    if fmt is None or case.draft is None:
        return None
    N = min(config.block_size, case.prompt_tokens + max(1, case.output_tokens // 2))
    draft_sec = 0.0
    if case.draft != "prompt-lookup":
        try:  # packed in 8 bits, as speculative/draft_factory.py does
            draft, small = find_shape(case.draft), FORMATS["int8"]
        except NanoinferError:  # on the Hub, or a copy of the target
            return None
        draft_sec = predict(arithmetic.decode(draft, small), ceiling, small, case.batch, N).seconds
    target_sec = predict(arithmetic.decode(config, fmt), ceiling, fmt, case.batch, N).seconds

    def verify_cost(num_tokens: int) -> float:
        cost = arithmetic.extend(config, fmt, num_tokens)
        return predict(cost, ceiling, fmt, case.batch, N).seconds / target_sec

    return best_speculation(acceptance, draft_sec / target_sec, verify_cost, max_k=12)


def add_speedups(rows: Sequence[Row], baseline: str) -> None:
    """Set each row's speed-up over backend `baseline` in the same shape and dtype; None where there is none.

    A row with a draft is measured against its own backend without: the median over the rounds that both have run,
    each round's two runs beside each other.
    """

    def key(row: Row) -> object:
        return row.case.shape, row.case.dtype

    base = {
        key(r): r.figures.output_tokens_per_sec
        for r in rows
        if r.case.backend == baseline and r.case.quantization is None and r.case.draft is None and r.figures
    }
    plain = {r.case: r.figures.output_tokens_per_sec for r in rows if r.case.draft is None and r.figures}
    for row in rows:
        own = base.get(key(row)) if row.case.draft is None else plain.get(row.case.plain)
        row.speedup = row.figures.output_tokens_per_sec / own if row.figures is not None and own else None
    rounds = {r.case: r.round_sec for r in rows if r.case.draft is None and r.round_sec}
    for row in rows:
        if row.case.draft is not None and row.round_sec and row.case.plain in rounds:
            ratios = [a / b for a, b in zip(rounds[row.case.plain], row.round_sec, strict=False)]
            row.speedup, row.speedup_min, row.speedup_max = statistics.median(ratios), min(ratios), max(ratios)
