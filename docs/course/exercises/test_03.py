"""Writing in place: bytes, a cache that doubles, and a ring of the last tokens."""

from importlib import import_module

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Written(TorchDispatchMode):
    """Sums the bytes that concatenation, copies and assignment write to tensors of four dimensions."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("cat", "copy_", "clone") and out.dim() == 4:
            self.num_bytes += out.nbytes
        return out


@pytest.mark.parametrize("prompt_len, num_new", [(3, 1), (3, 12), (40, 5)])
def test_num_bytes_written(exercise, draft, prompt_len, num_new):
    model, measured = draft[0], []
    for module in ("02_kv_cache", "03_static_cache"):
        with Written() as written:
            import_module(module).generate(model, [[5] * prompt_len], num_new, [])
        measured.append(written.num_bytes)
    assert exercise.num_bytes_written(model.n_layer, model.n_embd, prompt_len, num_new) == tuple(measured)


@pytest.mark.parametrize("sizes", [[3, *[1] * 60], [16, 1, 15, 1], [100, 1, 30]], ids=str)
def test_growing_cache(exercise, sizes):
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(2, 1, 4, n, 8, generator=generator) for n in sizes]
    cache, addresses = exercise.GrowingCache(), set()
    with Written() as written:
        for k, v in new:
            keys, values = cache.append(k, v)
            addresses.add(keys.data_ptr())
    assert torch.equal(torch.stack((keys, values)), torch.cat(new, dim=3))
    num_tokens, bytes_of_token, capacity = sum(sizes), 2 * 4 * 8 * 4, 16
    while capacity < num_tokens:
        capacity *= 2
    assert keys.untyped_storage().nbytes() == capacity * bytes_of_token // 2
    assert len(addresses) <= (capacity // 16).bit_length()
    assert written.num_bytes <= (num_tokens + capacity) * bytes_of_token  # all once, and copies: 16 + 32 + ...


@pytest.mark.parametrize("window", [1, 4, 15, 64])
def test_generate_in_window(exercise, draft, window, monkeypatch):
    model, encode, _ = draft
    prompt = encode("First Citizen: Before we proceed any further")
    tokens, num_keys = list(prompt), [0]

    def attend(layer, q, k, v):
        distance = torch.arange(q.size(2))[:, None] - torch.arange(q.size(2))
        mask = (distance >= 0) & (distance < window)
        return plain(q, k, v, attn_mask=mask)

    def counted(q, k, v, **options):
        num_keys.append(k.size(2))
        return plain(q, k, v, **options)

    plain = F.scaled_dot_product_attention
    with torch.inference_mode():
        for _ in range(20):  # the loop of rung 1 with a mask of the window
            x = model(torch.tensor([tokens]), torch.arange(len(tokens)), attend)
            tokens.append(int(model.lm_head(x[0, -1]).argmax()))
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    assert exercise.generate_in_window(model, prompt, 20, window) == tokens[len(prompt) :]
    assert max(num_keys) <= window
