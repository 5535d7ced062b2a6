"""Solutions of the exercises of lesson 6."""

from importlib import import_module

import torch

sampling = import_module("06_sampling")


def probabilities(logits, temperature, top_k, top_p):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    scaled = logits.double() / temperature
    kept = sampling.kept_by_sort(scaled, top_k, top_p)
    return scaled.masked_fill(~kept, -torch.inf).softmax(-1)


def kth_largest(logits, k):
    bits = logits.view(torch.int32).long()
    keys = torch.where(bits < 0, -(2**31) - bits - 1, bits) + 2**31
    prefix = 0
    for shift in (24, 16, 8, 0):
        digits = keys >> shift & 255
        counts = torch.bincount(digits, minlength=256).flip(0).cumsum(0)  # from the largest digit on
        from_top = int((counts < k).sum())
        k -= int(counts[from_top - 1]) if from_top else 0
        digit = 255 - from_top
        keys, prefix = keys[digits == digit], prefix << 8 | digit
    bits = prefix - 2**31
    return float(torch.tensor(-(2**31) - bits - 1 if bits < 0 else bits, dtype=torch.int32).view(torch.float32))


def sample_by_gumbel(logits, position, temperature, seed):
    V = len(logits)
    u = torch.tensor([sampling.uniform(seed, position * V + t) for t in range(V)], dtype=torch.float64)
    return int((logits.double() / temperature - (-u.log()).log()).argmax())
