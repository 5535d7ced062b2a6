"""The norm of rows: layer norm or RMS norm."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch_options, wait_for_predecessor


@dataclass(frozen=True)
class Norm:
    """Parameters of a norm."""

    weight: Tensor
    """What values are multiplied by: 1 + the weight, or ones, for norms that are defined so."""
    bias: Tensor | None
    eps: float
    rms: bool = False
    """Whether it is RMS norm, which subtracts no mean."""


@triton.jit
def statistics(row, cols, eps, C: tl.constexpr, RMS: tl.constexpr):
    """Return the row as float32, its mean, and 1 / its standard deviation. cols: 0, 1, ...: a power of two >= C.

    RMS: the mean counts as 0.
    """
    values = tl.load(row + cols, mask=cols < C, other=0.0).to(tl.float32)
    mean = 0.0
    if not RMS:
        mean = tl.sum(values, 0) / C
    away = tl.where(cols < C, values - mean, 0.0)
    return values, mean, tl.rsqrt(tl.sum(away * away, 0) / C + eps)


@triton.jit
def norm_kernel(
    out, x, count, gain, shift, stride, eps,
    N: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (row). Compute out[row] = norm of x[row], or of the last new token of the row's N if count is set."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < C
    factor = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32)
    if shift is not None:
        offset = tl.load(shift + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    token = row
    if count is not None:
        token = row * N + tl.maximum(tl.load(count + row * stride), 1) - 1
    values, mean, rstd = statistics(x + token * C, cols, eps, C, RMS)
    y = (values - mean) * rstd * factor
    if shift is not None:
        y += offset
    tl.store(out + row * C + cols, y.to(out.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, norm: Norm, out: Tensor, count: Tensor | None = None) -> None:
    """Write the norm of x to `out`, both (M, C) contiguous; `out` may be x.

    Args:
        x: (M, C); (R * n, C) with a count.
        norm: its parameters.
        out: (M, C); (R, C) with a count.
        count: (R,) int64, any stride: only token max(count[r], 1) - 1 of the n tokens of each row r is normalised.
    """
    (M, C), R = x.shape, out.shape[0]
    check_contiguous(x=x, out=out)
    if M != R and (count is None or count.shape != (R,) or M % R):
        raise ValueError(f"x of {M} rows, out of {R}: need as many, or a count for each row of out")
    norm_kernel[(R,)](
        out, x, count, norm.weight, norm.bias, 0 if count is None else count.stride(0), norm.eps,
        N=M // R, C=C, BLOCK=triton.next_power_of_2(C), RMS=norm.rms, **launch_options(x.device),
    )  # fmt: skip


def check_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not contiguous."""
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {t.stride()}: call contiguous() first")
