"""The search for the border of top_k and top_p without a sort, as part of the sampler's last kernel (sampler.py).

Both filters need the least border such that the mass of all tokens with y <= border reaches a goal. The mass of a token
is 1 for top_k and its weight for top_p; the goal is k, or p times the total weight. The search (docs/sampling.md) keeps
a bracket (low, high]: the mass up to `low` is too small, and the mass up to `high` is sufficient.

y = (largest logit of the row - logit) / temperature, so 0 <= y; it is infinite for excluded tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
"""Number of consecutive tokens that share one minimum."""
PIVOTS = tl.constexpr(4)
"""Number of borders that one pass tries; a power of two. With 8, `sample` runs out of registers."""
BLOCK = tl.constexpr(2048)
"""Number of tokens that a program reads at a time, and of a part of a row (sampler.py)."""
WEIGHTLESS = tl.constexpr(746.0)
"""exp(-y) is 0 in float64 from this y on: such tokens are never sampled."""
INF = tl.constexpr(float("inf"))


@triton.jit
def pivots(low, high, turn):
    """Return PIVOTS borders between low and high: evenly spaced, or (odd turns) evenly spaced among float64 numbers."""
    low = tl.maximum(low, 0.0)  # y is never below 0
    step = tl.arange(0, PIVOTS) + 1
    if turn % 2 == 0:
        borders = low + (high - low) * (step.to(tl.float64) / (PIVOTS + 1))
    else:  # non-negative floats have the order of their bits
        first = low.to(tl.int64, bitcast=True)
        gap = high.to(tl.int64, bitcast=True) - first
        bits = first + gap // (PIVOTS + 1) * step + gap % (PIVOTS + 1) * step // (PIVOTS + 1)
        borders = bits.to(tl.float64, bitcast=True)
    return tl.minimum(borders, high)


@triton.jit
def least_with(nearest, goal, high, NUM_GROUPS: tl.constexpr):
    """Return the `goal`-th smallest of the groups' minima; `goal` tokens or more are <= it. `high` if there is none."""
    y = tl.load(nearest + tl.arange(0, NUM_GROUPS))
    low = high * 0.0 - 1.0
    turn = 0
    num_left = tl.sum((y <= high).to(tl.int32), 0)
    if num_left >= goal:
        while num_left > 1:
            borders = pivots(low, high, turn)
            count = tl.sum((y[:, None] <= borders[None, :]).to(tl.int32), 0)
            high = tl.min(tl.where(count >= goal, borders, high), 0)
            low = tl.max(tl.where(count < goal, borders, low), 0)
            inside = (y > low) & (y <= high)
            least, most = tl.min(tl.where(inside, y, INF), 0), tl.max(tl.where(inside, y, -INF), 0)
            num_left = tl.where(least < most, 2, 1)
            turn += 1
    return high


@triton.jit
def list_groups(nearest, groups, border, NUM_GROUPS: tl.constexpr):
    """List the groups with a token up to the border, in vocabulary order; return their number."""
    g = tl.arange(0, NUM_GROUPS)
    reaches = (tl.load(nearest + g) <= border).to(tl.int32)
    tl.debug_barrier()  # all threads have finished reading the previous list
    tl.store(groups + tl.cumsum(reaches, 0) - 1, g, mask=reaches > 0)
    tl.debug_barrier()
    return tl.sum(reaches, 0)


@triton.jit
def ids_of(groups, num_groups, chunk):
    """Return the token ids of a chunk of the listed groups; -1 past the end."""
    i = tl.arange(0, BLOCK)
    at = chunk * (BLOCK // GROUP) + i // GROUP
    group = tl.load(groups + at, mask=at < num_groups, other=-1)
    return tl.where(group >= 0, group * GROUP + i % GROUP, -1)


@triton.jit
def border_of(values, weights, nearest, groups, goal, high, COUNT: tl.constexpr, N: tl.constexpr):
    """Return the least border whose mass reaches the goal; `high` if the mass up to `high` does not.

    Args:
        values: y of one row.
        weights: exp(-y) of the row.
        nearest: minima of its N groups.
        groups: scratch for N group indices.
        goal: float64.
        high: float64, upper bound of the border.
        COUNT: whether the mass of a token is 1 instead of its weight.
        N: number of groups, a power of two.
    """
    low = high * 0.0 - 1.0
    turn = 0
    several = True
    while several:
        num_groups = list_groups(nearest, groups, high, N)
        borders = pivots(low, high, turn)
        mass = tl.zeros((PIVOTS,), tl.float64)
        least, most = high * 0.0 + INF, high * 0.0 - 1.0
        chunk = num_groups * 0  # not range(): the interpreter of Triton 3.6 needs a host integer as its bound
        while chunk < tl.cdiv(num_groups, BLOCK // GROUP):
            ids = ids_of(groups, num_groups, chunk)
            y = tl.load(values + ids, mask=ids >= 0, other=INF)
            up_to = y[:, None] <= borders[None, :]
            if COUNT:
                mass += tl.sum(up_to.to(tl.int32), 0).to(tl.float64)
            else:
                w = tl.load(weights + ids, mask=ids >= 0, other=0.0)
                mass += tl.sum(tl.where(up_to, w[:, None], 0.0), 0)
            inside = (y > low) & (y <= high)
            least = tl.minimum(least, tl.min(tl.where(inside, y, INF), 0))
            most = tl.maximum(most, tl.max(tl.where(inside, y, -1.0), 0))
            chunk += 1
        several = least < most
        if several:
            high = tl.min(tl.where(mass >= goal, borders, high), 0)
            low = tl.max(tl.where(mass < goal, borders, low), 0)
        turn += 1
    return high
