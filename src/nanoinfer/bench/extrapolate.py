"""The naive side, shortened: what generation without a cache would take, from its time at a few lengths.

Without a cache a token costs a forward pass over everything before it, and nothing else: the time of the token
after p tokens is the time to first token of a prompt of p tokens. So a few prompts give the curve, and the
curve gives the whole generation, at a fraction of the time. Rows made this way say so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

NUM_POSITIONS = 7
NUM_POSITIONS_SHORT = 3  # for texts so short that the time hardly changes along them


def sample_positions(first: int, last: int, count: int = NUM_POSITIONS) -> list[int]:
    """Return `count` lengths from first to last, evenly spread: sample_positions(10, 40, 4) -> [10, 20, 30, 40]."""
    if last <= first:
        return [first]
    count = min(count, last - first + 1)
    return sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)})


def interpolate(known: dict[int, float], position: int) -> float:
    """Return the time at a position: linear between known ones, the nearest outside them.

    interpolate({10: 1.0, 20: 3.0}, 15) -> 2.0
    """
    places = sorted(known)
    if position <= places[0]:
        return known[places[0]]
    if position >= places[-1]:
        return known[places[-1]]
    high = bisect_left(places, position)
    a, b = places[high - 1], places[high]
    return known[a] + (known[b] - known[a]) * (position - a) / (b - a)


def token_times(
    step_sec: Callable[[int], float],
    prompt_tokens: int,
    output_tokens: int,
    block_size: int,
    count: int = NUM_POSITIONS,
) -> list[float]:
    """Return the time of each token of a naive generation, from measurements at a few lengths.

    Args:
        step_sec: measures the time of one token after so many.
        prompt_tokens: length of the prompt.
        output_tokens: tokens to generate.
        block_size: past it the naive loop crops, so the time stays what it is there.
        count: lengths to measure at.
    """
    lengths = [min(prompt_tokens + i, block_size) for i in range(output_tokens)]
    known = {p: step_sec(p) for p in sample_positions(lengths[0], lengths[-1], count)}
    return [interpolate(known, p) for p in lengths]


def arrivals(times: list[float]) -> list[float]:
    """Return when each token would have arrived: [1.0, 2.0] -> [1.0, 3.0]."""
    total, result = 0.0, []
    for t in times:
        total += t
        result.append(total)
    return result
