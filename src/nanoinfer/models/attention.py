"""Attention over dense keys and values in PyTorch, with the windows, scales and sinks of the layers of a model.

The engines in PyTorch differ in where keys and values are, and all call `scaled_attention`, within
`attention_backends`. Shapes: see transformer.py; K = number of heads of keys and values, S = number of keys.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoinfer.config import ModelConfig

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's attention kernels that the engines use on a GPU: all but cuDNN's.

PyTorch prefers cuDNN's from compute capability 9.0 on. It plans every new shape for about 30 ms on the host, and in
most engines the shape may change at every step. Captured steps use the same kernels, so that rungs compute alike."""


def attention_backends(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which attention on a GPU uses BACKENDS. It takes the host 25 us, so a step enters it once."""
    return sdpa_kernel(BACKENDS) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What the attention of one layer is, wherever its keys and values are."""

    source: int
    """Layer whose keys and values it reads, in most models its own."""
    window: int | None
    """A query attends to this many positions, its own included; None: to all earlier ones."""
    scale: float | None
    """Factor of the scores; None: 1 / sqrt(D)."""
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None
    """(H), a score of each head that has no value: the weights of a query then add up to less than 1."""


class KeyValues(Protocol):
    """Where the layers of a step store keys and values, and how queries read them."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the new tokens of a layer, (..., K, D). Not called for a layer without any."""

    def attend(self, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Return the attention of queries, (..., H, D), to what is stored. Same shape."""


class Masking(NamedTuple):
    """Which keys each query attends to."""

    mask: Tensor | None
    """Bool, or added to the scores; broadcastable to (..., H, T, S). None: all keys, or those up to the query's own."""
    is_causal: bool = False
    """Query t attends to the keys up to t, and there is no mask."""


def masking(num_new: int, length: int, window: int | None, device: torch.device) -> Masking:
    """Return which of `length` keys the last `num_new` queries attend to. Attention is fastest without a mask.

    masking(2, 4, None, device).mask -> [[1, 1, 1, 0],     masking(2, 4, 2, device).mask -> [[0, 1, 1, 0],
                                         [1, 1, 1, 1]]                                       [0, 0, 1, 1]]
    """
    if window is None or window >= length:
        if num_new == 1 or num_new == length:
            return Masking(None, is_causal=num_new > 1)
        window = length
    query = torch.arange(length - num_new, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    return Masking((key <= query) & (key > query - window))


def scaled_attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
    """Return softmax(scale * q k^T) v with the scale, soft cap and sinks of a layer.

    Args:
        spec: of the layer.
        q: (..., H, T, D).
        k: (..., K, S, D); each head is shared by H / K heads of q.
        v: (..., K, S, D).
        masking: which keys each query attends to.

    Returns:
        (..., H, T, D).
    """
    scale, sinks = spec.scale, spec.sinks
    mask, is_causal = masking
    shared = q.shape[-3] // k.shape[-3]
    if spec.softcap is None and sinks is None:
        shape = q.shape
        if shared > 1 and not is_causal:
            # Heads that share keys become queries of one head: with a mask, PyTorch's fused kernels share no heads.
            q = q.reshape(*k.shape[:-2], shared * shape[-2], shape[-1])  # (..., K, H / K * T, D)
            mask = torch.cat([mask] * shared, -2) if mask is not None and mask.shape[-2] > 1 else mask
            shared = 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=shared > 1
        ).reshape(shape)
    k, v = (x.repeat_interleave(shared, dim=-3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if spec.softcap is not None:
        scores = soft_cap(scores, spec.softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(scores.float(), dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap): values stay between -cap and cap."""
    return cap * torch.tanh(x / cap)


class WholePrefix:
    """Attention of whole sequences, (B, T), to their own tokens: keys and values of the last layer, and of those that
    later layers read."""

    def __init__(self, config: ModelConfig) -> None:
        self._shared = {kind.kv_layer for kind in config.layers}
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep k and v, (B, T, K, D)."""
        self._kv = {i: kv for i, kv in self._kv.items() if i in self._shared} | {layer: (k, v)}

    def attend(self, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Attend from q, (B, T, H, D), to the keys of the same and earlier positions."""
        q, k, v = (x.transpose(1, 2) for x in (q, *self._kv[spec.source]))  # (B, heads, T, D)
        T = q.shape[2]
        return scaled_attention(spec, q, k, v, masking(T, T, spec.window, q.device)).transpose(1, 2)
