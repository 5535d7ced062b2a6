"""Multi-head latent attention in place of a block's attention (docs/latent-attention.md).

    H heads   R = rank of the latent   P, Q = widths of the rotated and the other part of queries and keys

Keys and values of all heads are products of one latent of R values, the norm of a product of x. A key of a head is its
product with k_b, and P rotated values that all heads share; a value is its product with v_b (DeepSeek-V2, 2024).

Both products are moved to the other side, where new tokens alone need them: the score q . (k_b^T c) of a latent c is
(k_b q) . c, and the weighted sum of values v_b c is v_b (the weighted sum of latents c). So attention has one key of
P + R values for all heads, which is the value as well, and caches are those of a model with one head of keys.

Whoever reads GPT-2 can leave this file out: shared_attention.py selects it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.config import ModelConfig
from nanoinfer.models.experts import Stack
from nanoinfer.models.layers import RMSNorm, Rotation, rotate


class HeadProduct(Stack):
    """A matrix for each head, one below the other."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the products of x, (..., H, columns), with the matrices of the heads, (..., H, rows)."""
        return torch.einsum("...hi,hoi->...ho", x, self.weight.view(self.count, -1, x.shape[-1]))


class LatentAttention(nn.Module):
    """Project to queries and one key, call `attend` with the key as value too, and project back."""

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
