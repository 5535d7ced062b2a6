"""The loop: how much it computes, all rows of logits of one call, and where a text ends."""

from importlib import import_module

import pytest
import torch


@pytest.mark.parametrize("prompt_len, num_new", [(1, 1), (3, 5), (510, 6), (600, 2)])
def test_num_computed(exercise, draft, prompt_len, num_new):
    model, steps = draft[0], []
    import_module("01_recompute").generate(model, [[5] * prompt_len], num_new, steps)
    assert exercise.num_computed(prompt_len, num_new, model.block_size) == sum(T for _, T, _ in steps)


def test_score(exercise, draft):
    model, encode, _ = draft
    tokens = encode("O Romeo, Romeo! wherefore art thou Romeo?")
    attend, expected = import_module("01_recompute").attend, []
    with torch.inference_mode():
        for t in range(1, len(tokens)):  # one token after the other
            x = model(torch.tensor([tokens[:t]]), torch.arange(t), attend)
            expected.append(float(model.lm_head(x[0, -1]).log_softmax(-1)[tokens[t]]))
    calls = []

    class Counted:
        lm_head = model.lm_head

        def __call__(self, *args):
            calls.append(args)
            return model(*args)

    assert exercise.score(Counted(), tokens) == pytest.approx(expected, abs=1e-4)
    assert len(calls) == 1


@pytest.mark.parametrize("first, length", [(0, 1), (4, 1), (7, 2), (5, 3)])
def test_generate_until(exercise, draft, first, length):
    model, encode, _ = draft
    prompt = encode("O Romeo,")
    (full,) = import_module("01_recompute").generate(model, [prompt], 16, [])
    stop = full[first : first + length]
    at = next(i for i in range(16) if full[i : i + length] == stop)
    assert exercise.generate_until(model, prompt, 16, stop) == (full[:at], at + length)
    before = max(1, at + length - 1)  # one token less than the stop sequence needs
    if before < at + length:
        assert exercise.generate_until(model, prompt, before, stop) == (full[:before], before)


def test_a_stop_sequence_that_begins_in_the_prompt_does_not_count(exercise, draft):
    model, encode, _ = draft
    prompt = encode("O Romeo,")
    (full,) = import_module("01_recompute").generate(model, [prompt], 4, [])
    assert exercise.generate_until(model, prompt, 4, [prompt[-1], full[0]]) == (full, 4)
