"""Sampling on a GPU without a sort: penalties, filters and the inverse transform (docs/sampling.md), in two kernels.

    weigh  (parts x rows)  penalties, bias, min_tokens; the largest logit of each part of each row; for rows that are
                           not greedy also weights and their sum
    sample (rows)          the thresholds of the filters, the random number, the token; updates the row's slot

A part is BLOCK tokens, so that a single row uses many multiprocessors for the long operations (reading logits, float64
exponentials). A part does not know the row's largest logit, so its weights are exp((logit - the part's largest) /
temperature). `sample` multiplies them by exp((the part's largest - the row's largest) / temperature), a number a part.

Every decision is made in float64. All logits and distances are those of the reference sampler, bit for bit; weights
differ in their last bits. The kernels use no atomics, so a row gives the same token in every batch, and no fused
multiply-add (enable_fp_fusion=False at the launch), which would change the last bit of the penalties.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import wait_for_predecessor
from .sampler_search import BLOCK as BLOCK
from .sampler_search import GROUP as GROUP
from .sampler_search import INF, WEIGHTLESS, border_of, ids_of, least_with, list_groups

MAX_BIAS = tl.constexpr(512)
"""Maximum number of logit_bias entries of a slot; a power of two."""
MAX_ENDS = tl.constexpr(64)
"""Maximum number of end tokens of a slot; a power of two."""
NOT_FINITE = tl.constexpr(-1)
"""Token of a row whose largest logit is not finite."""

# Indices of a slot's 64-bit words: int64 values, or the bits of float64 values.
SEED, SAMPLE, POSITION, PENALISED, TOP_K, MIN_TOKENS, NUM_ENDS, NUM_BIAS = (tl.constexpr(i) for i in range(8))
TEMPERATURE, TOP_P, FARTHEST, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(i) for i in range(8, 14))
NUM_WORDS = tl.constexpr(16)
LIST_SIZE = tl.constexpr(MAX_ENDS.value + 2 * MAX_BIAS.value)
"""64-bit words of a slot's lists: end tokens, bias ids, bias values."""
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def real(words, name: tl.constexpr):
    """Return a float64 parameter of a slot."""
    return tl.load(words + name).to(tl.float64, bitcast=True)


@triton.jit
def excludes_ends(words):
    """Return whether min_tokens excludes the row's end tokens."""
    return (tl.load(words + MIN_TOKENS) > tl.load(words + POSITION)) & (tl.load(words + NUM_ENDS) > 0)


@triton.jit
def is_changed(words):
    """Return whether a parameter other than the temperature changes the row's logits."""
    return (tl.load(words + PENALISED) != 0) | (tl.load(words + NUM_BIAS) > 0) | excludes_ends(words)


@triton.jit
def is_filtered(words, V):
    """Return whether a filter may exclude tokens."""
    k = tl.load(words + TOP_K)
    return ((k > 0) & (k < V)) | (real(words, TOP_P) < 1.0) | (real(words, FARTHEST) < INF)


@triton.jit
def penalised(logits, state, words, ids, mask):
    """Return float64 logits of some tokens after the penalties, in the reference's order of operations."""
    x = tl.load(logits + ids, mask=mask, other=-INF).to(tl.float64)
    if tl.load(words + PENALISED) != 0:
        seen = tl.load(state + ids, mask=mask, other=0).to(tl.int32)  # < 0: in the prompt; low 15 bits: count
        count = (seen & 0x7FFF).to(tl.float64)
        repetition = real(words, REPETITION)
        x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x = x - real(words, PRESENCE) * tl.minimum(count, 1.0) - real(words, FREQUENCY) * count
    return x


