"""The norms of a model, and what other families have in place of GPT-2's layers: rotary positions, gated MLPs,
per-layer embeddings, rounded inputs; the input of a block that predicts a further token.

A model that is GPT-2 uses the layer norm and nothing else of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig

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


class LayerNorm(nn.Module):
    """Layer norm with an optional bias. Arguments: see `RMSNorm`."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_weight != "none" else None
        self.offset = 1.0 if config.norm_weight == "one_plus" else 0.0
        self.bias = nn.Parameter(torch.zeros(width)) if "norm" in config.biases else None
        self.eps = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (..., C), over its last dimension."""
        weight = self.weight if self.weight is None or not self.offset else self.weight + self.offset
        return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Return a norm of the config's kind over `width` values, n_embd by default."""
    norm = RMSNorm if config.norm == "rms" else LayerNorm
    return norm(config, config.n_embd if width is None else width)


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


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = "mlp" in config.biases
        self.c_fc = nn.Linear(config.n_embd, config.mlp_dim, bias=bias)
        self.c_proj = nn.Linear(config.mlp_dim, config.n_embd, bias=bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP output of x, (..., C), same shape."""
        return self.c_proj(self.activation(self.c_fc(x)))  # type: ignore[no-any-return]


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


def make_mlp(config: ModelConfig) -> MLP | GatedMLP:
    """Return the MLP of a layer without experts."""
    return GatedMLP(config) if config.gated_mlp else MLP(config)


def qk_norm(config: ModelConfig, heads: int) -> nn.Module:
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


class PerLayerEmbedding(nn.Module):
    """Per-layer embeddings: a second embedding gives each token an input for each layer (Gemma 3n and 4).

        L layers   P = per_layer_dim   x: the residual stream, (..., C)

    Before the first block, the input of layer l is made of a row of the table and of a product with the embedded token
    e:

        u_l = (norm(W_in e / sqrt(C))_l + sqrt(P) * table[token, l]) / sqrt(2)         P values each

    After each block, what a gate lets through of it is added to the residual stream, which is then scaled:

        x = (x + norm(W_proj (activation(W_gate x) * u_l))) * scale

    A step reads one row of the table for each token and layer, so the table takes memory, and next to no time. Some
    models have the scale alone.

    Args:
        config: of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_layer, self.width = config.n_layer, config.per_layer_dim
        rows = config.vocab_size * config.n_layer  # row token * L + l is that of layer l
        self.wte = nn.Embedding(rows, self.width, _weight=torch.empty(rows, self.width))
        self.c_in = nn.Linear(config.n_embd, config.n_layer * self.width, bias=False)
        self.norm = make_norm(config, self.width)

    def forward(self, idx: Tensor, x: Tensor) -> Tensor:
        """Return the inputs, (..., L, P), of tokens idx, (...), whose embeddings are x, (..., C)."""
        rows = idx[..., None] * self.n_layer + torch.arange(self.n_layer, device=idx.device)
        scale = torch.tensor(self.width**0.5, dtype=x.dtype).item()  # rounded to the dtype, as in transformers
        projected = self.c_in(x) * x.shape[-1] ** -0.5
        own: Tensor = self.norm(projected.view(*idx.shape, self.n_layer, self.width))
        table: Tensor = self.wte(rows)
        mixed: Tensor = (own + table * scale) * 2.0**-0.5
        return mixed


class AfterBlock(nn.Module):
    """The end of a block: its layer's input is added, if the model has such inputs, and the sum is scaled.

    Args:
        config: of the model.
        kind: of the layer.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        if config.per_layer_dim:
            self.c_gate = nn.Linear(config.n_embd, config.per_layer_dim, bias=False)
            self.c_proj = nn.Linear(config.per_layer_dim, config.n_embd, bias=False)
            self.post = make_norm(config, config.n_embd)
        self.scale = nn.Parameter(torch.ones(1)) if kind.scaled else None
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, layer_input: Tensor | None) -> Tensor:
        """Return the input of the next block for x, (..., C), and the layer's own input, (..., P)."""
        if layer_input is not None:
            x = x + self.post(self.c_proj(self.activation(self.c_gate(x)) * layer_input))
        return x if self.scale is None else x * self.scale


class MTPInput(nn.Module):
    """The input of a block that predicts the token after next (multi-token prediction; DeepSeek-V3, arXiv 2412.19437).

    x_j = W_in [norm_e(e_j), norm_h(h_{j-1})]: e_j is the embedding of token j, h_{j-1} the model's final hidden state
    after the token before it. From the block's output, the model's own head predicts token j + 1.

    h is taken after the model's final norm, and the embedding stands first: so in vLLM (qwen3_next_mtp.py) and SGLang
    (deepseek_nextn.py). llama.cpp's pull request 24025 measured it for Qwen3.5; ROCm/ATOM's 1764, for DeepSeek-R1,
    cites that model's own code. A deeper proposal has the block's own final hidden state in place of h. The input of
    an assistant (`Backbone`) has no norms.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        own = config.backbone is None
        self.norm_e, self.norm_h = (make_norm(config) if own else nn.Identity() for _ in range(2))
        self.c_in = nn.Linear(2 * config.source_dim, config.n_embd, bias=False)

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        """Return the input of the block, (..., C), for embeddings x and hidden states `previous`, (..., source_dim)."""
        return self.c_in(torch.cat((self.norm_e(x), self.norm_h(previous)), -1))  # type: ignore[no-any-return]


def rounded(x: Tensor) -> Tensor:
    """Round x, (..., n), to multiples of its row's largest magnitude / 127, at least 1e-5 / 127; ties to even.

    The weights of BitNet (Ma et al. 2024, arXiv 2402.17764) are -1, 0 or 1 times a scale of the matrix, and the models
    are trained with both roundings. That of weights is not here: they are as they are stored.
    """
    wide = x.float()
    scale = 127.0 / wide.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (torch.round(wide * scale) / scale).to(x.dtype)


def round_inputs(module: nn.Module) -> None:
    """Make the linear layers in a module round their inputs."""

    def hook(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(inputs[0]),)

    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(hook)
