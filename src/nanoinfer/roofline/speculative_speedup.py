"""Expected speed-up of speculative decoding, and the best number of proposed tokens k (docs/inference-math.md, part 8).

A round proposes k tokens with a draft, and the target verifies them in one step. The acceptance rate a is the
probability that a proposal is accepted, given that those before it were; it is assumed constant. Without the bonus
token, a round in which all are accepted has k tokens; with it (Leviathan et al. 2023, equation 1; Chen et al. 2023,
algorithm 2), k + 1:

    E = 1 + a + ... + a^(k-1)       or, with the bonus token,       E = 1 + a + ... + a^k

Let c be the time of a draft step and v that of the verifying step, in steps of the target:

    speed-up(k) = E / (k c + v)                                 (Leviathan et al., theorem 3.8, has v = 1)
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