@triton.jit
def changed_logits(logits, words, lists, state, values, ids, part, V):
    """Return float64 logits of a part after penalties, bias and min_tokens; they are written to `values` too."""
    tl.store(values + ids, penalised(logits, state, words, ids, ids < V))
    tl.debug_barrier()  # the following stores overwrite some of them
    i = tl.arange(0, MAX_BIAS)
    listed = i < tl.load(words + NUM_BIAS)
    at = tl.load(lists + MAX_ENDS + i, mask=listed, other=-1)
    here = listed & (at // BLOCK == part)
    bias = tl.load(lists + MAX_ENDS + MAX_BIAS + i, mask=here, other=0).to(tl.float64, bitcast=True)
    tl.store(values + at, penalised(logits, state, words, at, here) + bias, mask=here)
    tl.debug_barrier()
    if excludes_ends(words):
        j = tl.arange(0, MAX_ENDS)
        end = tl.load(lists + j, mask=j < tl.load(words + NUM_ENDS), other=-1)
        tl.store(values + end, tl.full((MAX_ENDS,), -INF, tl.float64), mask=(end >= 0) & (end // BLOCK == part))
    tl.debug_barrier()
    return tl.load(values + ids)


@triton.jit
def weigh(
    logits, stride, slots, wanted, stride_slots, words, lists, state,
    values, weights, nearest, largest, best, sums, V, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each part's largest logit (NaN if it has one), its first index, and the sum of the part's weights.

    For rows with a filter, also write the weights and each group's largest logit.

    Args:
        logits: (B, V' >= V) float32, rows `stride` apart.
        slots: (B,) int64, elements stride_slots apart.
        wanted: (B,) bool or int64, elements stride_slots apart.
        words: (num_slots, NUM_WORDS) int64.
        lists: (num_slots, LIST_SIZE) int64.
        state: (num_slots, V) int16: count of each sampled token; the sign bit is set if the prompt contains it.
        values: (B, PARTS * BLOCK) float64: the logits of changed rows.
        weights: (B, PARTS * BLOCK) float64, relative to the part's largest logit.
        nearest: (B, PARTS * BLOCK / GROUP) float64: the largest logit of each group.
        largest: (B, PARTS) float64.
        best: (B, PARTS) int32.
        sums: (B, PARTS) float64, relative to the part's largest logit.
        PARTS: parts of a row, rounded up to a power of two.
    """
    wait_for_predecessor(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(wanted + row * stride_slots) != 0:
        slot = tl.load(slots + row * stride_slots)
        words += slot * NUM_WORDS
        logits += row * stride
        values += row * (PARTS * BLOCK)
        ids = part * BLOCK + tl.arange(0, BLOCK)
        if is_changed(words):
            x = changed_logits(logits, words, lists + slot * LIST_SIZE, state + slot * V, values, ids, part, V)
        else:
            x = tl.load(logits + ids, mask=ids < V, other=-INF).to(tl.float64)
        most = tl.max(x, 0)
        at_first = tl.min(tl.where(x == most, ids, NO_ID), 0)
        bad = tl.max((x != x).to(tl.int32), 0)
        tl.store(largest + row * PARTS + part, tl.where(bad != 0, float("nan"), most))
        tl.store(best + row * PARTS + part, at_first)
        temperature = real(words, TEMPERATURE)
        if temperature > 0:
            origin = tl.where(most > -INF, most, 0.0)  # all excluded: avoid inf - inf
            w = tl.exp(-((origin - x) / temperature))
            tl.store(sums + row * PARTS + part, tl.sum(w, 0))
            if is_filtered(words, V):
                tl.store(weights + row * (PARTS * BLOCK) + ids, w)
                group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                top = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
                tl.store(nearest + row * (PARTS * (BLOCK // GROUP)) + group, top)


@triton.jit
def largest_of(largest, best, num_parts, PARTS: tl.constexpr):
    """Return the row's largest logit (infinite if any is NaN) and its first index."""
    part = tl.arange(0, PARTS)
    x = tl.load(largest + part, mask=part < num_parts, other=-INF)
    most = tl.max(tl.where(x == x, x, INF), 0)
    at = tl.load(best + part, mask=part < num_parts, other=NO_ID)
    return most, tl.min(tl.where(x == most, at, NO_ID), 0)


@triton.jit
def distances(logits, values, changed, largest, temperature, ids, mask):
    """Return y = (largest - logit) / temperature of some tokens; infinite where the mask is false."""
    if changed:
        x = tl.load(values + ids, mask=mask, other=-INF)
    else:
        x = tl.load(logits + ids, mask=mask, other=-INF).to(tl.float64)
    return tl.where(mask, (largest - x) / temperature, INF)


@triton.jit
def uniform(words):
    """Return the token's random number in [0, 1): 53 bits of Philox4x32-10 of (position, sample) under the seed."""
    position, sample = tl.load(words + POSITION), tl.load(words + SAMPLE)
    first, second, _, _ = tl.philox(
        tl.load(words + SEED),
        position.to(tl.uint32), (position >> 32).to(tl.uint32), sample.to(tl.uint32), (sample >> 32).to(tl.uint32),
    )  # fmt: skip
    return (((first >> 5).to(tl.int64) << 26) | (second >> 6).to(tl.int64)).to(tl.float64) * (2.0**-53)


@triton.jit
def first_past(sums, before, target, SIZE: tl.constexpr):
    """Return the first index with a weight > 0 whose running sum (from `before`) exceeds the target.

    If rounding keeps all running sums at or below the target, return the last index with a weight > 0.
    """
    i = tl.arange(0, SIZE)
    at = tl.min(tl.where((before + tl.cumsum(sums, 0) > target) & (sums > 0), i, SIZE), 0)
    return tl.where(at < SIZE, at, tl.max(tl.where(sums > 0, i, 0), 0))


@triton.jit
def kept_weights(values, weights, groups, num_groups, chunk, border):
    """Return the token ids of a chunk of the listed groups, and their weights; 0 beyond the border."""
    ids = ids_of(groups, num_groups, chunk)
    y = tl.load(values + ids, mask=ids >= 0, other=INF)
    w = tl.load(weights + ids, mask=ids >= 0, other=0.0)
    return ids, tl.where(y <= border, w, 0.0)


@triton.jit
def narrowed(words, high, total, V):
    """Return an upper bound of the border of min_p and top_p, at most `high`. `total` is the weight of all tokens."""
    p = real(words, TOP_P)
    high = tl.minimum(high, real(words, FARTHEST))
    # The tokens beyond y have a weight of at most V exp(-y). If that is less than 1 - p of the total, none is kept.
    rest = 1.0 - p - 1e-12  # the slack is much larger than the rounding of the sums
    if rest > 0.0:
        high = tl.minimum(high, tl.maximum(0.0 - tl.log(rest * total / V), 0.0))
    return high


@triton.jit
def rescale(logits, values, weights, nearest, groups, factors, words, most, high, V, N: tl.constexpr):
    """Write y and the weights relative to the row's largest logit, of all groups that reach `high`."""
    changed, temperature = is_changed(words), real(words, TEMPERATURE)
    num_groups = list_groups(nearest, groups, high, N)
    chunk = num_groups * 0
    while chunk < tl.cdiv(num_groups, BLOCK // GROUP):
        ids = ids_of(groups, num_groups, chunk)
        here = (ids >= 0) & (ids < V)
        y = distances(logits, values, changed, most, temperature, ids, here)
        w = tl.load(weights + ids, mask=here, other=0.0) * tl.load(factors + ids // BLOCK, mask=here, other=0.0)
        tl.debug_barrier()  # all threads have read the logits that y overwrites
        tl.store(values + ids, y, mask=ids >= 0)
        tl.store(weights + ids, w, mask=ids >= 0)
        chunk += 1
    tl.debug_barrier()


@triton.jit
def filter_border(logits, values, weights, nearest, groups, factors, words, most, total, V, N: tl.constexpr):
    """Return the border of all filters: tokens with y <= border are kept. `total` is the weight of all tokens."""
    k, p = tl.load(words + TOP_K), real(words, TOP_P)
    high = total * 0.0 + WEIGHTLESS
    if (k > 0) & (k < V):
        high = least_with(nearest, k, high, N)  # k groups hold at least k tokens
        rescale(logits, values, weights, nearest, groups, factors, words, most, high, V, N)
        high = border_of(values, weights, nearest, groups, k.to(tl.float64), high, True, N)
        if p < 1.0:
            num_groups = list_groups(nearest, groups, high, N)
            total = total * 0.0
            chunk = num_groups * 0
            while chunk < tl.cdiv(num_groups, BLOCK // GROUP):
                _, w = kept_weights(values, weights, groups, num_groups, chunk, high)
                total += tl.sum(w, 0)
                chunk += 1
        high = narrowed(words, high, total, V)
    else:
        high = narrowed(words, high, total, V)
        rescale(logits, values, weights, nearest, groups, factors, words, most, high, V, N)
    if p < 1.0:
        high = border_of(values, weights, nearest, groups, p * total, high, False, N)
    return high


@triton.jit
def sampled_token(
    logits, values, weights, nearest, groups, largest, sums, words, most, V, num_parts, PARTS: tl.constexpr
):
    """Return the token of a row whose temperature is not 0. The arguments are those of the row; see `sample`."""
    temperature = real(words, TEMPERATURE)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    factor = tl.exp(-((most - tl.load(largest + part, mask=inside, other=-INF)) / temperature))
    partial = tl.load(sums + part, mask=inside, other=0.0) * factor
    total = tl.sum(partial, 0)
    if is_filtered(words, V):
        N: tl.constexpr = PARTS * (BLOCK // GROUP)
        g = tl.arange(0, N)
        least = (most - tl.load(nearest + g, mask=g < tl.cdiv(V, GROUP), other=-INF)) / temperature
        tl.debug_barrier()  # all threads have read what these stores overwrite
        tl.store(largest + part, factor)
        tl.store(nearest + g, least)
        tl.debug_barrier()
        border = filter_border(logits, values, weights, nearest, groups, largest, words, most, total, V, N)
        num_groups = list_groups(nearest, groups, border, N)
        num_chunks = tl.cdiv(num_groups, BLOCK // GROUP)
        chunk = num_groups * 0
        while chunk < num_chunks:
            _, w = kept_weights(values, weights, groups, num_groups, chunk, border)
            tl.store(sums + chunk, tl.sum(w, 0))
            chunk += 1
        tl.debug_barrier()
        partial = tl.load(sums + part, mask=part < num_chunks, other=0.0)
        target = uniform(words) * tl.sum(partial, 0)
        at = first_past(partial, 0.0, target, PARTS)
        ids, w = kept_weights(values, weights, groups, num_groups, at, border)
    else:
        target = uniform(words) * total
        at = first_past(partial, 0.0, target, PARTS)
        ids = at * BLOCK + tl.arange(0, BLOCK)
        w = tl.exp(-distances(logits, values, is_changed(words), most, temperature, ids, ids < V))
    before = tl.sum(tl.where(part < at, partial, 0.0), 0)
    within = first_past(w, before, target, BLOCK)
    return tl.sum(tl.where(tl.arange(0, BLOCK) == within, ids, 0), 0)


@triton.jit
def sample(
    logits, stride, slots, wanted, stride_slots, words, state, values, weights, nearest, groups, largest, best, sums,
    tokens, last, owners, stride_owners, V, num_parts, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write each wanted row's token, count it, and advance the position of the row's slot.

    Args:
        values: overwritten with y = (the row's largest logit - logit) / temperature, where a filter needs it.
        weights: overwritten with exp(-y), likewise.
        nearest: overwritten with each group's least y, in filtered rows.
        groups: (B, PARTS * BLOCK / GROUP) int32, scratch.
        largest: overwritten with the factor of each part's weights, in filtered rows.
        tokens: (B,) int64: the token, or NOT_FINITE, which leaves the slot unchanged.
        last: int64: the token, at least 0, of the row with this owner; None: not written.
        owners: (B,) int64, elements stride_owners apart: index of the row in `last`.
        num_parts: number of parts of a row in the launch of `weigh`.
        The others are those of `weigh`.
    """
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + row * stride_slots) != 0:
        slot = tl.load(slots + row * stride_slots)
        words += slot * NUM_WORDS
        largest += row * PARTS
        most, token = largest_of(largest, best + row * PARTS, num_parts, PARTS)
        finite = (most > -INF) & (most < INF)
        if finite:
            if real(words, TEMPERATURE) > 0:
                at = row * PARTS
                groups_at = at * (BLOCK // GROUP)
                token = sampled_token(
                    logits + row * stride, values + at * BLOCK, weights + at * BLOCK, nearest + groups_at,
                    groups + groups_at, largest, sums + at, words, most, V, num_parts, PARTS,
                )  # fmt: skip
            tl.store(words + POSITION, tl.load(words + POSITION) + 1)
            if tl.load(words + PENALISED) != 0:
                count = state + slot * V + token
                tl.store(count, (tl.load(count) + 1).to(tl.int16))
        token = token.to(tl.int64)
        tl.store(tokens + row, tl.where(finite, token, NOT_FINITE))
        if last is not None:
            tl.store(last + tl.load(owners + row * stride_owners), tl.where(finite, token, 0))
