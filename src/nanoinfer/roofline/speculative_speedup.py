"""How many tokens to speculate, and what it gains.

A round: the draft model proposes k tokens one by one, the target verifies them in one step, the longest
accepted prefix is kept. Let each proposal be accepted with probability a, independently of the others, given
that all before it were.

Without the bonus token. If i < k proposals are accepted, the target's own token replaces the first rejected
one: i + 1 tokens. If all k are, the round has k tokens. The target looks at k positions. Token j = 1..k of
the round exists if the j - 1 before it were accepted, which has probability a^(j-1), so

    E = 1 + a + ... + a^(k-1) = (1 - a^k) / (1 - a)                             1 <= E <= k

With the bonus token (Leviathan et al. 2023, equation 1; Chen et al. 2023, algorithm 2). The target looks at
k + 1 positions; when all k proposals are accepted it draws one more from the last:

    E = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)                             1 <= E <= k + 1

At a = 1 both are their number of terms. With c = time of a draft step / time of a target step, and v = time
of the verifying step / time of a target step, a round takes k c + v target steps instead of E:

    speed-up(k) = E / (k c + v)                                 (Leviathan et al., theorem 3.8, has v = 1)

Greedy or sampled changes what a is, not the formulas. Greedy (temperature 0): a proposal is accepted when
it is the target's most likely token; a is how often the two agree. Sampled: a proposal x is accepted with
probability min(1, p(x) / q(x)), p the target's distribution and q the draft's, and a rejected one is replaced
by a draw from max(p - q, 0), normalised; then a = sum over x of min(p(x), q(x)). Both leave the target's
output as it was: the same tokens, and the same distribution.

Covered: one draft model, a chain of proposals, a constant a. Not covered: trees of proposals, a that falls
with distance, and the draft's second catch-up token after a round in which all were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.checks import require_float, require_int
from nanoinfer.errors import NanoinferError

MAX_SPECULATE_K = 64

Rows = Sequence[Sequence[float]]
"""One row of scores or probabilities over the vocabulary for each position."""


@dataclass(frozen=True)
class Speculation:
    """A number of speculated tokens and what it gives."""

    speculate_k: int
    """Tokens proposed in a round; 0: speculation never pays, decode plainly."""
    tokens_per_round: float
    """Expected tokens of a round."""
    speedup: float
    """Times faster than plain decoding."""


def expected_tokens(acceptance: float, speculate_k: int, *, bonus: bool = True) -> float:
    """Return the expected tokens of a round of `speculate_k` proposals; 0 proposals are plain decoding: 1.

    expected_tokens(0.5, 2)  ->  1.75      expected_tokens(0.5, 2, bonus=False)  ->  1.5

    Raises:
        NanoinferError: acceptance is not in [0, 1], or speculate_k is negative.
    """
    require_float("acceptance", acceptance, 0.0, 1.0)
    require_int("speculate_k", speculate_k, 0, 1 << 16)
    # summed, not (1 - a^n) / (1 - a): that loses its digits near a = 1
    return float(sum(acceptance**j for j in range(verified_tokens(speculate_k, bonus=bonus))))


def verified_tokens(speculate_k: int, *, bonus: bool = True) -> int:
    """Return the tokens of each sequence that the target extends by to verify `speculate_k` proposals.

    The newest token and all proposals; without the bonus the last proposal needs no position of its own.
    """
    return speculate_k + 1 if bonus or speculate_k == 0 else speculate_k


def speedup(
    acceptance: float, speculate_k: int, draft_cost: float, verify_cost: float = 1.0, *, bonus: bool = True
) -> float:
    """Return how many times faster than plain decoding speculation is; below 1 it is slower.

    Args:
        acceptance: probability that a proposal is accepted, in [0, 1].
        speculate_k: proposals in a round; 0 is plain decoding, and gives 1.
        draft_cost: time of a draft step over time of a target step, >= 0.
        verify_cost: time of the verifying step over time of a target step, > 0.
        bonus: whether a round with every proposal accepted has one more token.

    Raises:
        NanoinferError: an argument is out of range or NaN.
    """
    require_float("draft_cost", draft_cost, 0.0, 1e9)
    require_float("verify_cost", verify_cost, 0.0, 1e9, low_open=True)
    if speculate_k == 0:
        verify_cost = 1.0
    return expected_tokens(acceptance, speculate_k, bonus=bonus) / (speculate_k * draft_cost + verify_cost)


def best_speculation(
    acceptance: float,
    draft_cost: float,
    verify_cost: Callable[[int], float] = lambda num_tokens: 1.0,
    *,
    bonus: bool = True,
    max_k: int = MAX_SPECULATE_K,
) -> Speculation:
    """Return the number of proposals with the largest speed-up, the smallest of equals; 0 when none is above 1.

    Args:
        acceptance: probability that a proposal is accepted, in [0, 1].
        draft_cost: time of a draft step over time of a target step.
        verify_cost: from tokens verified to time of that step over time of a target step.
        bonus: whether a round with every proposal accepted has one more token.
        max_k: most proposals to consider; without a bonus one is never worth it.
    """
    best = Speculation(0, 1.0, 1.0)
    for k in range(1, max_k + 1):
        gain = speedup(acceptance, k, draft_cost, verify_cost(verified_tokens(k, bonus=bonus)), bonus=bonus)
        if gain > best.speedup * (1 + 1e-12):  # a tie in exact arithmetic is no reason to speculate more
            best = Speculation(k, expected_tokens(acceptance, k, bonus=bonus), gain)
    return best


def greedy_acceptance(target: Rows, draft: Rows) -> float:
    """Return how often target and draft agree on the most likely token, over rows of scores or probabilities."""
    agree = [p.index(max(p)) == q.index(max(q)) for p, q in _pairs(target, draft)]
    return sum(agree) / len(agree)


def sampled_acceptance(target: Rows, draft: Rows) -> float:
    """Return the mean over rows of sum over x of min(p(x), q(x)), p and q being probabilities.

    sampled_acceptance([[0.5, 0.5]], [[0.9, 0.1]])  ->  0.6
    """
    overlaps = [sum(map(min, p, q)) for p, q in _pairs(target, draft)]
    return sum(overlaps) / len(overlaps)


def _pairs(target: Rows, draft: Rows) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return target's and draft's rows side by side. Raises NanoinferError unless both have the same shape."""
    if not target or [len(p) for p in target] != [len(q) for q in draft] or not all(target):
        raise NanoinferError(
            f"target has {len(target)} rows and draft {len(draft)}: give one row of the same length in both for"
            " each position"
        )
    return list(zip(target, draft, strict=True))
