"""What follows a matrix product in its kernel: biases, activations, gates, residuals, the store of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

GELU_TANH, GELU_ERF, SILU, RELU2, RELU = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Places:
    """One layer's keys and values, and the places of a step's tokens in them."""

    keys: Tensor
    """(num_slots, H, T, D), the last dimension contiguous."""
    values: Tensor
    """Like the keys, with the same strides, else ValueError."""
    slots: Tensor
    """(R,) int64: slot of each row."""
    pos: Tensor
    """(R, n) int64: position of each new token. Padding has a position that is never read."""

    def __post_init__(self) -> None:
        if self.keys.stride() != self.values.stride() or self.keys.stride(-1) != 1:
            raise ValueError(
                f"strides {self.keys.stride()} of the keys, {self.values.stride()} of the values: need equal ones that"
                " end in 1"
            )


@dataclass(frozen=True)
class Epilogue:
    """Operations after a product: at most one of `activation`, `residual` and `store`, or activation and gate."""

    bias: Tensor | None = None
    activation: int = 0
    """0, GELU_TANH, GELU_ERF, SILU, RELU2 or RELU."""
    residual: Tensor | None = None
    """(M, N); may be the output tensor."""
    scale: float = 1.0
    """Factor of the sums and biases, before the residual is added."""
    gates: bool = False
    """Whether the result is multiplied by the residual, in place of adding it."""
    store: Places | None = None
    """Destination of k and v if the N = 3C columns are q, k and v; q is written to the output, (M, C)."""


@triton.jit
def load_bias(bias, outputs, num_outputs):
    """Return the bias of the outputs, float32; zero if there is none."""
    values = tl.zeros(outputs.shape, tl.float32)
    if bias is not None:
        values = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    return values


@triton.jit
def load_residual(residual, rows, outputs, num_rows, num_outputs):
    """Return the residual, (rows, outputs) float32; zero if there is none."""
    values = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
    if residual is not None:
        inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
        values = tl.load(residual + rows[:, None] * num_outputs + outputs[None, :], mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def load_position(pos, rows, num_rows):
    """Return the position of each row's token; zero if nothing is stored in the cache."""
    position = tl.zeros(rows.shape, tl.int64)
    if pos is not None:
        position = tl.load(pos + rows, mask=rows < num_rows, other=0)
    return position


@triton.jit
def load_place(slots, rows, position, num_rows, num_new, stride_slots, stride_slot, stride_token):
    """Return the offset in the cache of the rows' tokens, which are at these positions."""
    slot = position
    if slots is not None:
        slot = tl.load(slots + (rows // num_new) * stride_slots, mask=rows < num_rows, other=0)
    return slot * stride_slot + position * stride_token


@triton.jit
def load_ends(
    residual, pos, slots, rows, outputs, num_rows, num_outputs, num_new, stride_slots, stride_slot, stride_token
):
    """Return what an epilogue reads that earlier kernels wrote: the residual, and the offset of the rows' tokens."""
    position = load_position(pos, rows, num_rows)
    before = load_residual(residual, rows, outputs, num_rows, num_outputs)
    place = load_place(slots, rows, position, num_rows, num_new, stride_slots, stride_slot, stride_token)
    return before, place


@triton.jit
def finish(
    acc, out, bias, before, token, keys, values, rows, outputs, num_rows, num_outputs, stride_head,
    ACTIVATION: tl.constexpr, GATES: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to the sums, with what the functions above loaded, and store the results."""
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    acc += bias[None, :]
    if ACTIVATION == 1:  # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)); if exp overflows, the result is 0
        u = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
        acc = acc / (1.0 + tl.exp(-2.0 * u))
    if ACTIVATION == 2:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    if ACTIVATION == 3:  # if exp overflows, the result is 0
        acc = acc / (1.0 + tl.exp(-acc))
    if ACTIVATION == 4:
        acc = tl.maximum(acc, 0.0) * tl.maximum(acc, 0.0)
    if ACTIVATION == 5:
        acc = tl.maximum(acc, 0.0)
    if SCALE != 1.0:
        acc *= SCALE
    if keys is None:
        at = rows[:, None] * num_outputs + outputs[None, :]
        if GATES:
            acc *= before
        else:
            acc += before
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    else:
        width = num_outputs // 3  # C
        part = outputs // width  # 0: q, 1: k, 2: v
        channel = outputs % width
        tl.store(
            out + rows[:, None] * width + channel[None, :],
            acc.to(out.dtype.element_ty),
            mask=inside & (part == 0)[None, :],
        )
        at = token[:, None] + ((channel // D) * stride_head + channel % D)[None, :]
        kept = acc.to(keys.dtype.element_ty)
        tl.store(keys + at, kept, mask=inside & (part == 1)[None, :])
        tl.store(values + at, kept, mask=inside & (part == 2)[None, :])
