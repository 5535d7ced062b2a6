"""Rung 7, fewer bits: weights as integers of 8 or 4 bits, with a scale for each row or for 32 weights of it.

A step at batch 1 takes the time of reading the weights, so a quarter or an eighth of the bytes could be as much faster.
Could: PyTorch has no product that unpacks weights in registers, so each step writes them as floats and reads those.
What is saved here is memory. Engine `native` does the same in C++ and is faster by what it does not read.

Rounded weights give other tokens. What is checked: they are those of rung 4 with the rounded weights as floats.

Left out from here on: the pages of rung 5 and the sampling of rung 6.
"""

import copy
import importlib

import torch
from measure import main
from torch import nn
from torch.nn import functional as F

GROUP = 32  # weights of a row that share a scale, in 4 bits


class QuantizedLinear(nn.Module):
    def __init__(self, linear, bits):
        super().__init__()
        w = linear.weight if bits == 8 else linear.weight.unflatten(1, (-1, GROUP))
        scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)  # the largest is 127 or 7
        codes = (w / scale).round().to(torch.int8)
        if bits == 4:  # two in a byte, as 1 to 15
            codes = (codes[..., ::2] + 8) | (codes[..., 1::2] + 8) << 4
        self.bits, self.bias = bits, linear.bias
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def weight(self):
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack(((codes & 15) - 8, (codes >> 4 & 15) - 8), dim=-1).flatten(-2)
        return (codes * self.scale).flatten(1)

    def forward(self, x):
        return F.linear(x, self.weight(), self.bias)


@torch.inference_mode()
def quantize(model, bits):
    """Return a copy of the model whose matrices have `bits` bits; the embeddings stay floats."""
    model = copy.deepcopy(model)
    for block in model.transformer.h:
        for part, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            setattr(part, name, QuantizedLinear(getattr(part, name), bits))
    model.lm_head = QuantizedLinear(model.lm_head, bits)
    return model


def attend_with(k_cache, v_cache, pos):
    S = int(pos.max()) + 1
    rows = torch.arange(len(pos))[:, None]  # (B, 1)
    mask = torch.arange(S) <= pos[:, None, :, None]  # (B, 1, T, S): a query sees the positions up to its own

    def attend(layer, q, k, v):
        k_cache[layer, rows, :, pos] = k.transpose(1, 2)  # (B, T, H, D)
        v_cache[layer, rows, :, pos] = v.transpose(1, 2)
        k, v = k_cache[layer, :, :, :S], v_cache[layer, :, :, :S]  # (B, H, S, D), no copy
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps, bits=32):
    model = quantize(model, bits) if bits < 32 else model
    B, lengths = len(prompts), torch.tensor([len(prompt) for prompt in prompts])
    assert lengths.max() + max_new_tokens <= model.block_size, f"more than the context, {model.block_size} tokens"
    shape = (model.n_layer, B, model.n_head, model.block_size, model.n_embd // model.n_head)
    k_cache, v_cache = torch.zeros(shape), torch.zeros(shape)
    idx = torch.zeros(B, int(lengths.max()), dtype=torch.long)
    for row, prompt in zip(idx, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    pos = torch.arange(idx.size(1)).expand(B, -1)
    last = lengths - 1  # the last token of each text among the new ones
    outputs = []
    for _ in range(max_new_tokens):
        x = model(idx, pos, attend_with(k_cache, v_cache, pos))
        logits = model.lm_head(x[torch.arange(B), last])
        idx = logits.argmax(-1, keepdim=True)  # (B, 1): from now on no padding is computed, but it is read
        outputs.append(idx)
        steps.append((B, pos.size(1), B * (int(pos.max()) + 1), model))
        pos, last = lengths[:, None] + len(outputs) - 1, 0
    return torch.cat(outputs, dim=1).tolist()


def also(model, prompts):
    for bits in (8, 4):
        floats = copy.deepcopy(model)
        for name, module in quantize(model, bits).named_modules():
            if isinstance(module, QuantizedLinear):
                floats.get_submodule(name).weight = nn.Parameter(module.weight())
        expected = importlib.import_module("04_batch").generate(floats, prompts, 32, [])
        assert generate(model, prompts, 32, [], bits) == expected, f"{bits} bits"


if __name__ == "__main__":
    main(generate, __file__, option=("bits", 8, "of a weight: 8, 4, or 32 for none"), also=also)
