"""The layers of a model as the kernels of engine `triton` take them: weights, parameters of norms and of scores.

`describe` reads it off a model once; triton_engine.py then launches the same kernels for every family. Mixtures of
experts and recurrent layers run as the reference model's modules. `fuse` replaces their matrices, so that they have the
formats of all other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.kernels.triton.attention import Scores
from nanoinfer.kernels.triton.epilogue import GELU_ERF, GELU_TANH, RELU, RELU2, SILU, Epilogue
from nanoinfer.kernels.triton.experts import BLOCK, expert_product
from nanoinfer.kernels.triton.products import product
from nanoinfer.kernels.triton.quantize import Weight
from nanoinfer.kernels.triton.rows import Norm
from nanoinfer.models.experts import ExpertMLP, Stack
from nanoinfer.models.layers import GatedMLP, HeadNorms, LayerNorm, RMSNorm
from nanoinfer.models.other_attention import SharedAttention
from nanoinfer.models.recurrent import Recurrent
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


class FusedLinear(nn.Module):
    """A linear layer as one kernel for up to `most` rows; for more, which dense weights alone have, PyTorch's."""

    def __init__(self, weight: Weight, bias: Tensor | None, most: float) -> None:
        super().__init__()
        self.weight, self.bias, self._most = weight, bias, most

    def forward(self, x: Tensor) -> Tensor:
        """Return the products of x, (..., K), (..., N) in the dtype of the model."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > self._most:
            return F.linear(x, self.weight.data, self.bias)
        out = torch.empty(len(rows), self.weight.num_outputs, dtype=self.weight.operand, device=x.device)
        product(rows.contiguous(), self.weight, out, None, Epilogue(self.bias))
        return out.view(*x.shape[:-1], -1)


class FusedStack(Stack):
    """The matrices of one of the products of all experts, packed.

    Args:
        count: number of experts.
        packed: (count * rows, columns).
        bias: (count * rows,), or None.
    """

    def __init__(self, count: int, packed: Weight, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.count, self.packed = count, packed
        self.bias = None if bias is None else frozen(bias)
        self.weight = frozen(packed.data if packed.scale is None else packed.data.new_empty(0))

    def gathered(self, chosen: Tensor, x: Tensor) -> Tensor:
        """Return the products of the experts `chosen`, (N, k, rows, 1), for x, (N, k or 1, columns, 1)."""
        out = self._empty(chosen.numel(), x)
        inputs = x.flatten(0, 1).squeeze(-1).contiguous()
        expert_product(inputs, self.packed, self.count, chosen.flatten(), None, out, self.bias)
        return out.view(*chosen.shape, -1, 1)

    def all(self, x: Tensor) -> Tensor:
        """Return the products of all experts, (E, N, rows), for x, (N, columns) or (E, N, columns)."""
        if self.packed.scale is None:
            return super().all(x)
        E, N = self.count, x.shape[-2]
        expert, token = torch.arange(E, device=x.device), torch.arange(-(-N // BLOCK) * BLOCK, device=x.device)
        places = (token * E + expert[:, None]).masked_fill(token >= N, N * E).view(-1, BLOCK)  # (E * blocks, BLOCK)
        inputs = x if x.dim() == 2 else x.transpose(0, 1).flatten(0, 1)  # those of a token one after the other
        out = self._empty(N * E, x)
        experts = expert[:, None].expand(E, len(places) // E).flatten()
        expert_product(inputs.contiguous(), self.packed, E, experts, places, out, self.bias)
        return out.view(N, E, -1).transpose(0, 1)

    def _empty(self, rows: int, x: Tensor) -> Tensor:
        return torch.empty(rows, self.packed.num_outputs // self.count, dtype=self.packed.operand, device=x.device)


def fuse(model: Transformer, pack: Pack, most: float) -> None:
    """Replace the matrices in the modules of a model that engine `triton` runs as they are.

    Args:
        model: the model.
        pack: makes their weights.
        most: of `FusedLinear`.
    """

    def replace(module: nn.Module, *names: str) -> None:
        for name in names:
            linear = cast(nn.Linear, module.get_submodule(name))
            bias = None if linear.bias is None else linear.bias.detach()
            setattr(module, name, FusedLinear(take(linear, pack, keep=False), bias, most))

    for cell in [module for module in model.modules() if isinstance(module, Recurrent)]:
        replace(cell, "c_attn", "c_proj")
    for mlp in [module for module in model.modules() if isinstance(module, ExpertMLP)]:
        if mlp.config.shared_width or mlp.config.beside:  # routers keep the model's dtype
            replace(mlp.shared, "c_gate", "c_fc", "c_proj")
        for name, stack in mlp.experts.items():
            bias = None if stack.bias is None else cast(Tensor, stack.bias).detach()
            mlp.experts[name] = FusedStack(mlp.config.count, take(stack, pack, keep=False), bias)
