"""Layers with a state of constant size in place of keys and values: short convolutions, the gated delta rule, Mamba 2.

    S matrix of a head, (Dk, Dv)   q, k: (Dk)   v: (Dv)   d <= 0: logarithm of the decay   b: rate of learning

    delta rule   S_t = exp(d_t) S_{t-1} + k_t u_t^T,   u_t = b_t (v_t - (exp(d_t) S_{t-1})^T k_t),   y_t = S_t^T q_t
    Mamba 2      the same with u_t = v_t

q, k and v are outputs of a causal convolution over the last tokens, whose inputs are the other part of the state. A
token's inputs are a row of numbers (`Recurrence.num_inputs`), from which `scan` computes outputs and the next state.
Engines store states and inputs, and know nothing else of them (engines/states.py).

A chunk of tokens is a few products of matrices (Yang et al. 2024, arXiv 2412.06464, section 3.3): the u of a chunk
solve a triangular system. A chunk of one token is the definition above.

Whoever reads GPT-2 can leave this file out: transformer.py selects it by one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.layers import rotate
from nanoinfer.recurrence import Recurrence

CHUNK = 64
"""Tokens that are computed together."""
Recur = Callable[[Tensor], Tensor]
"""Inputs of the new tokens, (..., W) float32 -> outputs, (..., H Dv) float32, with the states that an engine has."""
LayerRecur = Callable[[int, "Recurrent", Tensor], Tensor]
"""The same, of a layer and its module."""


def recur_whole(layer: int, cell: Recurrent, inputs: Tensor) -> Tensor:
    """Return the outputs of whole sequences, (B, T, W): states begin with zeros."""
    return cell.scan(inputs.new_zeros(len(inputs), cell.shape.num_state), inputs)[0]


def recurrent_layer(config: ModelConfig, kind: LayerKind) -> Recurrent | None:
    """Return what a layer has in place of attention, or None if it has attention."""
    if not kind.recurrent:
        return None
    assert config.recurrence is not None
    if kind.beside:
        return Mamba2BesideAttention(config)
    return {"conv": ShortConvolution, "delta": DeltaRule, "mamba2": Mamba2}[config.recurrence.rule](config)


class Recurrent(nn.Module):
    """Projects tokens to inputs of the state, calls `recur`, and projects its outputs back.

    Args:
        config: of the model.
    """

    sinks = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.recurrence is not None
        self.shape: Recurrence = config.recurrence
        self.c_attn = nn.Linear(config.n_embd, sum(self.shape.widths), bias=self.shape.projection_bias)
        self.conv = nn.Parameter(torch.empty(self.shape.num_channels, self.shape.taps))
        self.conv_bias = nn.Parameter(torch.empty(self.shape.num_channels)) if self.shape.bias else None
        self.c_proj = nn.Linear(self.shape.inner_dim, config.n_embd, bias=self.shape.projection_bias)

    def scan(self, state: Tensor, inputs: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs of tokens, (B, T, H Dv), and the states after them.

        Args:
            state: (B, num_state) float32, before the tokens.
            inputs: (B, T, num_inputs) float32.
            count: (B,) number of tokens of each sequence; the others are padding. None: T.
        """
        raise NotImplementedError

    def _convolve(self, state: Tensor, x: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolution of x, (B, T, channels), and its last inputs, (B, (taps - 1) channels)."""
        taps, T = self.shape.taps, x.shape[1]
        past = state[:, : (taps - 1) * x.shape[2]].view(len(x), taps - 1, -1)
        x = torch.cat((past, x), 1)
        weight = self.conv.float()
        y = sum(x[:, i : i + T] * weight[:, i] for i in range(taps))
        if count is None:
            last = x[:, T:]
        else:
            rows = count[:, None] + torch.arange(taps - 1, device=x.device)
            last = x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
        return (y if self.conv_bias is None else y + self.conv_bias.float()), last.flatten(1)  # type: ignore[return-value]


class ShortConvolution(Recurrent):
    """c_proj(C * convolution(B * x)), where B, C and x are projections of the layer's input (LFM2)."""

    def forward(self, x: Tensor, recur: Recur, rotation: object = None) -> Tensor:
        """Return the layer's output of x, (..., C), same shape."""
        before, after, x = self.c_attn(x).chunk(3, -1)
        return self.c_proj(after * recur((before * x).float()).to(x.dtype))  # type: ignore[no-any-return]

    def scan(self, state: Tensor, inputs: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Recurrent.scan`."""
        return self._convolve(state, inputs, count)


class HeadStates(Recurrent):
    """A layer with a matrix for each head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.a_log = nn.Parameter(torch.empty(self.shape.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.shape.num_heads))
        self.eps = config.norm_epsilon

    def scan(self, state: Tensor, inputs: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Recurrent.scan`."""
        shape, T = self.shape, inputs.shape[1]
        keys = shape.num_key_heads * shape.key_dim
        if count is not None:  # padding, which may not be finite: nothing decays, and nothing is added
            inputs = inputs.masked_fill((torch.arange(T, device=inputs.device) >= count[:, None])[..., None], 0)
        x, gates = inputs.tensor_split((shape.num_channels,), -1)
        x, last = self._convolve(state, x, count)
        matrix = state[:, last.shape[1] :].view(-1, shape.num_heads, shape.key_dim, shape.value_dim)
        q, k, v = self._heads(F.silu(x), keys)
        y, matrix = self._update(matrix, q, k, v, gates)
        return y.flatten(2), torch.cat((last, matrix.flatten(1)), 1)

    def _heads(self, x: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, (B, T, H, Dk), and values, (B, T, H, Dv), of the convolution's outputs."""
        raise NotImplementedError

    def _update(self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of tokens, (B, T, H, Dv), and the matrices after them."""
        raise NotImplementedError

    def _shared(self, x: Tensor) -> Tensor:
        """Return queries or keys, (B, T, keys), for each head, (B, T, H, Dk)."""
        x, count = x.view(*x.shape[:-1], self.shape.num_key_heads, -1), self.shape.num_heads // self.shape.num_key_heads
        return torch.cat([x] * count, -2) if self.shape.tiled else x.repeat_interleave(count, -2)

    def _decay(self, x: Tensor) -> Tensor:
        """Return the size of a step, softplus(x + dt_bias), (..., H) float32."""
        return F.softplus(x.float() + self.dt_bias.float())


class DeltaRule(HeadStates):
    """The gated delta rule: norm(y) * silu(z), where z is a projection of the layer's input (Qwen3-Next, Qwen3.5)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm_scale = nn.Parameter(torch.empty(self.shape.value_dim))

    def forward(self, x: Tensor, recur: Recur, rotation: object = None) -> Tensor:
        """Return the layer's output of x, (..., C), same shape."""
        qkv, z, rate, decay = self.c_attn(x).split(self.shape.widths, -1)
        decay = -self.a_log.float().exp() * self._decay(decay)
        y = recur(torch.cat((qkv.float(), decay, rate.float().sigmoid()), -1))
        y = y.view(*y.shape[:-1], self.shape.num_heads, -1)
        y = F.rms_norm(y, y.shape[-1:], self.norm_scale.float(), self.eps)
        return self.c_proj((y.flatten(-2) * F.silu(z.float())).to(x.dtype))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.tensor_split((keys, 2 * keys), -1)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (self._shared(q), self._shared(k)))
        return q * self.shape.key_dim**-0.5, k, v.view(*v.shape[:-1], self.shape.num_heads, -1)

    def _update(self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        decay, rate = gates.chunk(2, -1)
        return gated_linear_attention(matrix, q, k, v, decay, rate)


class Mamba2(HeadStates):
    """Mamba 2: norm(y * silu(z)), with a decay that depends on the size of a step, and d of v added to y.

    Groups of values are normalised each by itself (Granite 4, Nemotron-H).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.skip_scale = nn.Parameter(torch.empty(self.shape.num_heads))
        self.norm_scale = nn.Parameter(torch.empty(self.shape.inner_dim)) if self.shape.norm_groups else None

    def forward(self, x: Tensor, recur: Recur, rotation: object = None) -> Tensor:
        """Return the layer's output of x, (..., C), same shape."""
        return self.c_proj(self.values(self.c_attn(x), recur))  # type: ignore[no-any-return]

    def values(self, projected: Tensor, recur: Recur) -> Tensor:
        """Return the values before the last projection, (..., H Dv), of the first one's outputs."""
        z, xbc, step = torch.split(projected, list(self.shape.widths), -1)
        y = recur(torch.cat((xbc.float(), self._decay(step)), -1)) * F.silu(z.float())
        if self.norm_scale is not None:
            y = y.view(*y.shape[:-1], self.shape.norm_groups, -1)
            y = F.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(-2) * self.norm_scale.float()
        return y.to(projected.dtype)

    def _heads(self, x: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        v, k, q = x.tensor_split((self.shape.inner_dim, self.shape.inner_dim + keys), -1)
        return self._shared(q), self._shared(k), v.view(*v.shape[:-1], self.shape.num_heads, -1)

    def _update(self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        y, matrix = gated_linear_attention(matrix, q, k, v * gates[..., None], -self.a_log.float().exp() * gates, None)
        return y + v * self.skip_scale.float()[:, None], matrix


class Mamba2BesideAttention(Mamba2):
    """Mamba 2 and attention of the same input, whose outputs are added (Falcon-H1). They share the first projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads, self.kv_heads = (config.n_head, config.head_dim), (config.n_kv_head, config.head_dim)
        self.widths = (config.attn_dim, config.kv_dim, config.kv_dim, sum(self.shape.widths))
        self.state_proj, bias = self.c_proj, self.shape.projection_bias
        self.c_attn = nn.Linear(config.n_embd, sum(self.widths), bias=bias)
        self.c_proj = nn.Linear(config.attn_dim, config.n_embd, bias=bias)

    def forward(self, x: Tensor, calls: Any, rotation: Any = None) -> Tensor:
        """Return the layer's output of x, (..., C), same shape. calls: `attend` (transformer.py) and `recur`."""
        attend, recur = calls
        q, k, v, projected = self.c_attn(x).split(self.widths, -1)
        q, k, v = q.unflatten(-1, self.heads), k.unflatten(-1, self.kv_heads), v.unflatten(-1, self.kv_heads)
        if rotation is not None:
            q, k = rotate(torch.cat((q, k), -2), rotation).tensor_split((self.heads[0],), -2)
        return self.c_proj(attend(q, k, v).flatten(-2)) + self.state_proj(self.values(projected, recur))  # type: ignore[no-any-return]


def gated_linear_attention(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return the outputs of T tokens, (B, T, H, Dv), and the state after them.

    Args:
        state: (B, H, Dk, Dv) before the tokens, float32.
        q: (B, T, H, Dk).
        k: (B, T, H, Dk).
        v: (B, T, H, Dv).
        decay: (B, T, H) logarithm of the decay, <= 0.
        rate: (B, T, H) rate of learning of the delta rule; None: u = v.
        chunk: tokens that are computed together; 1: the definition.
    """
    outputs = []
    for q_c, k_c, v_c, d, r in zip(
        *(torch.split(x.transpose(1, 2), chunk, 2) for x in (q, k, v, decay, decay if rate is None else rate)),
        strict=True,
    ):  # each (B, H, C, ...)
        total = d.cumsum(-1)  # of the chunk up to a token
        from_start = total.exp()[..., None]
        between = (total[..., :, None] - total[..., None, :]).tril()  # from a token to a later one
        weight = between.exp().tril()  # (B, H, C, C)
        if rate is not None:
            system = (k_c * r[..., None]) @ k_c.mT * weight
            right = (v_c - from_start * (k_c @ state)) * r[..., None]
            v_c = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(from_start * (q_c @ state) + (q_c @ k_c.mT * weight) @ v_c)
        to_end = (total[..., -1:] - total).exp()[..., None]
        state = state * from_start[..., -1:, :] + (k_c * to_end).mT @ v_c
    return torch.cat(outputs, 2).transpose(1, 2), state
