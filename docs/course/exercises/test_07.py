"""Fewer bits: how much predictions change, groups with a minimum, and products of integers."""

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F


def test_divergence(exercise, draft):
    model, encode, _ = draft
    rung, attend = import_module("07_fewer_bits"), import_module("01_recompute").attend
    tokens, measured = encode(import_module("measure").PROMPTS[3]), {}
    for bits in (8, 4):
        other = rung.quantize(model, bits)
        measured[bits] = exercise.divergence(model, other, tokens)
        with torch.inference_mode():  # the same by PyTorch's function, one position after the other
            idx, pos = torch.tensor([tokens]), torch.arange(len(tokens))
            p, q = (m.lm_head(m(idx, pos, attend)[0]).double().log_softmax(-1) for m in (model, other))
            rows = [float(F.kl_div(b, a, reduction="sum", log_target=True)) for a, b in zip(p, q, strict=True)]
        assert measured[bits] == pytest.approx(sum(rows) / len(rows), rel=1e-3)
    assert exercise.divergence(model, model, tokens) == pytest.approx(0, abs=1e-9)
    assert measured[4] > 20 * measured[8]


@pytest.mark.parametrize("group", [16, 32, 64])
def test_quantize_with_minimum(exercise, group):
    generator = torch.Generator().manual_seed(group)
    w = torch.randn(24, 128, generator=generator) * torch.rand(24, 1, generator=generator) + 0.3
    w[3] = 0.25  # all equal
    codes, scale, minimum = exercise.quantize_with_minimum(w, group)
    assert (codes.dtype, codes.shape) == (torch.uint8, (24, 64))
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).unflatten(1, (-1, group))
    rounded = unpacked * scale[..., None] + minimum[..., None]
    groups = w.unflatten(1, (-1, group))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    assert torch.allclose(scale, step)
    assert torch.equal(minimum, groups.amin(-1))
    assert ((rounded - groups).abs() <= step[..., None] / 2 + 1e-6).all()
    assert unpacked[:3].amax() == 15


@pytest.mark.parametrize("bias", [True, False])
def test_multiply_codes(exercise, bias):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(512, 96, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(96, 512, generator=generator))
        if bias:
            linear.bias.copy_(torch.randn(96, generator=generator))
        quantized = import_module("07_fewer_bits").QuantizedLinear(linear, 8)
        x = torch.randn(5, 512, generator=generator) * torch.tensor([[1.0], [100.0], [1e-4], [0.0], [1.0]])
        x[4] = quantized.codes[7] * 3.0  # all products have one sign: a large sum
        y = exercise.multiply_codes(x, quantized)
        scale = x.abs().amax(1, keepdim=True).double() / 127
        rounded = (x / scale.float()).nan_to_num().round().double() * scale
        expected = rounded @ quantized.weight().double().T + (linear.bias.double() if bias else 0)
        assert not torch.equal(y, F.linear(x, quantized.weight(), linear.bias))  # x is rounded, too
    assert y.dtype == torch.float32
    largest = expected.abs().amax(1, keepdim=True)
    assert ((y - expected).abs() <= 1e-5 * largest + 1e-12).all()
