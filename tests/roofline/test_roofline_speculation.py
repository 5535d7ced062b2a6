"""Expected tokens and speed-ups of speculative decoding against simulation and published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.errors import refuses
from nanoinfer.roofline.predict import best_speculation, expected_tokens, speedup

P = np.array([0.45, 0.25, 0.2, 0.1])  # target
Q = np.array([0.2, 0.3, 0.1, 0.4])  # draft


def simulate(rng: np.random.Generator, num_rounds: int, k: int, bonus: bool) -> tuple[np.ndarray, np.ndarray]:
    """Speculative sampling itself: return the length of each round, and the first token of each."""
    lengths = np.zeros(num_rounds, dtype=int)
    first = np.zeros(num_rounds, dtype=int)
    residual = np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum()
    for i in range(num_rounds):
        tokens: list[int] = []
        for _ in range(k):
            x = rng.choice(4, p=Q)
            if rng.random() >= P[x] / Q[x]:
                tokens.append(rng.choice(4, p=residual))
                break
            tokens.append(x)
        else:
            if bonus:
                tokens.append(rng.choice(4, p=P))
        lengths[i], first[i] = len(tokens), tokens[0]
    return lengths, first


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_expected_tokens_are_what_speculative_sampling_gives(k: int, bonus: bool) -> None:
    acceptance = float(np.minimum(P, Q).sum())
    assert acceptance == pytest.approx(0.65)
    lengths, first = simulate(np.random.default_rng(k), 6000, k, bonus)
    assert lengths.mean() == pytest.approx(
        expected_tokens(acceptance, k, bonus=bonus), abs=4.5 * lengths.std() / math.sqrt(len(lengths)) + 1e-9
    )
    share = np.bincount(first, minlength=4) / len(first)
    assert np.abs(share - P).max() < 4.5 * math.sqrt(0.25 / len(first))  # the target's distribution, unchanged


@pytest.mark.parametrize("bonus", [True, False])
def test_greedy_speculation_has_the_same_formula(bonus: bool) -> None:
    """Two random scorers; a round ends at the first disagreement of their most likely tokens."""
    rng, k = np.random.default_rng(0), 4
    target = rng.random((40_000, 5))
    draft = target + 0.2 * rng.standard_normal(target.shape)
    agree = target.argmax(1) == draft.argmax(1)
    rounds = agree.reshape(-1, k)
    accepted = rounds.cumprod(1).sum(1)
    lengths = accepted + 1 if bonus else np.minimum(accepted + 1, k)
    spread = 4.5 * lengths.std() / math.sqrt(len(lengths))
    assert lengths.mean() == pytest.approx(expected_tokens(agree.mean(), k, bonus=bonus), abs=spread)


def test_leviathan_et_al_table() -> None:
    """Table 1 of Leviathan et al. 2023: speed with a draft that costs nothing, by acceptance and gamma."""
    for acceptance, k, published in (
        (0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86),
    ):  # fmt: skip
        assert speedup(acceptance, k, 0.0) == pytest.approx(published, abs=0.005)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 40), st.booleans(), st.floats(0, 2))
@settings(deadline=None)
def test_speculation_is_monotone(a: float, b: float, k: int, bonus: bool, c: float) -> None:
    low, high = sorted((a, b))
    tokens = expected_tokens(low, k, bonus=bonus)
    assert 1 <= tokens <= expected_tokens(high, k, bonus=bonus) <= k + 1
    assert tokens <= expected_tokens(low, k + 1, bonus=bonus)
    assert expected_tokens(low, k, bonus=False) <= expected_tokens(low, k, bonus=True)
    assert speedup(low, k, c, bonus=bonus) <= speedup(high, k, c, bonus=bonus)
    assert speedup(low, k, c + 0.1, bonus=bonus) <= speedup(low, k, c, bonus=bonus)


@given(st.floats(0, 1), st.floats(0.001, 2), st.booleans(), st.floats(0, 0.2))
@settings(max_examples=40, deadline=None)
def test_best_k_is_the_best_of_all(a: float, c: float, bonus: bool, slope: float) -> None:
    def verify(m: int) -> float:
        return 1 + slope * (m - 1)

    best = best_speculation(a, c, verify, bonus=bonus, max_k=20)
    gains = [speedup(a, k, c, verify(k + bonus), bonus=bonus) for k in range(1, 21)]
    assert best.speedup == pytest.approx(max(1.0, *gains))
    if best.speculate_k:
        assert gains[best.speculate_k - 1] == best.speedup > 1
        assert best.tokens_per_round == expected_tokens(a, best.speculate_k, bonus=bonus)
    else:
        assert (best.tokens_per_round, best.speedup) == (1, 1)


def test_speculation_at_its_ends() -> None:
    assert best_speculation(0.0, 0.1).speculate_k == 0
    assert best_speculation(1.0, 1.0).speculate_k == 0  # a draft as dear as the target
    assert best_speculation(1.0, 0.01, max_k=7).speculate_k == 7
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(1.0, 5, bonus=False) == 5
    assert expected_tokens(0.3, 0) == expected_tokens(0.3, 0, bonus=False) == 1
    for bad in (math.nan, -0.1, 1.1, math.inf):
        refuses(lambda bad=bad: expected_tokens(bad, 3), "acceptance=")  # type: ignore[misc]
    refuses(lambda: expected_tokens(0.5, -1), "speculate_k=-1")
    refuses(lambda: speedup(0.5, 1, math.nan), "draft_cost=nan")
    refuses(lambda: speedup(0.5, 1, 0.1, 0.0), "verify_cost=0.0")
