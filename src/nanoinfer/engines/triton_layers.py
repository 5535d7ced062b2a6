"""The layers of a model as the kernels of engine `triton` take them: parameters of norms, how scores are computed.

`describe` reads it off a model once; triton_engine.py then launches the same kernels for every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.kernels.triton.attention import Scores
from nanoinfer.kernels.triton.epilogue import GELU_ERF, GELU_TANH, RELU, RELU2, SILU
from nanoinfer.kernels.triton.rows import Norm
from nanoinfer.models.gpt import GPT, Attention, Block, LayerNorm
from nanoinfer.models.layers import GatedMLP, RMSNorm

ACTIVATIONS = {"gelu_new": GELU_TANH, "gelu": GELU_ERF, "silu": SILU, "relu": RELU, "relu2": RELU2}


@dataclass(frozen=True)
class Layer:
    """One layer. A norm is None where the layer has none."""

    block: Block
    ln_1: Norm | None
    attn_sub: Norm | None
    """Of attention's output, in front of c_proj."""
    post_1: Norm | None
    ln_2: Norm | None
    """In front of the MLP; ln_1 if attention and MLP share it."""
    mlp_sub: Norm | None
    """Of the MLP's hidden layer."""
    post_2: Norm | None
    heads: Norm | None
    """Of each head of queries and keys: weight and bias are (2, D)."""
    scores: Scores
    rotary: Rotary | None
    mlp: int | None
    """Index of the MLP among the dense ones; None of a mixture of experts, which is PyTorch's module."""
    stores: bool
    """Whether the qkv product stores k and v itself: nothing happens to them before, and as many heads as queries."""


def describe(model: GPT) -> list[Layer]:
    """Return the layers of a model."""
    kinds = [model.config.layer(i) for i in range(model.config.n_layer)]
    before = [0, *accumulate(int(not kind.experts) for kind in kinds)]
    mlps = [None if kind.experts else num for kind, num in zip(kinds, before, strict=False)]
    return [_layer(model.config, *of) for of in zip(kinds, model.blocks, mlps, strict=True)]


def _layer(config: ModelConfig, kind: LayerKind, block: Block, mlp: int | None) -> Layer:
    ones = block.attn.c_proj.weight.new_ones(config.n_embd)
    ln_1, post_1, ln_2, post_2 = (norm_of(m, ones) for m in (block.ln_1, block.post_1, block.ln_2, block.post_2))
    return Layer(
        block=block,
        ln_1=ln_1,
        attn_sub=norm_of(cast(Attention, block.attn).sub_norm, ones.new_ones(config.attn_dim)),
        post_1=post_1,
        ln_2=ln_1 if block.shared else ln_2,
        mlp_sub=norm_of(cast(GatedMLP, block.mlp).sub_norm, ones.new_ones(config.mlp_dim))
        if config.sub_norms
        else None,
        post_2=post_2,
        heads=_norm_of_heads(block, ones.new_ones(config.head_dim)) if config.qk_norm == "head" else None,
        scores=Scores(config.attention_scale, config.attention_softcap, kind.window, block.attn.sinks),
        rotary=kind.rotary,
        mlp=mlp,
        stores=config.qk_norm == "none" and kind.rotary is None and config.n_kv_head == config.n_head,
    )


def _norm_of_heads(block: Block, ones: Tensor) -> Norm:
    """Return the norms of queries and of keys, stacked."""
    attn = cast(Attention, block.attn)
    q, k = (cast(Norm, norm_of(module, ones)) for module in (attn.q_norm, attn.k_norm))
    bias = None if q.bias is None else torch.stack((q.bias, cast(Tensor, k.bias)))
    return Norm(torch.stack((q.weight, k.weight)), bias, q.eps, q.rms)


def norm_of(module: nn.Module, ones: Tensor, scale: float | None = None) -> Norm | None:
    """Return a norm's parameters in the form that the kernels take, or None of an identity.

    Args:
        module: the norm.
        ones: weight of a norm that has none.
        scale: factor of its results, which becomes a part of the parameters; None: 1.
    """
    if isinstance(module, nn.Identity):
        return None
    assert isinstance(module, (LayerNorm, RMSNorm))
    weight, bias = ones if module.weight is None else module.weight, getattr(module, "bias", None)
    if module.weight is not None and module.offset:
        weight = weight.float() + module.offset  # more bits than the weight's dtype has
    if scale is not None:
        weight = weight.float() * scale
        bias = None if bias is None else bias.float() * scale
    return Norm(weight, bias, module.eps, isinstance(module, RMSNorm))
