"""Batches: how much is padding, padding on the left, and texts that leave a batch."""

from importlib import import_module

import pytest
import torch


@pytest.fixture(scope="module")
def texts(draft):
    """(model, prompts of unequal lengths, their continuations by rung 1)."""
    model, encode, _ = draft
    prompts = [encode(text) for text in import_module("measure").PROMPTS]
    return model, prompts, import_module("01_recompute").generate(model, prompts, 24, [])


@pytest.mark.parametrize("lengths, batch_size", [([3, 26, 10, 31], 4), ([3, 26, 10, 31, 4], 2), ([7, 7, 7], 2)])
def test_num_computed(exercise, draft, lengths, batch_size):
    def measured(lengths):
        steps = []
        for i in range(0, len(lengths), batch_size):
            import_module("04_batch").generate(draft[0], [[5] * n for n in lengths[i : i + batch_size]], 1, steps)
        return sum(B * T for B, T, _ in steps)

    assert exercise.num_computed(lengths, batch_size, False) == measured(lengths)
    assert exercise.num_computed(lengths, batch_size, True) == measured(sorted(lengths))


def test_generate_left(exercise, texts):
    model, prompts, expected = texts
    calls = []

    class Checked:
        def __getattr__(self, name):
            return getattr(model, name)

        def __call__(self, idx, pos, attend):
            calls.append(idx.shape)
            x = model(idx, pos, attend)
            assert x.isfinite().all()
            return x

    assert exercise.generate_left(Checked(), prompts, 24) == expected
    assert calls == [(4, 31)] + [(4, 1)] * 23
    assert exercise.generate_left(model, prompts[1:2], 24) == expected[1:2]


@pytest.mark.parametrize("at", [0, 3, 9])
def test_generate_until(exercise, texts, at):
    model, prompts, full = texts
    stop = full[2][at]
    ends = [output.index(stop) if stop in output else 24 for output in full]
    outputs, num_rows = exercise.generate_until(model, prompts, 24, stop)
    assert outputs == [output[:end] for output, end in zip(full, ends, strict=True)]
    assert num_rows == [n for step in range(24) if (n := sum(end >= step for end in ends))]


def test_rows_that_end_do_not_mix_up_the_others(exercise, texts):
    model, prompts, full = texts
    rows = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    outputs, _ = exercise.generate_until(model, [prompts[i] for i in rows], 24, full[0][1])
    ends = [full[i].index(full[0][1]) if full[0][1] in full[i] else 24 for i in rows]
    assert outputs == [full[i][:end] for i, end in zip(rows, ends, strict=True)]
    assert len(set(ends)) > 1
