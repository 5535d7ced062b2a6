"""Solutions of the exercises of lesson 7."""

from importlib import import_module

import torch

attend = import_module("01_recompute").attend


@torch.inference_mode()
def divergence(model, other, tokens):
    idx, pos = torch.tensor([tokens]), torch.arange(len(tokens))
    p, q = (m.lm_head(m(idx, pos, attend)[0]).double().log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def quantize_with_minimum(w, group):
    groups = w.unflatten(1, (-1, group))
    minimum = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - minimum) / 15
    codes = ((groups - minimum) / scale.clamp(min=1e-12)).round().to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale[..., 0], minimum[..., 0]


@torch.inference_mode()
def multiply_codes(x, linear):
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    codes = (x / scale).round().to(torch.int8)
    sums = codes.int() @ linear.codes.int().T
    y = sums * scale * linear.scale[:, 0]
    return y if linear.bias is None else y + linear.bias
