"""Between the qkv product and attention of other families than GPT-2: norms and rotation of heads, store of k and v.

One program prepares one head of one token. Queries and keys are normalised, each head alone, and then rotated; values
are only stored, in some models normalised too. Cosines and sines of the angles are computed once a step
(`Transformer.rotations`) for all layers that share them. Some layers have fewer projections: in place of values, the
keys as they are before norm and rotation; or queries alone, because the keys are those of an earlier layer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .epilogue import Places, load_place
from .launch import launch_options, wait_for_predecessor
from .rows import Norm, check_contiguous, statistics


@triton.jit
def load_normed(x, gain, shift, dims, mean, rstd, D: tl.constexpr):
    """Return dimensions of a head as float32, normalised if there is a gain."""
    y = tl.load(x + dims, mask=dims < D, other=0.0).to(tl.float32)
    if gain is not None:
        y = (y - mean) * rstd * tl.load(gain + dims, mask=dims < D, other=0.0).to(tl.float32)
    if shift is not None:
        y += tl.load(shift + dims, mask=dims < D, other=0.0).to(tl.float32)
    return y


@triton.jit
def value_factor(x, dims, eps, D: tl.constexpr):
    """Return what a head of values is multiplied by: 1 / its root mean square, or 1 without an eps."""
    factor = 1.0
    if eps is not None:
        _, _, factor = statistics(x, dims, eps, D, True)
    return factor


@triton.jit(do_not_specialize=["num_new"])
def heads_kernel(
    out, qkv, keys, values, slots, pos, cos, sin, gain, shift,
    num_new, stride_slots, stride_slot, stride_head, stride_token, stride_angle, stride_angle_head, eps, value_eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, RMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (token, head of queries, keys or values). HALF: the number of pairs that are rotated.

    HEADS: those of a row of qkv. If there are none of values, they are the keys'.
    """
    wait_for_predecessor(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    x = qkv + (token * HEADS + tl.where(head < HEADS, head, head - K)) * D
    y = tl.load(x + dims, mask=dims < D, other=0.0).to(tl.float32)
    if head < H + K:
        mean, rstd = 0.0, 1.0
        if gain is not None:
            gain += head * D
            _, mean, rstd = statistics(x, dims, eps, D, RMS)
        if shift is not None:
            shift += head * D
        y = load_normed(x, gain, shift, dims, mean, rstd, D)
        if cos is not None:
            partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
            at = token * stride_angle + head * stride_angle_head + dims
            y *= tl.load(cos + at, mask=dims < 2 * HALF, other=1.0)
            z = load_normed(x, gain, shift, partner, mean, rstd, D)
            y += z * tl.load(sin + at, mask=dims < 2 * HALF, other=0.0)
    else:
        y *= value_factor(x, dims, value_eps, D)
    if head < H:
        tl.store(out + (token * H + head) * D + dims, y.to(out.dtype.element_ty), mask=dims < D)
    else:
        position = tl.load(pos + token)
        end = token + 1
        place = load_place(slots, token, position, end, num_new, stride_slots, stride_slot, stride_token)
        kept = y.to(keys.dtype.element_ty)
        if head < H + K:
            tl.store(keys + place + (head - H) * stride_head + dims, kept, mask=dims < D)
        else:
            tl.store(values + place + (head - H - K) * stride_head + dims, kept, mask=dims < D)


def store_heads(
    qkv: Tensor, out: Tensor, places: Places, norm: Norm | None = None, angles: tuple[Tensor, Tensor] | None = None,
    value_eps: float | None = None,
) -> None:  # fmt: skip
    """Write normalised and rotated queries to `out`, such keys and the values to their places in the cache.

    Args:
        qkv: contiguous, any float type: queries, keys and values of M = R * n tokens, (M, (H + 2K) * D); without
            values, (M, (H + K) * D), the keys before norm and rotation are stored as values; queries alone,
            (M, H * D), store nothing.
        out: (M, H * D) contiguous.
        places: keys and values of K heads.
        norm: of each head; weight and bias are (H + K, D) contiguous, of queries and then of keys, or (H, D) where qkv
            has queries alone. None: no norm.
        angles: cosine and sine, (R, n, 1 or H + K, dim) float32 contiguous, as in models/layers.py. None: no rotation.
        value_eps: of an RMS norm without weight of each head of values; None: they have no norm.

    Raises:
        ValueError: shapes or strides do not match.
    """
    num_new, (_, K, _, D) = places.pos.shape[-1], places.keys.shape
    (M, width), H = qkv.shape, out.shape[1] // D
    check_contiguous(qkv=qkv, out=out, pos=places.pos)
    if width not in (H * D, (H + K) * D, (H + 2 * K) * D) or out.shape != (M, H * D) or places.pos.numel() != M:
        raise ValueError(
            f"qkv of shape {tuple(qkv.shape)}, out of {tuple(out.shape)}, {places.pos.numel()} positions: need"
            f" H, H + {K} or H + 2 * {K} times {D} columns, H * {D} columns, and as many rows as positions"
        )
    if norm is not None:
        check_contiguous(weight=norm.weight, **({} if norm.bias is None else {"bias": norm.bias}))
        if norm.weight.shape != (min(width // D, H + K), D):
            raise ValueError(f"weight of {tuple(norm.weight.shape)}: need {min(width // D, H + K)} heads of {D} values")
    cos, sin, rotated, strides = None, None, 0, (0, 0)
    if angles is not None:
        cos, sin = angles
        check_contiguous(cos=cos, sin=sin)
        heads, rotated = cos.shape[-2:]
        if cos.shape != sin.shape or cos.numel() != M * heads * rotated or heads not in (1, H + K) or rotated > D:
            raise ValueError(f"cos of {tuple(cos.shape)}, sin of {tuple(sin.shape)}: need {M} x (1 or {H + K}) x dim")
        strides = heads * rotated, 0 if heads == 1 else rotated
    heads_kernel[(M, H if width == H * D else H + 2 * K)](
        out, qkv, places.keys, places.values, places.slots, places.pos, cos, sin, norm and norm.weight,
        norm and norm.bias, num_new, places.slots.stride(0), *places.keys.stride()[:3], *strides,
        norm.eps if norm else 0.0, value_eps, H=H, K=K, HEADS=width // D, D=D, BLOCK_D=triton.next_power_of_2(D),
        HALF=rotated // 2, RMS=norm is not None and norm.rms, num_warps=1, **launch_options(qkv.device),
    )  # fmt: skip
