"""Keys and values rounded as the cache of `native` in 8 or 4 bits rounds them: the reference of its numbers.

Engines in PyTorch store the rounded numbers in their own dtype, so they take no less memory. Before rounding, a head is
multiplied by a Hadamard matrix, which spreads large numbers over its dimensions (QuaRot, Ashkboos et al. 2024,
arXiv 2404.00456). `native` keeps it so; here it is multiplied back, which is the same attention.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.errors import NanoinferError
from nanoinfer.models.transformer import Transformer

KEY_BITS, VALUE_BITS = 6, 4  # of int4: a softmax enlarges errors of keys


def round_cache(model: Transformer, cache_dtype: str) -> None:
    """Let each layer of a model round its new keys and values; cache_dtype: int8 or int4.

    Raises:
        NanoinferError: the model caches latents.
    """
    if model.config.latent is not None:
        raise NanoinferError(
            f"kv_cache_dtype={cache_dtype!r}: only the engine native has latents in few bits: leave it out"
        )
    for layer in model.config.kv_layers:
        H = hadamard(model.config.at(layer).head_dim).to(model.lm_head.weight.device)
        model.blocks[layer].attn.register_forward_pre_hook(partial(_round_new, cache_dtype, H))


def _round_new(cache_dtype: str, H: Tensor, module: nn.Module, args: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Change the arguments (x, attend, rotation) of an attention layer."""
    x, attend, rotation = args
    both = isinstance(attend, tuple)
    store_and_attend = attend[0] if both else attend

    def rounding(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is not None and v is not None:
            bits = (KEY_BITS, VALUE_BITS) if cache_dtype == "int4" else (None, None)
            k, v = rounded(k, H, bits[0]), rounded(v, H, bits[1])
        return store_and_attend(q, k, v)  # type: ignore[no-any-return]

    return x, (rounding, *attend[1:]) if both else rounding, rotation


def rounded(x: Tensor, H: Tensor, bits: int | None) -> Tensor:
    """Return heads, (..., D), rounded to 8 bits with a float32 scale, or to fewer with a bfloat16 scale and offset.

    H: of `hadamard`, for D.
    """
    y = _turned(x.float(), H)
    if bits is None:
        scale = (y.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        y = torch.round(y / scale) * scale
    else:
        high, low = y.amax(-1, keepdim=True), y.amin(-1, keepdim=True)
        span = high - low + torch.maximum(high, -low) / 256  # by what the offset may be off
        step = (span / (2**bits - 1)).bfloat16().float()
        offset = ((high + low + step) / 2).bfloat16().float()
        codes = torch.round((y - offset) / step.clamp_min(1e-30)).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        y = codes * step + offset
    return _turned(y, H).to(x.dtype)


def _turned(x: Tensor, H: Tensor) -> Tensor:
    return (x.reshape(*x.shape[:-1], -1, len(H)) @ H).flatten(-2)


def hadamard(width: int) -> Tensor:
    """Return the Hadamard matrix, its own inverse, of the largest power of two that divides a head's width."""
    H = torch.ones(1, 1)
    while width % (2 * len(H)) == 0:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    return H / math.sqrt(len(H))
