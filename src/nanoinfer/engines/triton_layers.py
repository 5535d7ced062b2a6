"""The layers of a model as the kernels of engine `triton` take them: weights, parameters of norms and of scores.

`describe` reads it off a model once; triton_engine.py then launches the same kernels for every family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.kernels.triton.attention import Scores
from nanoinfer.kernels.triton.epilogue import GELU_ERF, GELU_TANH, RELU, RELU2, SILU
from nanoinfer.kernels.triton.quantize import Weight
from nanoinfer.kernels.triton.rows import Norm
from nanoinfer.models.layers import GatedMLP, HeadNorms, LayerNorm, RMSNorm
from nanoinfer.models.other_attention import SharedAttention
from nanoinfer.models.transformer import Attention, Block, Transformer

ACTIVATIONS = {"gelu_new": GELU_TANH, "gelu": GELU_ERF, "silu": SILU, "relu": RELU, "relu2": RELU2}
HEADS = ("head", "heads")  # qk_norm of each head
Pack = Callable[[Tensor], Weight]
"""Returns a weight, (N, K), in one of the formats of quantize.py."""


@dataclass(frozen=True)
class Layer:
    """One layer. A norm is None where the layer has none."""

    block: Block
    config: ModelConfig
    """With the layer's sizes."""
    weights: dict[str, Weight]
    """The products that the engine launches, by the names of their modules in the block."""
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
    value_eps: float | None
    """Of the norm of each head of values; None: they have no norm."""
    scores: Scores
    kind: LayerKind
    stores: bool
    """Whether the qkv product stores k and v itself: nothing happens to them before, and as many heads as queries."""

    @property
    def rotary(self) -> Rotary | None:
        """Rotation of queries and keys."""
        return self.kind.rotary

    @property
    def experts(self) -> bool:
        """Whether the MLP is a mixture of experts, which is PyTorch's module."""
        return self.kind.experts


def describe(model: Transformer, pack: Pack, *, keep: bool) -> list[Layer]:
    """Return the layers of a model.

    Args:
        model: the model; its weights become views of the packed ones, or are removed.
        pack: makes the weights of the kernels.
        keep: whether the model keeps them as views.
    """
    config = model.config
    return [
        _layer(config, config.at(i), config.layer(i), block, _packed(config, config.layer(i), block, pack, keep))
        for i, block in enumerate(model.blocks)
    ]


def _packed(config: ModelConfig, kind: LayerKind, block: Block, pack: Pack, keep: bool) -> dict[str, Weight]:
    """Return the weights of a block's kernels."""
    names = ["attn.c_attn", "attn.c_proj"] * (not kind.recurrent)
    if not kind.experts:
        names += ["mlp.c_gate"] * config.gated_mlp + ["mlp.c_fc", "mlp.c_proj"]
    return {name: take(cast(nn.Linear, block.get_submodule(name)), pack, keep) for name in names}


def take(module: nn.Module, pack: Pack, keep: bool) -> Weight:
    """Return the packed weight of a module, whose parameter becomes a view of it, or empty."""
    weight = pack(cast(Tensor, module.weight))
    module.weight = frozen(weight.data if keep else weight.data.new_empty(0))
    return weight


def frozen(weight: Tensor) -> nn.Parameter:
    """Return a parameter without gradients."""
    return nn.Parameter(weight, requires_grad=False)


def _layer(config: ModelConfig, at: ModelConfig, kind: LayerKind, block: Block, weights: dict[str, Weight]) -> Layer:
    def ones(width: int) -> Tensor:
        sample = next(block.parameters())
        return torch.ones(width, dtype=sample.dtype, device=sample.device)

    C, attn = config.n_embd, block.attn
    ln_1, post_1, ln_2, post_2 = (norm_of(m, ones(C)) for m in (block.ln_1, block.post_1, block.ln_2, block.post_2))
    plain = config.qk_norm == "none" and kind.rotary is None and not (kind.value_norm or config.attention_gate)
    return Layer(
        block=block,
        config=at,
        weights=weights,
        ln_1=ln_1,
        attn_sub=norm_of(cast(Attention, attn).sub_norm, ones(at.attn_dim)) if config.sub_norms else None,
        post_1=post_1,
        ln_2=ln_1 if block.shared else ln_2,
        mlp_sub=norm_of(cast(GatedMLP, block.mlp).sub_norm, ones(at.mlp_dim)) if config.sub_norms else None,
        post_2=post_2,
        heads=_norm_of_heads(block, ones(at.head_dim)) if config.qk_norm in HEADS and not kind.recurrent else None,
        value_eps=config.norm_epsilon if kind.value_norm else None,
        scores=Scores(config.attention_scale, config.attention_softcap, kind.window, attn.sinks),
        kind=kind,
        stores=plain and kind.num_projections == 3 and at.n_kv_head == at.n_head,
    )


def _norm_of_heads(block: Block, ones: Tensor) -> Norm:
    """Return the norms of the heads of queries and, if there are any, of keys, a row a head."""
    attn = cast(Attention | SharedAttention, block.attn)
    names = ("q_norm", "k_norm")[: len(attn.widths)]
    norms = [cast(Norm, norm_of(attn.get_submodule(name), ones)) for name in names]

    def rows(vectors: list[Tensor]) -> Tensor:
        heads = zip(vectors, (attn.n_head, attn.n_kv_head), strict=False)
        return torch.cat([v.view(-1, len(ones)).expand(count, -1) for v, count in heads])

    bias = None if norms[0].bias is None else rows([cast(Tensor, norm.bias) for norm in norms])
    return Norm(rows([norm.weight for norm in norms]), bias, norms[0].eps, norms[0].rms)


def norm_of(module: nn.Module, ones: Tensor, scale: float | None = None) -> Norm | None:
    """Return a norm's parameters in the form that the kernels take, or None of an identity.

    Args:
        module: the norm.
        ones: weight of a norm that has none.
        scale: factor of its results, which becomes a part of the parameters; None: 1.
    """
    if isinstance(module, nn.Identity):
        return None
    if isinstance(module, HeadNorms):
        return Norm(module.weight, None, module.eps, rms=False)
    assert isinstance(module, (LayerNorm, RMSNorm))
    weight, bias = ones if module.weight is None else module.weight, getattr(module, "bias", None)
    if module.weight is not None and module.offset:
        weight = weight.float() + module.offset  # more bits than the weight's dtype has
    if scale is not None:
        weight = weight.float() * scale
        bias = None if bias is None else bias.float() * scale
    return Norm(weight, bias, module.eps, isinstance(module, RMSNorm))
