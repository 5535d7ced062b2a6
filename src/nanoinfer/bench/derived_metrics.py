"""Metrics computed from a measured row and the roofline: bytes and FLOPs a token, MBU, MFU, ceilings, speed-ups."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace

from nanoinfer.bench.backends import PEERS
from nanoinfer.bench.case import IRREGULAR, Case, Row
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, WeightFormat, int4
from nanoinfer.roofline.report import predict

NAIVE = ("recompute",)  # engines without a cache
_CACHES_IN_16_BITS = ("llama.cpp", "openvino", "vllm")
_HEADS = {"openvino": "int8", "vllm": "bfloat16"}  # peers with an int4 -> the format of the head beside it
BEST_PEER = "the best peer"  # a baseline: the fastest peer of a shape, in any format


def _format(case: Case, config: ModelConfig) -> WeightFormat | None:
    """Return the format of a case's weights, None if it is unknown. Peers have a KV cache in 16 bits."""
    fmt = int4(config) if (case.backend, case.format) == ("native", "int4") else FORMATS.get(case.format)
    if fmt is None or fmt.is_float or case.backend not in _CACHES_IN_16_BITS:
        return fmt
    if case.format == "int4" and case.backend in _HEADS:  # groups of 128 with a scale of 16 bits, but for the head
        head = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"
        fmt = replace(fmt, group_size=128, group_bytes=2, matrices={head: FORMATS[_HEADS[case.backend]]})
    return fmt.with_cache(2)


def costs(case: Case, config: ModelConfig, ceiling: Ceiling) -> dict[str, float]:
    """Return the fields of `Row` that follow from a case and the ceiling; without those that are unknown.

    A decode step at the mean length stands for all. Without a cache a step reads and computes the whole prefix.
    """
    if (fmt := _format(case, config)) is None:
        return {}
    cost = (arithmetic.prefill if case.backend in NAIVE else arithmetic.decode)(config, fmt)
    mean = case.mean_length(config.block_size)
    fields = {
        "weight_bytes": cost.weight_bytes,
        "bytes_per_token": cost.model.bytes(case.batch, mean) / case.batch,
        "flops_per_token": cost.model.flops(case.batch, mean) / case.batch,
    }
    with contextlib.suppress(NanoinferError):  # the throughput in this dtype is unknown
        fields["predicted_tokens_per_sec"] = case.batch / predict(cost.model, ceiling, fmt, case.batch, mean).seconds
    return fields


def fill_in(row: Row, config: ModelConfig, ceiling: Ceiling) -> None:
    """Set `costs` and the share of the bandwidth of a measured row."""
    if row.figures is None:
        return
    case, speed = row.case, row.figures.decode_tokens_per_sec
    row.update(costs(case, config, ceiling))
    if speed is None or row.bytes_per_token is None or case.workload in IRREGULAR or case.draft is not None:
        return
    bandwidth = ceiling.bandwidth(row.bytes_per_token * case.batch)
    row.mbu_percent = 100 * row.bytes_per_token * speed / bandwidth


def add_speculation(row: Row, totals: dict[str, float]) -> None:
    """Set the share of accepted proposals, from the totals of a run."""
    row.draft_share_percent = 100 * totals["draft_share"]
    if judged := totals["num_accepted"] + totals["num_rejected"]:
        row.acceptance_percent = 100 * totals["num_accepted"] / judged
        row.mean_accepted_length = totals["num_accepted"] / totals["num_verify_steps"]


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
