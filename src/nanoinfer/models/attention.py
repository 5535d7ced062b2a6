"""Attention over dense keys and values in PyTorch, as the layers of a model ask for it.

The engines in PyTorch differ in where keys and values are, and all call `scaled_attention`, within
`attention_backends`. Shapes: see gpt.py; K = number of heads of keys and values, S = number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

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


def scaled_attention(
    config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, masking: Masking, sinks: Tensor | None = None
) -> Tensor:
    """Return softmax(scale * q k^T) v with the scale, soft cap and shared heads of the model.

    Args:
        config: the model.
        q: (..., H, T, D).
        k: (..., K, S, D); each head is shared by H / K heads of q.
        v: (..., K, S, D).
        masking: which keys each query attends to.
        sinks: (H), a score of each head that has no value: the weights of a query then add up to less than 1.

    Returns:
        (..., H, T, D).
    """
    scale = config.attention_scale  # None: 1 / sqrt(D), as in PyTorch
    mask, is_causal = masking
    shared = q.shape[-3] // k.shape[-3]
    if config.attention_softcap is None and sinks is None:
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
    if config.attention_softcap is not None:
        scores = soft_cap(scores, config.attention_softcap)
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


def causal_attention(
    config: ModelConfig, sinks: Callable[[int], Tensor | None], layer: int,
    q: Tensor, k: Tensor | None, v: Tensor | None, kept: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:  # fmt: skip
    """Attend from (B, T, H, D) queries to the (B, T, K, D) keys of their own and earlier positions of the sequence.

    `sinks` returns those of a layer. Models whose layers share keys and values need `kept`, a dict for those of the
    layers so far.
    """
    if k is None or v is None:
        assert kept is not None
        k, v = kept[config.kv_layer(layer)]
    elif kept is not None and any(kind.kv_layer == layer for kind in config.layers):
        kept[layer] = k, v
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
    T = q.shape[2]
    y = scaled_attention(config, q, k, v, masking(T, T, config.layer(layer).window, q.device), sinks(layer))
    return y.transpose(1, 2)  # (B, T, H, D)
