"""The first and the last kernel of a step: the sum of token and position embeddings, and the final layer norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .products import Norm


@triton.jit
def embed_kernel(out, idx, pos, wte, wpe, num_positions, C: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (row). Compute out[row] = wte[idx[row]] + wpe[pos[row]]."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    token = tl.load(idx + row).to(tl.int64)
    position = tl.minimum(tl.load(pos + row), num_positions - 1).to(tl.int64)  # padding is past the last
    x = tl.load(wte + token * C + cols, mask=cols < C, other=0.0).to(tl.float32)
    x += tl.load(wpe + position * C + cols, mask=cols < C, other=0.0).to(tl.float32)
    tl.store(out + row * C + cols, x.to(out.dtype.element_ty), mask=cols < C)


@triton.jit
def norm_kernel(out, x, gain, shift, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (row). Compute out[row] = layer norm of x[row]."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    values = tl.load(x + row * C + cols, mask=inside, other=0.0).to(tl.float32)
    away = tl.where(inside, values - tl.sum(values, 0) / C, 0.0)
    y = away * tl.rsqrt(tl.sum(away * away, 0) / C + eps)
    y *= tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32)
    if shift is not None:
        y += tl.load(shift + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * C + cols, y.to(out.dtype.element_ty), mask=inside)


def embed(idx: Tensor, pos: Tensor, wte: Tensor, wpe: Tensor, out: Tensor) -> None:
    """Write wte[idx] + wpe[pos] to `out`, (M, C).

    Args:
        idx: (M,) int64 contiguous, token ids < V.
        pos: (M,) int64 contiguous, positions. Padding, at the position past the last, gets the last one's embedding.
        wte: (V, C) contiguous.
        wpe: (positions, C) contiguous.
        out: (M, C) contiguous.
    """
    C = wte.shape[1]
    _contiguous(idx=idx, pos=pos, wte=wte, wpe=wpe, out=out)
    embed_kernel[(idx.numel(),)](out, idx, pos, wte, wpe, wpe.shape[0], C=C, BLOCK=triton.next_power_of_2(C))


def layer_norm(x: Tensor, norm: Norm, out: Tensor) -> None:
    """Write the layer norm of x to `out`, both (M, C) contiguous."""
    C = x.shape[1]
    _contiguous(x=x, out=out)
    norm_kernel[(x.shape[0],)](out, x, norm.weight, norm.bias, norm.eps, C=C, BLOCK=triton.next_power_of_2(C))


def _contiguous(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not contiguous."""
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {t.stride()}: call contiguous() first")
