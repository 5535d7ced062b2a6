"""Expected speed-up of speculative decoding, and the best number of proposed tokens k.

In a round, the draft model proposes k tokens one by one, the target verifies them in one step, and the longest accepted
prefix is kept. The acceptance rate a is the probability that a proposal is accepted, given that all proposals before it
were accepted; it is assumed constant and independent of the other proposals.

Without the bonus token: if i < k proposals are accepted, the target's token replaces the first rejected proposal, and
the round has i + 1 tokens. If all k are accepted, the round has k tokens. The target computes k positions. Token
j = 1..k of the round exists if the j - 1 proposals before it were accepted, with probability a^(j-1), so

    E = 1 + a + ... + a^(k-1) = (1 - a^k) / (1 - a)                             1 <= E <= k

With the bonus token (Leviathan et al. 2023, equation 1; Chen et al. 2023, algorithm 2), the target computes k + 1
positions; if all k proposals are accepted, it samples one more token from the last position:

    E = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)                             1 <= E <= k + 1

At a = 1, E is the number of terms. Let c = time of a draft step / time of a target step, and v = time of the verifying
step / time of a target step. A round takes k c + v target steps, and plain decoding takes E:

    speed-up(k) = E / (k c + v)                                 (Leviathan et al., theorem 3.8, has v = 1)

The formulas hold for greedy decoding and for sampling; only a differs. Greedy (temperature 0): a proposal is accepted
if it is the target's most likely token, and a is the rate of agreement. Sampling: a proposal x is accepted with
probability min(1, p(x) / q(x)), with p the target's and q the draft's distribution; a rejected proposal is replaced by
a sample from max(p - q, 0), normalized; then a = sum over x of min(p(x), q(x)). Greedy output is token-identical to the
target's, and sampled output has the target's distribution.

Covered: one draft model, a chain of proposals, a constant a. Not covered: trees of proposals, an acceptance rate that
depends on the position, and the second token that the draft must process after a round in which all were accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.utils.checks import require_float, require_int

MAX_SPECULATE_K = 64


@dataclass(frozen=True)
class Speculation:
    """A number of proposed tokens and its expected speed-up."""

    speculate_k: int
    """Tokens proposed per round; 0: plain decoding, because no k is faster."""
    tokens_per_round: float
    """Expected tokens per round."""
    speedup: float
    """Speed-up over plain decoding."""


def expected_tokens(acceptance: float, speculate_k: int, *, bonus: bool = True) -> float:
    """Return the expected tokens per round with `speculate_k` proposals; 1 for plain decoding (0 proposals).

    expected_tokens(0.5, 2)  ->  1.75      expected_tokens(0.5, 2, bonus=False)  ->  1.5

    Raises:
        NanoinferError: acceptance is not in [0, 1], or speculate_k is negative.
    """
    require_float("acceptance", acceptance, 0.0, 1.0)
    require_int("speculate_k", speculate_k, 0, 1 << 16)
    # a sum, because (1 - a^n) / (1 - a) loses precision near a = 1
    return float(sum(acceptance**j for j in range(verified_tokens(speculate_k, bonus=bonus))))


def verified_tokens(speculate_k: int, *, bonus: bool = True) -> int:
    """Return the number of tokens by which the target extends a sequence to verify `speculate_k` proposals.

    They are the newest token and all proposals; without the bonus token, the last proposal is not needed.
    """
    return speculate_k + 1 if bonus or speculate_k == 0 else speculate_k


def speedup(
    acceptance: float, speculate_k: int, draft_cost: float, verify_cost: float = 1.0, *, bonus: bool = True
) -> float:
    """Return the speed-up over plain decoding; less than 1 is slower.

    Args:
        acceptance: acceptance rate, in [0, 1].
        speculate_k: proposals per round; 0 is plain decoding with a speed-up of 1.
        draft_cost: time of a draft step over time of a target step, >= 0.
        verify_cost: time of the verifying step over time of a target step, > 0.
        bonus: whether a round whose proposals are all accepted has one more token.

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
    """Return the smallest number of proposals with the largest speed-up; 0 if no speed-up exceeds 1.

    Args:
        acceptance: acceptance rate, in [0, 1].
        draft_cost: time of a draft step over time of a target step.
        verify_cost: number of verified tokens -> time of that step over time of a target step.
        bonus: whether a round whose proposals are all accepted has one more token.
        max_k: maximum number of proposals.
    """
    best = Speculation(0, 1.0, 1.0)
    for k in range(1, max_k + 1):
        gain = speedup(acceptance, k, draft_cost, verify_cost(verified_tokens(k, bonus=bonus)), bonus=bonus)
        if gain > best.speedup * (1 + 1e-12):  # rounding must not make a larger k win a tie
            best = Speculation(k, expected_tokens(acceptance, k, bonus=bonus), gain)
    return best
