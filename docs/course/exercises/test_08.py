"""Speculation: tokens do not depend on proposals, the best k, and rejection sampling."""

from importlib import import_module

import pytest
import torch

PROMPTS = ["O Romeo,", "To be, or not to be, that is"]


@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("proposer", ["none", "wrong", "right", "two right", "longer than what is left"])
def test_generate(exercise, text, proposer):
    model, encode, _ = import_module("model").load("shakespeare-draft")
    prompt = encode(text)
    (expected,) = import_module("02_kv_cache").generate(model, [prompt], 12, [])
    right = prompt + expected + [0] * 20

    def propose(tokens):
        n = len(tokens)
        return {
            "none": [],
            "wrong": [(token + 1) % 256 for token in right[n : n + 3]],
            "right": right[n : n + 3],
            "two right": [*right[n : n + 2], (right[n + 2] + 1) % 256, right[n + 3]],  # the fourth must not count
            "longer than what is left": right[n : n + 9],
        }[proposer]

    # 12 tokens: 1 of the prompt's step, then 1, 1, 4, 3 and 10 of each other step.
    num_steps = {"none": 12, "wrong": 12, "right": 4, "two right": 5, "longer than what is left": 3}[proposer]
    assert exercise.generate(model, prompt, 12, propose) == (expected, num_steps)


def test_speed_up(exercise):
    assert exercise.speed_up(0.8, 0, 0.1) == pytest.approx(1)
    assert exercise.speed_up(0.5, 1, 0.25) == pytest.approx(1.2)  # 1.5 tokens in 1.25 steps
    assert exercise.speed_up(0.9, 4, 0.1) == pytest.approx((1 - 0.9**5) / 0.1 / 1.4)
    assert exercise.speed_up(0.0, 4, 0.5) == pytest.approx(1 / 3)  # slower than without a draft
    assert max(range(20), key=lambda k: exercise.speed_up(0.8, k, 0.1)) == 6


def test_verify_sampled(exercise):
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    assert exercise.verify_sampled(p, q, 3, 0.999, 0.0) == 3  # p > q: always accepted
    assert exercise.verify_sampled(p, q, 0, 0.24, 0.0) == 0
    assert exercise.verify_sampled(p, q, 0, 0.26, 0.24) == 2  # max(p - q, 0) is 0, 0, 0.1, 0.3
    assert exercise.verify_sampled(p, q, 0, 0.26, 0.26) == 3
    kept, n = torch.zeros(4).double(), 40
    for proposal in range(4):
        for u in range(n):
            for v in range(n):
                kept[exercise.verify_sampled(p, q, proposal, (u + 0.5) / n, (v + 0.5) / n)] += q[proposal] / n**2
    assert kept.tolist() == pytest.approx(p.tolist(), abs=0.01)
