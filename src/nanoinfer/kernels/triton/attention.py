"""Attention of new tokens over the KV cache, split over the context; lengths are read on the device.

A decode step has one query for each head, and few heads do not fill a GPU. The context is therefore split into parts.
Each part is one program with its own softmax, and a second small launch merges them (Dao et al., "Flash-Decoding for
long-context inference", 2023). Parts are merged in order, so the result does not depend on timing.

    part 0   part 1   part 2            each part: largest score, sum of exponentials, weighted sum of values
    [k k k]  [k k k]  [k .  . ]  pos    positions past the row's last are not read; an empty part has weight 0
        \\       |       /
         merged relative to the largest score

Token i of row r attends to the positions up to and including pos[r, i]. Its own key is in the cache already
(`Epilogue.store`, or heads.py).

Several heads of queries may share one of keys and values. A window limits how far back a token attends: parts and loops
then begin at the oldest position that a token of the program sees, rounded down to a whole turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import Places
from .launch import launch_options, wait_for_predecessor
from .products import INTERPRETED
from .sums import dot
from .tiles import ATTENTION_WARPS, COMBINE_WARPS, attention_blocks, attention_splits, multiprocessors

LOG2E = 1.4426950408889634
"""The kernels compute powers of 2: exp(s) = 2**(s * LOG2E)."""


@dataclass(frozen=True)
class Scores:
    """How the scores of a layer are computed."""

    scale: float | None = None
    """Factor; None: 1 / sqrt(D)."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    window: int | None = None
    """A token attends to this many positions, its own included; None: to all earlier ones."""
    sinks: Tensor | None = None
    """(H,), of each head: a score without a value, which only the sum of the softmax contains; None: none."""


@triton.jit
def capped(score, CAP: tl.constexpr):
    """Return CAP * tanh(score), or the score without a CAP. tanh(s) = 1 - 2 / (1 + exp(2s)) does not overflow."""
    if CAP != 0.0:
        score = CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score)))
    return score


@triton.jit
def with_sink(sinks, head, largest, total, LOG2E: tl.constexpr):
    """Return the largest score and the sum with a head's sink, and what multiplies sums without it."""
    sink = tl.load(sinks + head).to(tl.float32) * LOG2E
    higher = tl.maximum(largest, sink)
    keep = tl.exp2(largest - higher)
    return higher, total * keep + tl.exp2(sink - higher), keep


