"""Weights as the Triton kernels read them: dense, or in 8 or 4 bits. `dequantize` is the definition of every format.

    dense   (N, K) float32, bfloat16, float16       w = data
    int8    (N, K) int8, scale (N,) float32         w = data * scale                     8 bits a weight
    int4    (N, G * group / 2) uint8,               w = (code - zero) * scale            4.375 bits at groups of 64
            scale (N, G) bfloat16, zero (N, G) uint8, G = ceil(K / group)

A byte of int4 holds two codes of the same group that stand half a group apart, so that unpacking is a mask and a shift,
with no value moved between threads, and the inputs of either half are read in order:

    group of 8:   codes  0 1 2 3 4 5 6 7   ->   bytes  0|4<<4  1|5<<4  2|6<<4  3|7<<4

Zero points are codes, so that a weight of 0 stays 0; scales are bfloat16 for their range, and rounded before the codes
are chosen. Every tensor may have more dimensions in front (layers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 64
CLIP_RATIOS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64)
"""Shares of a group's range that the codes may span: clipping outliers often costs less than coarse steps."""
ROWS_AT_A_TIME = 8192
"""Output rows that are searched together: a bound on the memory of the search, not on its result."""


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer, (..., N, K), in one of the formats above. On one device."""

    data: Tensor
    num_inputs: int
    """K: what a row of `data` stands for, padding left out."""
    bits: int
    """32, 16, 8 or 4: what a weight takes."""
    operand: torch.dtype
    """What is multiplied where there are several rows: the dtype of dense weights, of what was quantized otherwise."""
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = 0
    """Weights that share a scale; 0 where there are no groups."""

    @property
    def num_outputs(self) -> int:
        """N, the number of output channels."""
        return self.data.shape[-2]

    def layer(self, index: int) -> Weight:
        """Return one layer of a stack, a view."""
        scale, zero = (None if t is None else t[index] for t in (self.scale, self.zero))
        return replace(self, data=self.data[index], scale=scale, zero=zero)

    def num_bytes(self) -> int:
        """Return the bytes that a kernel reads to use this weight once."""
        return sum(t.numel() * t.itemsize for t in (self.data, self.scale, self.zero) if t is not None)


def stack(weights: list[Weight]) -> Weight:
    """Return weights of one shape and format as one, with a dimension of layers in front."""
    first = weights[0]
    data = torch.stack([w.data for w in weights])
    scales = [w.scale for w in weights if w.scale is not None]
    zeros = [w.zero for w in weights if w.zero is not None]
    scale, zero = (torch.stack(t) if t else None for t in (scales, zeros))
    return replace(first, data=data, scale=scale, zero=zero)


def dense(weight: Tensor) -> Weight:
    """Return a weight, (N, K) float32, bfloat16 or float16, as it is: a view where it is contiguous."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weight of {weight.dtype}: the kernels read float32, bfloat16 and float16")
    return Weight(weight.contiguous(), weight.shape[-1], 8 * weight.itemsize, weight.dtype)


def pack_int8(weight: Tensor) -> Weight:
    """Return a weight, (N, K) of any float type, in 8 bits: symmetric, one scale for each output.

    Raises:
        ValueError: a weight is infinite or not a number.
    """
    w = weight.float()
    scale = _at_least_normal(_largest(w).squeeze(-1) / 127)
    codes = (w / scale[..., None]).round().clamp(-127, 127).to(torch.int8)
    return Weight(codes, w.shape[-1], 8, weight.dtype, scale)


def pack_int4(weight: Tensor, group: int = GROUP) -> Weight:
    """Return a weight, (N, K) of any float type, in 4 bits: scale and zero point for each `group` inputs of an output.

    Of the candidates CLIP_RATIOS, each group takes the one with the least squared error. The same on every device.

    Args:
        weight: (N, K); K may be no multiple of the group, which is then padded with zeros.
        group: 32 or 64.

    Raises:
        ValueError: another group, or a weight that is infinite or not a number.
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
    """Return the values, (..., N, K) in `dtype`, that a weight stands for: computed in float32, rounded once."""
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
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)  # (N, G): 0 is always within
    unit = _at_least_normal(high / 15 - low / 15)  # errors are counted in steps of it: no overflow
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
        raise ValueError("weights that are infinite or not a number cannot be quantized: check the checkpoint")
    return largest


def _at_least_normal(scale: Tensor) -> Tensor:
    """Keep rows of zeros, and of less than any scale, from dividing by zero."""
    return scale.clamp(min=torch.finfo(torch.float32).tiny)
