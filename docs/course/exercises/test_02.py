"""The cache: its bytes, new tokens behind cached ones, and a prompt that is computed once for several texts."""

from importlib import import_module

import pytest
import torch


@pytest.mark.parametrize("name, batch", [("shakespeare", 1), ("shakespeare", 8), ("shakespeare-draft", 1)])
def test_num_tokens_of_equal_bytes(exercise, name, batch):
    model = import_module("model").load(name)[0]
    S = exercise.num_tokens_of_equal_bytes(model, batch)
    weights, cache = import_module("measure").weight_bytes(model), 2 * model.n_layer * model.n_embd * 4
    assert batch * cache * (S - 1) <= weights < batch * cache * S


@pytest.mark.parametrize("sizes", [[26], [1] * 26, [5, 7, 14], [20, 1, 5]], ids=str)
@torch.inference_mode()
def test_attend_with(exercise, draft, sizes):
    model, encode, _ = draft
    tokens = encode(import_module("measure").PROMPTS[1])
    expected = model(torch.tensor([tokens]), torch.arange(26), import_module("01_recompute").attend)
    cache, start, hidden = [None] * model.n_layer, 0, []
    for n in sizes:
        new = torch.tensor([tokens[start : start + n]])
        hidden.append(model(new, torch.arange(start, start + n), exercise.attend_with(cache)))
        start += n
    assert cache[0][0].shape[2] == 26
    assert torch.allclose(torch.cat(hidden, dim=1), expected, atol=1e-4)


def test_endings(exercise, draft):
    model, encode, _ = draft
    prompt = encode("First Citizen: Before we proceed any further, hear me speak.")
    others = [encode(text) for text in (" All: Speak", " I", " O Romeo, Romeo!")]
    computed = []

    class Counted:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, idx, pos, attend):
            computed.append(idx.numel())
            return model(idx, pos, attend)

    outputs = exercise.endings(Counted(), prompt, others, 8)
    assert outputs == import_module("01_recompute").generate(model, [prompt + other for other in others], 8, [])
    assert sum(computed) == len(prompt) + sum(len(other) + 7 for other in others)