@triton.jit
def load_turn(
    keys, values, start, last, base, stride_token, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Return keys and values of positions [start, start + BLOCK_T), (BLOCK_T, BLOCK_D). base: of the slot and head.

    Positions from `last` on are not read: they may hold another sequence's values, or NaN.
    """
    t, dims = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    where = base + t.to(tl.int64) * stride_token
    valid = (t < last)[:, None] & (dims < D)[None, :]
    here = where[:, None] + dims[None, :]
    return tl.load(keys + here, mask=valid, other=0.0), tl.load(values + here, mask=valid, other=0.0)


@triton.jit
def attend_one(
    query, position, keys, values, first, last, base, stride_token, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return largest score, sum of exponentials and weighted sum of values of one query, (1, BLOCK_D).

    Each of the BLOCK_T positions of a turn has its own softmax, so that the loop needs no barrier.
    """
    largest = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        k, v = load_turn(keys, values, start, last, base, stride_token, D, BLOCK_D, BLOCK_T)
        score = capped(tl.sum(k.to(tl.float32) * query.to(tl.float32), 1) * scale, CAP)
        t = start + tl.arange(0, BLOCK_T)
        seen = t < last
        if WINDOW > 0:
            seen = seen & (t > position - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(largest, score)
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # no score yet: avoid inf - inf
        p = tl.exp2(score - origin)
        keep = tl.exp2(largest - origin)
        total = total * keep + p
        acc = acc * keep[:, None] + p[:, None] * v.to(tl.float32)
        largest = higher
    top = tl.max(largest, 0)
    weight = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    return top, tl.sum(total * weight, 0), tl.sum(acc * weight[:, None], 0)[None, :]


@triton.jit
def attend_rows(
    query, position, keys, values, first, last, base, stride_token, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return largest scores, sums of exponentials, (BLOCK_Q,), and weighted sums of values, (BLOCK_Q, BLOCK_D)."""
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        k, v = load_turn(keys, values, start, last, base, stride_token, D, BLOCK_D, BLOCK_T)
        t = start + tl.arange(0, BLOCK_T)
        score = dot(query.to(k.dtype), tl.trans(k), tl.zeros((BLOCK_Q, BLOCK_T), tl.float32), WIDEN)
        seen = (t[None, :] <= position[:, None]) & (t < last)[None, :]
        if WINDOW > 0:
            seen = seen & (t[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, capped(score * scale, CAP), float("-inf"))
        higher = tl.maximum(largest, tl.max(score, 1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # no score yet: avoid inf - inf
        p = tl.exp2(score - origin[:, None])
        keep = tl.exp2(largest - origin)
        total = total * keep + tl.sum(p, 1)
        acc = dot(p.to(v.dtype), v, acc * keep[:, None], WIDEN)
        largest = higher
    return largest, total, acc


@triton.jit(do_not_specialize=["num_tokens", "num_new"])
def attention_kernel(
    q, keys, values, slots, pos, out, parts, stats, sinks, num_tokens, num_heads, num_new, context,
    stride_slots, stride_slot, stride_head, stride_token, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Grid: (row * H + head, split, block of tokens). One head of a row's tokens attends to one part of the context.

    SHARED: heads of queries for each head of keys. Write to `out` if SPLITS is 1, else to `parts`.
    """
    row, head, split = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads, tl.program_id(1)
    wait_for_predecessor(PDL)
    queries, dims = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    tokens = row * num_new + queries
    inside = (queries < num_new)[:, None] & (dims < D)[None, :]
    at = (tokens * num_heads + head)[:, None] * D + dims[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    position = tl.load(pos + tokens, mask=queries < num_new, other=-1)
    base = head // SHARED * stride_head + tl.load(slots + row * stride_slots) * stride_slot
    position = tl.where(position < context, position, -1)  # padding attends to nothing
    length = tl.max(position, 0).to(tl.int32) + 1
    begin = 0
    if WINDOW > 0:
        oldest = tl.min(tl.where(position < 0, context, position), 0).to(tl.int32) - (WINDOW - 1)
        begin = tl.maximum(oldest, 0) // BLOCK_T * BLOCK_T
    share = tl.cdiv(tl.cdiv(length - begin, BLOCK_T), SPLITS) * BLOCK_T
    first = begin + split * share
    last = tl.minimum(first + share, length)
    if BLOCK_Q == 1:
        largest, total, acc = attend_one(
            query, tl.max(position, 0), keys, values, first, last, base, stride_token, scale, D, BLOCK_D, BLOCK_T,
            STAGES, WINDOW, CAP,
        )  # fmt: skip
    else:
        largest, total, acc = attend_rows(
            query, position, keys, values, first, last, base, stride_token, scale, D, BLOCK_D, BLOCK_Q, BLOCK_T, STAGES,
            WIDEN, WINDOW, CAP,
        )  # fmt: skip
    if SPLITS == 1:
        if sinks is not None:
            largest, total, keep = with_sink(sinks, head, largest, total, LOG2E)
            acc = acc * (keep if BLOCK_Q == 1 else keep[:, None])
        total = tl.where(total == 0.0, 1.0, total)
        y = acc / (total if BLOCK_Q == 1 else total[:, None])
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
    else:
        slot = split * num_tokens * num_heads + tokens * num_heads + head
        tl.store(parts + slot[:, None] * D + dims[None, :], acc, mask=inside)
        tl.store(stats + slot * 2, largest, mask=queries < num_new)
        tl.store(stats + slot * 2 + 1, total, mask=queries < num_new)


@triton.jit(do_not_specialize=["num_items"])
def join_parts_kernel(
    out, parts, stats, sinks, num_items, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Grid: (token * H + head). Merge the parts of one head of one token."""
    wait_for_predecessor(PDL)
    item = tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    slots = tl.arange(0, SPLITS) * num_items + item
    largest = tl.load(stats + slots * 2)
    total = tl.load(stats + slots * 2 + 1)
    highest = tl.max(largest, 0)
    weight = tl.exp2(largest - tl.where(highest == float("-inf"), 0.0, highest))
    part = tl.load(parts + slots[:, None] * D + dims[None, :], mask=(dims < D)[None, :], other=0.0)
    total = tl.sum(weight * total, 0)
    y = tl.sum(weight[:, None] * part, 0)
    if sinks is not None:
        highest, total, keep = with_sink(sinks, item % num_heads, highest, total, LOG2E)
        y = y * keep
    y = y / tl.where(total == 0.0, 1.0, total)
    tl.store(out + item * D + dims, y.to(out.dtype.element_ty), mask=dims < D)


def attention(
    q: Tensor, places: Places, context: int, out: Tensor, splits: int | None = None, scores: Scores | None = None
) -> None:
    """Write the attention of new tokens to `out`. Their keys and values are in the cache already.

    This is one launch, or two if the context is split.

    Args:
        q: (R * n, H * D) contiguous, any float type; H is a multiple of the number of heads of keys. Token i of row r
            is q[r * n + i], n >= 1.
        places: one layer's keys and values, and the position of each token.
        context: upper bound of the positions. A token whose position is not below it is padding and gets zeros.
        out: like q.
        splits: number of parts of the context, a power of two; None: chosen by tiles.py for this device.
        scores: scale, soft cap, window and sinks; None: GPT-2's.

    Raises:
        ValueError: shapes or strides do not match.
    """
    num_rows, num_new = places.pos.shape
    _, num_kv_heads, _, D = places.keys.shape
    _check(q, places, out)
    num_heads, scores = q.shape[1] // D, scores or Scores()
    bits, BLOCK_D = 8 * places.keys.itemsize, max(16, triton.next_power_of_2(D))
    block_t, most, num_stages = attention_blocks(BLOCK_D, bits, num_new)
    block_q = 1 if num_new == 1 else min(max(16, triton.next_power_of_2(num_new)), most)
    blocks = triton.cdiv(num_new, block_q)
    splits = splits or attention_splits(num_rows * num_heads * blocks, context, bits, multiprocessors(q.device))
    num_tokens = num_rows * num_new
    options = launch_options(q.device)
    parts = stats = None
    if splits > 1:
        parts = torch.empty(splits, num_tokens, num_heads, D, device=q.device)
        stats = torch.empty(splits, num_tokens, num_heads, 2, device=q.device)
    attention_kernel[(num_rows * num_heads, splits, blocks)](
        q, places.keys, places.values, places.slots, places.pos, out, parts, stats, scores.sinks, num_tokens,
        num_heads, num_new, context, places.slots.stride(0), *places.keys.stride()[:3], score_scale(D, scores),
        D=D, BLOCK_D=BLOCK_D, BLOCK_Q=block_q, BLOCK_T=block_t,
        SPLITS=splits, STAGES=num_stages,
        WIDEN=INTERPRETED, num_warps=ATTENTION_WARPS, SHARED=num_heads // num_kv_heads, WINDOW=scores.window or 0,
        CAP=(scores.softcap or 0.0) * LOG2E, LOG2E=LOG2E, **options,
    )  # fmt: skip
    if splits > 1:
        join_parts_kernel[(num_tokens * num_heads,)](
            out, parts, stats, scores.sinks, num_tokens * num_heads, num_heads, D=D, BLOCK_D=BLOCK_D, SPLITS=splits,
            LOG2E=LOG2E, num_warps=COMBINE_WARPS, **options,
        )  # fmt: skip


def score_scale(head_dim: int, scores: Scores) -> float:
    """Return the factor of the products of queries and keys: times log2(e), or divided by the soft cap."""
    scale = head_dim**-0.5 if scores.scale is None else scores.scale
    return float(scale * LOG2E if scores.softcap is None else scale / scores.softcap)


def _check(q: Tensor, places: Places, out: Tensor) -> None:
    """Raise ValueError if the shapes do not match."""
    (num_rows, num_new), (_, num_heads, _, D) = places.pos.shape, places.keys.shape
    if num_new < 1:
        raise ValueError(f"{num_new} new tokens a row: need 1 or more")
    if q.shape[-1] == 0 or q.shape[-1] % (num_heads * D):
        raise ValueError(f"q of shape {tuple(q.shape)}: need a multiple of {num_heads} * {D} columns")
    wanted = (num_rows * num_new, q.shape[-1])
    for name, t in (("q", q), ("out", out)):
        if tuple(t.shape) != wanted or not t.is_contiguous():
            raise ValueError(f"{name} of shape {tuple(t.shape)}, strides {t.stride()}: need {wanted}, contiguous")
    if not places.pos.is_contiguous() or places.slots.shape[0] != num_rows:
        raise ValueError(f"table of {places.slots.shape[0]} rows, pos of {num_rows}: need as many, pos contiguous")
