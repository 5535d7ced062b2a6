"""Recurrent states: taking a token out, the cost of a cut, chunks of tokens."""

import math
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def after(S, k, v, d, b):
    S = math.exp(d) * S
    return S + b * torch.outer(k, v - S.T @ k)


@pytest.mark.parametrize(("d", "b"), [(0.0, 0.0), (-0.5, 0.9), (-5.0, 0.5)])
def test_undo(exercise, d, b):
    S, k, v = random(8, 6), F.normalize(random(8, seed=1), dim=0), random(6, seed=2)
    torch.testing.assert_close(exercise.undo(after(S, k, v, d, b), k, v, d, b), S)


def test_undo_what_was_erased(exercise):
    S, k, v = random(8, 6), F.normalize(random(8, seed=1), dim=0), random(6, seed=2)
    with pytest.raises(ValueError):
        exercise.undo(after(S, k, v, -0.1, 1.0), k, v, -0.1, 1.0)
    # With b near 1, float32 has lost it, too.
    near = [x.float() for x in (after(S, k, v, -0.1, 1 - 1e-6), k, v)]
    assert (exercise.undo(*near, -0.1, 1 - 1e-6) - S).abs().max() > 0.01


def test_num_computed_again(exercise):
    assert exercise.num_computed_again([0, 16, 32], 40, 5, 45) == 0
    assert exercise.num_computed_again([0, 16, 32], 40, 5, 40) == 0  # pending inputs are dropped
    assert exercise.num_computed_again([32, 16, 0], 40, 5, 39) == 7
    assert exercise.num_computed_again([0, 16, 32], 40, 5, 16) == 0
    assert exercise.num_computed_again([], 40, 5, 30) == 30
    rung = import_module("11_recurrent_state")
    toy = Path(rung.__file__).parent / "toy"
    model, (encode, _) = rung.Toy(toy), import_module("model").tokenizer(toy)
    tokens = encode("Bus A4 leaves at noon, B1 at two; C2.?")
    for length in (7, 20, 33, len(tokens)):
        text, steps = rung.Text(model), []
        with torch.inference_mode():
            for start in range(0, len(tokens), 16):
                text.extend(tokens[start : start + 16], [])
            kept, base, pending = [*text.kept], text.base, len(text.pending[0])
            text.truncate(length)
            text.extend(encode("?"), steps)
        assert exercise.num_computed_again(kept, base, pending, length) == steps[0][1] - 1


@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_chunk(exercise, scale):
    S, q, k, v, d = (
        random(8, 6),
        random(30, 8, seed=1),
        random(30, 8, seed=2),
        random(30, 6, seed=3),
        random(30, seed=4),
    )
    d, outputs, state = -scale * d.abs(), [], S
    for t in range(30):
        state = math.exp(d[t]) * state + torch.outer(k[t], v[t])
        outputs.append(state.T @ q[t])
    y, last = exercise.chunk(S, q, k, v, d)
    torch.testing.assert_close(y, torch.stack(outputs))
    torch.testing.assert_close(last, state)
