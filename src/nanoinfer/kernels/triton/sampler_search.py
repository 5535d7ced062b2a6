"""Where a filter ends, found without a sort: the search that the sampler's last kernel (sampler.py) runs.

top_k and top_p are one question: of the values y, what is the least border whose mass, of all y <= border, reaches a
goal? The mass of a token is 1 for top_k and its weight for top_p; the goal is k, or p times all weight. A bracket
(low, high] holds the border from the start: what is up to `low` is too little, what is up to `high` is enough. One
pass adds up the mass at PIVOTS borders between the two, which leaves a fifth of the bracket. The search ends when the
bracket holds one value only (its equals included), so the border is exact: nothing depends on how fine the pivots are.

The pivots lie evenly in every other pass, which suits most logits, and evenly among the float64 numbers between low and
high in the passes between, which ends it whatever the logits: 28 fifths of 2**63 numbers are one number.

Passes touch few tokens. The least y of every group of GROUP neighbours is known, and a pass visits only the groups
that reach into y <= high. They are listed in vocabulary order, so that sums over them are sums in vocabulary order.

y is how far a logit lies below the row's largest, in units of the temperature: 0 <= y, infinite for excluded tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
"""Neighbours in the vocabulary that share one minimum."""
PIVOTS = tl.constexpr(4)
"""Borders that one pass tries; a power of two. With 8, `draw` needs more registers than there are."""
BLOCK = tl.constexpr(2048)
"""Tokens that a program reads at a time, and those of a part of a row (sampler.py)."""
WEIGHTLESS = tl.constexpr(746.0)
"""exp(-y) is 0 in float64 from here on: such tokens are never drawn and count for nothing."""
INF = tl.constexpr(float("inf"))


@triton.jit
def pivots(low, high, turn):
    """PIVOTS borders from low to high, in even steps or (odd turns) in steps of as many float64 numbers."""
    low = tl.maximum(low, 0.0)  # below 0 there is nothing
    step = tl.arange(0, PIVOTS) + 1
    if turn % 2 == 0:
        borders = low + (high - low) * (step.to(tl.float64) / (PIVOTS + 1))
    else:  # floats that are not negative lie in the order of their bits
        first = low.to(tl.int64, bitcast=True)
        gap = high.to(tl.int64, bitcast=True) - first
        bits = first + gap // (PIVOTS + 1) * step + gap % (PIVOTS + 1) * step // (PIVOTS + 1)
        borders = bits.to(tl.float64, bitcast=True)
    return tl.minimum(borders, high)


@triton.jit
def least_with(nearest, goal, high, NUM_GROUPS: tl.constexpr):
    """The `goal`-th least of the groups' minima: that many tokens lie up to it. `high` where there are fewer."""
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
    tl.debug_barrier()  # nobody still reads the last list
    tl.store(groups + tl.cumsum(reaches, 0) - 1, g, mask=reaches > 0)
    tl.debug_barrier()
    return tl.sum(reaches, 0)


@triton.jit
def ids_of(groups, num_groups, chunk):
    """The token ids of a chunk of the listed groups, -1 past the end."""
    i = tl.arange(0, BLOCK)
    at = chunk * (BLOCK // GROUP) + i // GROUP
    group = tl.load(groups + at, mask=at < num_groups, other=-1)
    return tl.where(group >= 0, group * GROUP + i % GROUP, -1)


@triton.jit
def border_of(
    values,
    weights,
    nearest,
    groups,
    goal,
    high,
    COUNT: tl.constexpr,
    N: tl.constexpr,
):
    """The least border whose mass reaches the goal; `high` where the mass up to `high` does not.

    Args:
        values: y of one row.
        weights: exp(-y) of it.
        nearest: the minima of its N groups.
        groups: room for N group numbers.
        goal: float64.
        high: float64; the border is not above it.
        COUNT: a token's mass is 1, instead of its weight.
        N: groups, a power of two.
    """
    low = high * 0.0 - 1.0
    turn = 0
    several = True
    while several:
        num_groups = list_groups(nearest, groups, high, N)
        borders = pivots(low, high, turn)
        mass = tl.zeros((PIVOTS,), tl.float64)
        least, most = high * 0.0 + INF, high * 0.0 - 1.0
        chunk = num_groups * 0  # no range(): its bound must be a number of the host in the interpreter of Triton 3.6
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
