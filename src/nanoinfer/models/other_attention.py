"""Attention whose keys and values are not projections of their own, or products of a latent.

In some models, the keys and values of a layer are those of an earlier layer, which saves their memory and the products
(cross-layer attention, Brandon et al. 2024; Gemma 3n and 4). In others, values are the keys before their norm and
rotation, or have a norm (Gemma 4). `LayerKind` has the layers that do. Others have a gate (Qwen3.5).

Whoever reads GPT-2 can leave this file out: transformer.py selects it by one line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.experts import Stack
from nanoinfer.models.layers import RMSNorm, Rotation, make_norm, qk_norm, rotate


def other_attention(config: ModelConfig, kind: LayerKind) -> LatentAttention | SharedAttention | None:
    """Return what a layer has in place of GPT-2's kind of attention, or None if it has that."""
    if config.latent is not None:
        return LatentAttention(config)
    if kind.num_projections < 3 or kind.value_norm or config.attention_gate:
        return SharedAttention(config, kind)
    return None


class SharedAttention(nn.Module):
    """Multi-head attention that projects to queries, to keys if they are the layer's own, and to values if they are not
    the keys.

    Args:
        config: with the sizes of this layer (`ModelConfig.at`).
        kind: of this layer.
    """

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.widths = [config.attn_dim, config.kv_dim, config.kv_dim][: kind.num_projections]
        self.gated = config.attention_gate
        if self.gated:
            self.widths.append(config.attn_dim)
        self.c_attn = nn.Linear(config.n_embd, sum(self.widths), bias="qkv" in config.biases)
        self.c_proj = nn.Linear(config.attn_dim, config.n_embd, bias="proj" in config.biases)
        self.qk_norm = config.qk_norm
        for name, width in zip(("q_norm", "k_norm"), self.widths, strict=False):
            if config.qk_norm != "none":
                setattr(self, name, qk_norm(config, width // config.head_dim))
        self.sinks = nn.Parameter(torch.empty(config.n_head)) if config.sinks else None  # attention.py
        self.sub_norm = make_norm(config, config.attn_dim) if config.sub_norms else nn.Identity()
        self.value_eps = config.norm_epsilon if kind.value_norm else None

    def forward(self, x: Tensor, attend: Callable[..., Tensor], rotation: Rotation | None = None) -> Tensor:
        """Return the attention output of x, (..., C), same shape."""
        q, *projected = self.c_attn(x).split(self.widths, dim=-1)
        gate = torch.sigmoid(projected.pop()) if self.gated else None
        y: Tensor = self._attend(q, projected, attend, rotation).flatten(-2)
        return self.c_proj(self.sub_norm(y if gate is None else y * gate))  # type: ignore[no-any-return]

    def _attend(
        self, q: Tensor, projected: list[Tensor], attend: Callable[..., Tensor], rotation: Rotation | None
    ) -> Tensor:
        """Return the attention, (..., H, D), of queries, and of keys and values if they are the layer's own."""
        q = self._positioned(q, "q_norm", self.n_head, rotation)
        if not projected:
            return attend(q, None, None)
        k = self._positioned(projected[0], "k_norm", self.n_kv_head, rotation)
        v = projected[-1].view(*projected[-1].shape[:-1], self.n_kv_head, self.head_dim)  # (..., K, D)
        if self.value_eps is not None:
            v = F.rms_norm(v, v.shape[-1:], None, self.value_eps)
        return attend(q, k, v)

    def _positioned(self, x: Tensor, norm: str, heads: int, rotation: Rotation | None) -> Tensor:
        """Return queries or keys, (..., heads, D), normalised and rotated."""
        if self.qk_norm == "whole":
            x = self.get_submodule(norm)(x)
        x = x.view(*x.shape[:-1], heads, self.head_dim)
        if self.qk_norm in ("head", "heads"):
            x = self.get_submodule(norm)(x)
        return x if rotation is None else rotate(x, rotation)


class HeadProduct(Stack):
    """A matrix for each head, one below the other."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the products of x, (..., H, columns), with the matrices of the heads, (..., H, rows)."""
        return torch.einsum("...hi,hoi->...ho", x, self.weight.view(self.count, -1, x.shape[-1]))


class LatentAttention(nn.Module):
    """Multi-head latent attention (docs/latent-attention.md): project to queries and one key, call `attend` with the
    key as value too, and project back.

        H heads   R = rank of the latent   P, Q = widths of the rotated and the other part of queries and keys

    Keys and values of all heads are products of one latent of R values, the norm of a product of x. A key of a head is
    its product with k_b, and P rotated values that all heads share; a value is its product with v_b (DeepSeek-V2,
    2024).

    Both products are moved to the other side, where new tokens alone need them: the score q . (k_b^T c) of a latent c
    is (k_b q) . c, and the weighted sum of values v_b c is v_b (the weighted sum of latents c). So attention has one
    key of P + R values for all heads, which is the value as well, and caches are those of a model with one head of
    keys.
    """

    sinks = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent, self.n_head = config.latent, config.n_head
        rank, query_rank, queries = self.latent.rank, self.latent.query_rank, self.n_head * self.latent.query_dim
        norms = replace(config, norm_epsilon=self.latent.norm_epsilon)
        self.c_attn = nn.Linear(config.n_embd, sum(config.qkv_widths(0)), bias="qkv" in config.biases)
        if query_rank:
            self.q_norm = RMSNorm(norms, query_rank)
            self.q_b = nn.Linear(query_rank, queries, bias=False)
        self.kv_norm = RMSNorm(norms, rank)
        self.k_b = HeadProduct(self.n_head, rank, self.latent.plain_dim, bias=False)
        self.v_b = HeadProduct(self.n_head, self.latent.value_dim, rank, bias=False)
        self.c_proj = nn.Linear(self.n_head * self.latent.value_dim, config.n_embd, bias="proj" in config.biases)

    def forward(
        self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], rotation: Rotation | None = None
    ) -> Tensor:
        """Return the attention output of x, (..., C), same shape."""
        rank, turned = self.latent.rank, self.latent.rotary_dim
        q, latent, shared = self.c_attn(x).tensor_split((-rank - turned, -turned), -1)
        if self.latent.query_rank:
            q = self.q_b(self.q_norm(q))
        q, q_turned = q.unflatten(-1, (self.n_head, -1)).tensor_split((self.latent.plain_dim,), -1)
        q = torch.cat((q_turned, self.k_b(q)), -1)  # (..., H, P + R)
        k = torch.cat((shared, self.kv_norm(latent)), -1)[..., None, :]  # (..., 1, P + R)
        if rotation is not None:
            q, k = rotate(torch.cat((q, k), -2), rotation).tensor_split((self.n_head,), -2)
        y = attend(q, k, k)[..., turned:]  # (..., H, R): of the shared part, nothing is a value
        return self.c_proj(self.v_b(y).flatten(-2))  # type: ignore[no-any-return]
