"""Sampling: the distribution behind the filters, a threshold in four passes, and a sample without a sum."""

from importlib import import_module

import pytest
import torch

OPTIONS = [(0.8, 50, 0.95), (1.0, 0, 1.0), (1.5, 3, 1.0), (0.5, 0, 0.6), (0.0, 5, 0.5)]


@pytest.mark.parametrize("temperature, top_k, top_p", OPTIONS)
def test_probabilities(exercise, temperature, top_k, top_p, monkeypatch):
    rung, n = import_module("06_sampling"), 500
    logits = 2 * torch.randn(64, generator=torch.Generator().manual_seed(3))
    logits[5] = logits[9] = logits.max() - 0.5  # equal logits
    counts = torch.zeros(64, dtype=torch.float64)
    monkeypatch.setattr(rung, "uniform", lambda seed, position: (position + 0.5) / n)  # all random numbers, evenly
    for position in range(n):
        counts[rung.sample(logits, position, temperature, top_k, top_p, kept=rung.kept_by_sort)] += 1
    probs = exercise.probabilities(logits, temperature, top_k, top_p)
    assert float(probs.sum()) == pytest.approx(1)
    assert not counts[probs == 0].any()
    assert float((probs - counts / n).abs().max()) <= 1 / n


@pytest.mark.parametrize("k", [1, 2, 50, 999, 1000])
def test_kth_largest(exercise, k):
    logits = 5 * torch.randn(1000, generator=torch.Generator().manual_seed(k))
    logits[::7] = logits[3]  # 143 equal ones
    for row in (logits, logits.abs(), -logits.abs(), logits * 1e-39, torch.zeros(1000) + logits[0]):
        assert exercise.kth_largest(row, k) == float(row.sort(descending=True).values[k - 1])


def test_kth_largest_of_few_and_of_zeros(exercise):
    assert exercise.kth_largest(torch.tensor([2.5]), 1) == 2.5
    row = torch.tensor([0.0, -0.0, -torch.inf, torch.inf, 1e-45])
    assert [str(exercise.kth_largest(row, k)) for k in range(1, 6)] == [
        "inf",
        "1.401298464324817e-45",
        "0.0",
        "-0.0",
        "-inf",
    ]


def test_sample_by_gumbel(exercise):
    logits, n, temperature = torch.tensor([0.0, 1.0, -torch.inf, 2.0, 0.5, -1.0]), 1000, 0.7
    counts = torch.zeros(6, dtype=torch.float64)
    for position in range(n):
        counts[exercise.sample_by_gumbel(logits, position, temperature, 7)] += 1
    expected = n * (logits.double() / temperature).softmax(-1)
    assert counts[2] == 0
    some = expected > 0
    chi_square = float(((counts - expected)[some] ** 2 / expected[some]).sum())
    assert chi_square < 18.5  # of 4 degrees of freedom: exceeded with probability 0.001
    again = [exercise.sample_by_gumbel(logits, position, temperature, 7) for position in range(20)]
    assert again == [exercise.sample_by_gumbel(logits, position, temperature, 7) for position in range(20)]


def test_sample_by_gumbel_with_a_random_number_of_0(exercise, monkeypatch):
    rung = import_module("06_sampling")
    monkeypatch.setattr(rung, "uniform", lambda seed, position: [0.0, 0.5, 0.0, 0.1][position % 4])
    assert exercise.sample_by_gumbel(torch.tensor([9.0, 0.0, 9.0, 0.0]), 3, 1.0, 0) == 1
