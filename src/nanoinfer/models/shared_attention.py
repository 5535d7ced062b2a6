"""Attention whose keys and values are not projections of their own.

In some models, the keys and values of a layer are those of an earlier layer, which saves their memory and the products
(cross-layer attention, Brandon et al. 2024; Gemma 3n and 4). In others, values are the keys before their norm and
rotation, or have a norm (Gemma 4). `LayerKind` says which layer does.

Whoever reads GPT-2 can leave this file out: gpt.py selects it by one line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.latent import LatentAttention
from nanoinfer.models.layers import MakeNorm, Rotation, qk_norm, rotate


def other_attention(
    config: ModelConfig, kind: LayerKind, make_norm: MakeNorm
) -> LatentAttention | SharedAttention | None:
    """Return what a layer has in place of GPT-2's kind of attention, or None if it has that."""
    if config.latent is not None:
        return LatentAttention(config)
    if kind.num_projections < 3 or kind.value_norm:
        return SharedAttention(config, kind, make_norm)
    return None


class SharedAttention(nn.Module):
    """Multi-head attention that projects to queries, to keys if they are the layer's own, and to values if they are not
    the keys.

    Args:
        config: with the sizes of this layer (`ModelConfig.at`).
        kind: of this layer.
        make_norm: of the norms of queries, keys and the output.
    """

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: ModelConfig, kind: LayerKind, make_norm: MakeNorm) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.widths = [config.attn_dim, config.kv_dim, config.kv_dim][: kind.num_projections]
        self.c_attn = nn.Linear(config.n_embd, sum(self.widths), bias="qkv" in config.biases)
        self.c_proj = nn.Linear(config.attn_dim, config.n_embd, bias="proj" in config.biases)
        self.qk_norm = config.qk_norm
        for name, width in zip(("q_norm", "k_norm"), self.widths, strict=False):
            if config.qk_norm != "none":
                setattr(self, name, qk_norm(config, width // config.head_dim, make_norm))
        self.sinks = nn.Parameter(torch.empty(config.n_head)) if config.sinks else None  # attention.py
        self.sub_norm = make_norm(config, config.attn_dim) if config.sub_norms else nn.Identity()
        self.value_eps = config.norm_epsilon if kind.value_norm else None

    def forward(self, x: Tensor, attend: Callable[..., Tensor], rotation: Rotation | None = None) -> Tensor:
        """Return the attention output of x, (..., C), same shape."""
        q, *projected = self.c_attn(x).split(self.widths, dim=-1)
        q = self._positioned(q, "q_norm", self.n_head, rotation)
        if not projected:
            return self.c_proj(self.sub_norm(attend(q, None, None).flatten(-2)))  # type: ignore[no-any-return]
        k = self._positioned(projected[0], "k_norm", self.n_kv_head, rotation)
        v = projected[-1].unflatten(-1, (self.n_kv_head, self.head_dim))  # (..., K, D)
        if self.value_eps is not None:
            v = F.rms_norm(v, v.shape[-1:], None, self.value_eps)
        return self.c_proj(self.sub_norm(attend(q, k, v).flatten(-2)))  # type: ignore[no-any-return]

    def _positioned(self, x: Tensor, norm: str, heads: int, rotation: Rotation | None) -> Tensor:
        """Return queries or keys, (..., heads, D), normalised and rotated."""
        if self.qk_norm == "whole":
            x = self.get_submodule(norm)(x)
        x = x.view(*x.shape[:-1], heads, self.head_dim)
        if self.qk_norm in ("head", "heads"):
            x = self.get_submodule(norm)(x)
        return x if rotation is None else rotate(x, rotation)
