"""Pages: how many blocks sharing saves, finding blocks by their tokens, and attention that reads a table."""

from importlib import import_module

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize("num_texts, num_shared, num_own", [(1, 20, 9), (3, 20, 9), (4, 16, 1), (4, 32, 17), (5, 7, 3)])
def test_num_blocks(exercise, draft, num_texts, num_shared, num_own):
    pages, counts = import_module("05_pages"), []
    for same in (False, True):
        prompts = [[5 if same else 10 + i] * num_shared + [100 + i] * num_own for i in range(num_texts)]
        pool = pages.Pool(draft[0], 64)
        pages.prefill(draft[0], pool, prompts, [])
        counts.append(64 - len(pool.free))
    assert exercise.num_blocks(num_texts, num_shared, num_own) == tuple(counts)


def test_prefix_index(exercise):
    index = exercise.PrefixIndex()
    assert index.find(list(range(40))) == []
    index.insert(list(range(50)), [7, 3, 9, 1])  # block 1 is not full
    assert index.find(list(range(50))) == [7, 3, 9]
    assert index.find([*range(40), 0]) == [7, 3]
    assert index.find(list(range(49))) == [7, 3, 9]
    assert index.find(list(range(48))) == [7, 3]  # of the last block, the last token has to be computed
    assert index.find(list(range(16))) == []
    assert index.find([99, *range(1, 40)]) == []
    # The second block has the tokens of one that is in the index, behind other tokens: its keys and values differ.
    other = [*range(100, 116), *range(16, 32), 0]
    assert index.find(other) == []
    index.insert(other, [4, 5, 6])
    assert index.find(other) == [4, 5]
    assert index.find(list(range(33))) == [7, 3]
    # A third text was computed without the index, in blocks of its own: the first ones stay, and the fourth is new.
    index.insert(list(range(70)), [20, 21, 22, 23, 24])
    assert index.find(list(range(70))) == [7, 3, 9, 23]


@pytest.mark.parametrize("length", [1, 16, 17, 45])
def test_attend_by_blocks(exercise, length):
    generator = torch.Generator().manual_seed(length)
    pool = torch.randn(2, 8, 16, 4, 32, generator=generator)
    q, table = 3 * torch.randn(4, 32, generator=generator), [5, 0, 6][: -(-length // 16)]
    pool[:, table[-1], length - 16 * len(table) + 16 :] = torch.nan
    k, v = (x[table].flatten(0, 1)[:length].transpose(0, 1) for x in pool)  # (H, S, D)
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                largest.append(out.numel())
            return out

    with Sizes():
        y = exercise.attend_by_blocks(q, *pool, table, length)
    assert torch.allclose(y, F.scaled_dot_product_attention(q[:, None], k, v)[:, 0], atol=1e-5)
    assert max(largest) <= 16 * 4 * 32  # no copy of more than a block


def test_attention_with_large_scores_does_not_overflow(exercise):
    pool = torch.zeros(2, 2, 16, 1, 4)
    pool[0, :, :, :, 0] = torch.arange(32.0).view(2, 16, 1)
    pool[1, :, :, :, 1] = torch.arange(32.0).view(2, 16, 1)
    y = exercise.attend_by_blocks(torch.tensor([[100.0, 0, 0, 0]]), *pool, [0, 1], 32)
    assert y.tolist() == [[0, 31, 0, 0]]
