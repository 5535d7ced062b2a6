"""What other families have in place of GPT-2's layers: RMS norm, rotary positions, a gated MLP.

A model that is GPT-2 uses none of this; gpt.py is complete without it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles of each token, (..., 1, dim) each: dim / 2 angles twice, the first sines negated.
(..., H + K, dim) if the heads of queries and of keys differ in a factor."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "clamped_silu": lambda x: (x := x.clamp(max=CLAMP)) * torch.sigmoid(1.702 * x),
}
CLAMP = 7.0
"""Limit of the numbers that enter clamped_silu (gpt-oss model card, arXiv 2508.10925, section 2.3)."""


def gate(activation: str, gate: Tensor, fc: Tensor) -> Tensor:
    """Return the hidden layer of a gated MLP: activation(gate) * fc, or activation(gate) * (clamp(fc) + 1)."""
    return ACTIVATIONS[activation](gate) * (fc if activation != "clamped_silu" else fc.clamp(-CLAMP, CLAMP) + 1.0)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times the weight (Zhang and Sennrich 2019). Computed in float32.

    Args:
        config: whether there is a weight, and whether it is added to 1.
        width: size of the last dimension.
    """

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_weight != "none" else None
        self.offset = 1.0 if config.norm_weight == "one_plus" else 0.0
        self.eps = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (..., width), over its last dimension."""
        if self.weight is None or not self.offset:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)  # one kernel
        weight = self.weight.float() + self.offset  # more bits than the weight's dtype has
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)


class HeadNorms(nn.Module):
    """Layer norms of the heads of queries or of keys, each with weights of its own. Computed in float32.

    Args:
        config: width of a head, and constant of the norms.
        heads: number of heads.
    """

    def __init__(self, config: ModelConfig, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * config.head_dim))
        self.eps = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (..., heads, D), over its last dimension."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.view(x.shape[-2:]).float()).to(x.dtype)


class GatedMLP(nn.Module):
    """c_proj(activation(c_gate(x)) * c_fc(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = "mlp" in config.biases
        self.c_gate = nn.Linear(config.n_embd, config.mlp_dim, bias=bias)
        self.c_fc = nn.Linear(config.n_embd, config.mlp_dim, bias=bias)
        self.c_proj = nn.Linear(config.mlp_dim, config.n_embd, bias=bias)
        self.activation = config.activation
        self.sub_norm = RMSNorm(config, config.mlp_dim) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP output of x, (..., C), same shape."""
        hidden = self.sub_norm(gate(self.activation, self.c_gate(x), self.c_fc(x)))
        return self.c_proj(hidden)  # type: ignore[no-any-return]


MakeNorm = Callable[[ModelConfig, int], nn.Module]
"""Returns a norm of the config's kind over so many values."""


def qk_norm(config: ModelConfig, heads: int, make_norm: MakeNorm) -> nn.Module:
    """Return the norm of the queries or keys of a model that has one."""
    if config.qk_norm == "heads":
        return HeadNorms(config, heads)
    return make_norm(config, config.head_dim * (1 if config.qk_norm == "head" else heads))


def rotation(frequency: Tensor, pos: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Rotation:
    """Return the rotation of tokens at positions `pos`, int64 of any shape, for `rotary.frequencies` on its device.

    Rotated values are multiplied by `scale`, a number or (..., H + K, 1).
    """
    angles = pos[..., None, None].float() * frequency
    cos, sin = angles.cos(), angles.sin()
    if not isinstance(scale, float) or scale != 1.0:
        cos, sin = cos * scale, sin * scale
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate queries or keys, (..., heads, D). Dimensions after the rotary ones stay as they are."""
    cos, sin = by
    half = cos.shape[-1] // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    y = torch.addcmul(x[..., : 2 * half] * cos, torch.cat((b, a), -1), sin)  # a cos - b sin, b cos + a sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y
