"""Weight formats of the Triton kernels: dense, int8 and int4. `dequantize` defines the value of each format.

    dense   (N, K) float32, bfloat16, float16       w = data
    int8    (N, K) int8, scale (N,) float32         w = data * scale                     8 bits a weight
    int4    (N, G * group / 2) uint8,               w = (code - zero) * scale            4.375 bits at groups of 64
            scale (N, G) bfloat16, zero (N, G) uint8, G = ceil(K / group)

A byte of int4 holds two codes of the same group that are half a group apart. Unpacking is then a mask and a shift that
moves no value between threads, and the inputs of each half are read in order:

    group of 8:   codes  0 1 2 3 4 5 6 7   ->   bytes  0|4<<4  1|5<<4  2|6<<4  3|7<<4

Zero points are integers, so that a weight of 0 stays 0. Scales are bfloat16 for its range, and are rounded before the
codes are chosen. All tensors may have further leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64
CLIP_RATIOS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64)
"""Fractions of a group's range that the codes span: clipping outliers often gives a smaller error than larger steps."""
ROWS_AT_A_TIME = 8192
"""Output rows that are searched together. It bounds the memory of the search and does not change the result."""


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer, (..., N, K), in one of the formats above. All tensors are on one device."""

    data: Tensor
    num_inputs: int
    """K, the number of inputs without padding."""
    bits: int
    """Bits of a weight: 32, 16, 8 or 4."""
    operand: torch.dtype
    """Dtype of the operands of `tl.dot`: that of the weight before quantization."""
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = 0
    """Number of weights that share a scale; 0: one scale for each output, or none."""

    @property
    def num_outputs(self) -> int:
        """N, the number of output channels."""
        return self.data.shape[-2]

    def num_bytes(self) -> int:
        """Return the bytes that a kernel reads in one use of this weight."""
        return sum(t.numel() * t.itemsize for t in (self.data, self.scale, self.zero) if t is not None)


def dense(weight: Tensor) -> Weight:
    """Return a weight, (N, K) float32, bfloat16 or float16, in the dense format: a view if it is contiguous."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weight of {weight.dtype}: the kernels read float32, bfloat16 and float16")
    return Weight(weight.contiguous(), weight.shape[-1], 8 * weight.itemsize, weight.dtype)


def pack_int8(weight: Tensor) -> Weight:
    """Return a weight, (N, K) of any float type, quantized to 8 bits: symmetric, with one scale for each output.

    Raises:
        ValueError: a weight is infinite or NaN.
    """
    w = weight.float().contiguous()
    scale = _at_least_normal(_largest(w).squeeze(-1) / 127)
    codes = (w / scale[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Weight(codes, w.shape[-1], 8, weight.dtype, scale)


def pack_int4(weight: Tensor, group: int = GROUP) -> Weight:
    """Return a weight, (N, K) of any float type, quantized to 4 bits: scale and zero point for each group of inputs.

    Each group uses the ratio of CLIP_RATIOS with the least squared error. The result is the same on every device.

    Args:
        weight: (N, K). If K is not a multiple of the group size, the last group is padded with zeros.
        group: number of inputs in a group, 32 or 64.

    Raises:
        ValueError: another group size, or a weight is infinite or NaN.
    """
    if group not in (32, 64):
        raise ValueError(f"group={group} is not supported: use 32 or 64")
    _largest(weight.float())
    parts = [_search(w, group) for w in weight.split(ROWS_AT_A_TIME)]
    codes, scale, zero = (torch.cat(p) for p in zip(*parts, strict=True))
    low, high = codes.chunk(2, dim=-1)  # (N, G, group / 2) each
    data = (low | high << 4).flatten(-2)
    return Weight(data, weight.shape[-1], 4, weight.dtype, scale, zero, group)


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a weight, (..., N, K) in `dtype`, computed in float32 and rounded once."""
    if weight.scale is None:
        return weight.data.to(dtype)
    if weight.zero is None:
        return (weight.data.float() * weight.scale[..., None]).to(dtype)
    packed = weight.data.unflatten(-1, (-1, weight.group // 2))
    codes = torch.cat([packed & 15, packed >> 4], dim=-1)  # (..., N, G, group)
    values = (codes.float() - weight.zero[..., None].float()) * weight.scale[..., None].float()
    return values.flatten(-2)[..., : weight.num_inputs].to(dtype)


def _search(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (N, G, group) uint8, scale (N, G) bfloat16 and zero (N, G) uint8 of least squared error."""
    n, k = weight.shape
    w = torch.nn.functional.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)  # (N, G): the range always includes 0
    unit = _at_least_normal(high / 15 - low / 15)  # errors are computed in this unit, to avoid overflow
    best = tuple(torch.zeros_like(t, dtype=d) for t, d in ((w, torch.uint8), (low, torch.bfloat16), (low, torch.uint8)))
    best_error = torch.full_like(low, torch.inf)
    for ratio in CLIP_RATIOS:
        scale = _at_least_normal(unit * ratio).to(torch.bfloat16)
        step = scale.float()
        zero = (-low * ratio / step).round().clamp(0, 15)
        exact = w / step[..., None]
        codes = (exact.round() + zero[..., None]).clamp(0, 15)
        error = (codes - zero[..., None] - exact).square().sum(-1) * (step / unit).square()
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        found = codes.to(torch.uint8), scale, zero.to(torch.uint8)
        picks = better[..., None], better, better
        best = tuple(torch.where(p, f, b) for p, f, b in zip(picks, found, best, strict=True))
    codes, scale, zero = best
    return codes, scale, zero


def _largest(w: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (..., N, 1)."""
    largest = w.abs().amax(-1, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weights that are infinite or NaN cannot be quantized: check the checkpoint")
    return largest


def _at_least_normal(scale: Tensor) -> Tensor:
    """Clamp scales to normal floats, so that rows of zeros or tiny values do not divide by zero."""
    return scale.clamp(min=torch.finfo(torch.float32).tiny)
