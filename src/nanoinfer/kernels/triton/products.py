"""out = epilogue(norm(x) @ w.T + bias) for 1 to 16 rows: a linear layer of a decode step with its surroundings, fused.

One launch computes the layer norm of the rows (every program recomputes the statistics: the rows are a few kilobytes,
and a separate launch would take longer), the product, the bias, and then one of

    GELU                      in the first half of the MLP
    a residual                x + ..., which may be written in place
    the store of k and v      q is written to `out`, and k and v to their token's place in the KV cache

Weights are read once, in any format of quantize.py; sums are float32. With one row, each thread multiplies and adds its
own values. With up to 16 rows, `tl.dot` multiplies 16 rows with operands in the weight's dtype (float32 in full
precision, without TF32). If tiles.py splits the inputs between programs, a second launch adds the parts in order, so
that the result does not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantize import Weight
from .tiles import Tile, multiprocessors, product_tile

MAX_ROWS = 16
GELU_TANH, GELU_ERF = 1, 2
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Python on the CPU (TRITON_INTERPRET=1). Dots are then float32: NumPy has no bfloat16."""


@dataclass(frozen=True)
class Norm:
    """Parameters of a layer norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Pages:
    """One layer's keys and values, and the places of a step's tokens in them.

    Position j of row r is in block table[r, j // block_len], at index j % block_len. For a cache in slots, the table
    has one column and a block is a slot.
    """

    keys: Tensor
    """(num_blocks, H, block_len, D), the last dimension contiguous."""
    values: Tensor
    """Like the keys, with the same strides."""
    table: Tensor
    """(R, columns) int64: blocks of each row."""
    pos: Tensor
    """(R, n) int64: position of each new token. Padding has a position that is never read."""


@dataclass(frozen=True)
class Epilogue:
    """Operations after the product. At most one of `gelu`, `residual` and `store` may be set."""

    bias: Tensor | None = None
    gelu: int = 0
    """0, GELU_TANH or GELU_ERF."""
    residual: Tensor | None = None
    """(M, N); may be the output tensor."""
    store: Pages | None = None
    """Destination of k and v if the N = 3C columns are q, k and v; q is written to the output, (M, C)."""


@triton.jit
def row_statistics(x, num_rows, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return mean and 1 / standard deviation, (BLOCK_M,), of rows of K; parts are merged as by Chan et al. 1979."""
    rows = tl.arange(0, BLOCK_M)
    mean = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        inside = (rows < num_rows)[:, None] & (cols < K)[None, :]
        part = tl.load(x + rows[:, None] * K + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(K - start, BLOCK_K)
        part_mean = tl.sum(part, 1) / count
        away = tl.where(inside, part - part_mean[:, None], 0.0)
        shift = part_mean - mean
        share = count / (start + count)
        mean += shift * share
        squares += tl.sum(away * away, 1) + shift * shift * share * start
    return mean, tl.rsqrt(squares / K + eps)


@triton.jit
def load_rows(x, gain, shift, mean, rstd, cols, num_rows, K: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return rows of x, normalised if there is a gain: (BLOCK_M, cols) float32, zero outside."""
    rows = tl.arange(0, BLOCK_M)
    inside = (rows < num_rows)[:, None] & (cols < K)[None, :]
    a = tl.load(x + rows[:, None] * K + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if gain is not None:
        a = (a - mean[:, None]) * rstd[:, None]
        a *= tl.load(gain + cols, mask=cols < K, other=0.0).to(tl.float32)[None, :]
        if shift is not None:
            a += tl.load(shift + cols, mask=cols < K, other=0.0).to(tl.float32)[None, :]
        a = tl.where(inside, a, 0.0)
    return a


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """Return acc + a @ b without TF32. WIDEN computes in float32 for the interpreter, where products are exact."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def multiply_add(acc, a, w, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr):
    """Add one block's products to acc: elementwise, (BLOCK_N, BLOCK_K), for one row; a dot, (16, BLOCK_N), for more."""
    if BLOCK_M == 1:
        acc += w.to(tl.float32) * a
    else:
        if WIDEN:
            w = w.to(tl.float32)  # NumPy would reinterpret an integer's bits as bfloat16
        acc = dot(a.to(OPERAND), tl.trans(w.to(OPERAND)), acc, WIDEN)
    return acc


@triton.jit
def each_of_group(of_groups, COUNT: tl.constexpr):
    """Repeat each group's value for its members: (N, G) -> (N, G * COUNT)."""
    wide = tl.broadcast_to(of_groups[:, :, None], (of_groups.shape[0], of_groups.shape[1], COUNT))
    return tl.reshape(wide, (of_groups.shape[0], of_groups.shape[1] * COUNT))


@triton.jit
def sum_dense(
    x, w, gain, shift, mean, rstd, rows, num_rows, first, last,
    K: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the sums over inputs [first, last) of the weights of `rows`, dense or int8."""
    if BLOCK_M == 1:
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, tl.minimum(last, K), BLOCK_K, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_K)
        at = w + rows[:, None] * K + cols[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(cols < K)[None, :], other=0)
        a = load_rows(x, gain, shift, mean, rstd, cols, num_rows, K, BLOCK_M)
        acc = multiply_add(acc, a, tile, OPERAND, BLOCK_M, WIDEN)
    return acc


@triton.jit
def sum_packed(
    x, w, scale, zero, gain, shift, mean, rstd, rows, num_rows, first, last,
    K: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the sums over inputs [first, last) of the weights of `rows`, int4."""
    HALF: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    BYTES: tl.constexpr = BLOCK_K // 2
    if BLOCK_M == 1:
        acc = tl.zeros((BLOCK_N, BYTES), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first // 2, tl.minimum(last, GROUPS * GROUP) // 2, BYTES, num_stages=STAGES):
        places = start + tl.arange(0, BYTES)  # bytes of a row: each holds one code of each half of its group
        group = places // HALF
        groups = start // HALF + tl.arange(0, BYTES // HALF)
        at = w + rows[:, None] * (GROUPS * HALF) + places[None, :]
        about = rows[:, None] * GROUPS + groups[None, :]
        if K % BLOCK_K == 0:
            packed = tl.load(at)
            step = tl.load(scale + about)
            origin = tl.load(zero + about)
        else:
            packed = tl.load(at, mask=(group < GROUPS)[None, :], other=0)
            step = tl.load(scale + about, mask=(groups < GROUPS)[None, :], other=0.0)
            origin = tl.load(zero + about, mask=(groups < GROUPS)[None, :], other=0)
        step = each_of_group(step.to(tl.float32), HALF)
        origin = each_of_group(origin.to(tl.float32), HALF)
        low = ((packed & 15).to(tl.float32) - origin) * step
        high = ((packed >> 4).to(tl.float32) - origin) * step
        cols = group * GROUP + places % HALF
        a = load_rows(x, gain, shift, mean, rstd, cols, num_rows, K, BLOCK_M)
        acc = multiply_add(acc, a, low, OPERAND, BLOCK_M, WIDEN)
        a = load_rows(x, gain, shift, mean, rstd, cols + HALF, num_rows, K, BLOCK_M)
        acc = multiply_add(acc, a, high, OPERAND, BLOCK_M, WIDEN)
    return acc


@triton.jit
def finish(
    acc, out, bias, residual, keys, values, table, pos, outputs, num_rows, num_outputs, num_new,
    stride_table, stride_block, stride_head, stride_token,
    GELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_LEN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to the sums and store the results."""
    rows = tl.arange(0, BLOCK_M)
    valid = outputs < num_outputs
    inside = (rows < num_rows)[:, None] & valid[None, :]
    if bias is not None:
        acc += tl.load(bias + outputs, mask=valid, other=0.0).to(tl.float32)[None, :]
    if GELU == 1:  # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)); if exp overflows, the result is 0
        u = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
        acc = acc / (1.0 + tl.exp(-2.0 * u))
    if GELU == 2:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    if keys is None:
        at = rows[:, None] * num_outputs + outputs[None, :]
        if residual is not None:
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
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
        position = tl.load(pos + rows, mask=rows < num_rows, other=0)
        block = tl.load(table + (rows // num_new) * stride_table + position // BLOCK_LEN, mask=rows < num_rows, other=0)
        token = block * stride_block + (position % BLOCK_LEN) * stride_token
        at = token[:, None] + ((channel // D) * stride_head + channel % D)[None, :]
        kept = acc.to(keys.dtype.element_ty)
        tl.store(keys + at, kept, mask=inside & (part == 1)[None, :])
        tl.store(values + at, kept, mask=inside & (part == 2)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_new"])
def product_kernel(
    out, x, w, scale, zero, gain, shift, bias, residual, keys, values, table, pos, parts,
    num_rows, num_outputs, num_new, stride_table, stride_block, stride_head, stride_token, eps,
    K: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr, OPERAND: tl.constexpr, BLOCK_LEN: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid: (tile, split). Each program computes one tile's columns over one part of the inputs."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    mean, rstd = 0.0, 0.0
    if gain is not None:
        mean, rstd = row_statistics(x, num_rows, eps, K, BLOCK_M, BLOCK_K)
    # Columns past the last output read the last one again, so that the loop's 16-byte loads need no mask.
    columns = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = split * SHARE
    if GROUP == 0:
        acc = sum_dense(
            x, w, gain, shift, mean, rstd, columns, num_rows, first, first + SHARE,
            K, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WIDEN,
        )  # fmt: skip
    else:
        acc = sum_packed(
            x, w, scale, zero, gain, shift, mean, rstd, columns, num_rows, first, first + SHARE,
            K, GROUP, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WIDEN,
        )  # fmt: skip
    if BLOCK_M == 1:
        acc = tl.sum(acc, 1)[None, :]
    if (GROUP == 0) and (scale is not None):
        acc *= tl.load(scale + columns)[None, :]
    if SPLITS == 1:
        finish(
            acc, out, bias, residual, keys, values, table, pos, outputs, num_rows, num_outputs, num_new,
            stride_table, stride_block, stride_head, stride_token, GELU, BLOCK_M, BLOCK_LEN, D,
        )  # fmt: skip
    else:
        rows = tl.arange(0, BLOCK_M)
        inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
        at = (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
        tl.store(parts + at, acc, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_new"])
def add_parts_kernel(
    out, parts, bias, residual, keys, values, table, pos,
    num_rows, num_outputs, num_new, stride_table, stride_block, stride_head, stride_token,
    GELU: tl.constexpr, BLOCK_LEN: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (tile). Add the parts of one tile's columns in order, then apply the epilogue."""
    rows = tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
        acc += tl.load(parts + at, mask=inside, other=0.0)
    finish(
        acc, out, bias, residual, keys, values, table, pos, outputs, num_rows, num_outputs, num_new,
        stride_table, stride_block, stride_head, stride_token, GELU, BLOCK_M, BLOCK_LEN, D,
    )  # fmt: skip


def product(
    x: Tensor, weight: Weight, out: Tensor, norm: Norm | None = None, epilogue: Epilogue | None = None,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Write epilogue(norm(x) @ weight.T + bias) to `out`. This is one launch, or two if the inputs are split.

    The last bits of the result depend on the tile, but not on timing.

    Args:
        x: (M, K), 1 <= M <= 16, float32, bfloat16 or float16, contiguous, on the weight's device.
        weight: (N, K).
        out: (M, N), contiguous, any of these types; (M, N / 3) if the epilogue stores k and v.
        norm: layer norm to apply to the rows of x; None: no norm.
        epilogue: operations after the product; None: no operation.
        tile: tile sizes; None: chosen by tiles.py for this device.

    Raises:
        ValueError: shapes do not match, or a tensor is not contiguous.
    """
    e = epilogue or Epilogue()
    rows, n, k = x.shape[0], weight.num_outputs, weight.num_inputs
    _check(x, weight, out, e)
    tile = tile or product_tile(n, k, rows, weight.bits, multiprocessors(x.device))
    BLOCK_M = 1 if rows == 1 else MAX_ROWS
    s = e.store
    cache = (s.keys, s.values, s.table, s.pos) if s else (None, None, None, None)
    strides = (s.table.stride(0), *s.keys.stride()[:3]) if s else (0, 0, 0, 0)
    shape = {"GELU": e.gelu, "BLOCK_LEN": s.keys.shape[2] if s else 1, "D": s.keys.shape[3] if s else 1}
    sizes = (rows, n, s.pos.shape[-1] if s else 1, *strides)
    parts = None
    if tile.num_splits > 1:
        parts = torch.empty(tile.num_splits, rows, n, device=x.device)
    product_kernel[(triton.cdiv(n, tile.block_n), tile.num_splits)](
        out, x, weight.data, weight.scale, weight.zero, norm and norm.weight, norm and norm.bias, e.bias, e.residual,
        *cache, parts, *sizes, norm.eps if norm else 0.0,
        K=k, GROUP=weight.group, OPERAND=DTYPES[weight.operand], BLOCK_M=BLOCK_M, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, SPLITS=tile.num_splits, STAGES=tile.num_stages, WIDEN=INTERPRETED,
        num_warps=tile.num_warps, **shape,
    )  # fmt: skip
    if parts is not None:
        add_parts_kernel[(triton.cdiv(n, 64),)](
            out, parts, e.bias, e.residual, *cache, *sizes, BLOCK_M=BLOCK_M, BLOCK_N=64, SPLITS=tile.num_splits, **shape
        )


def _check(x: Tensor, weight: Weight, out: Tensor, e: Epilogue) -> None:
    """Raise ValueError if the shapes do not match: a kernel would read past the end of a tensor."""
    rows, n = x.shape[0], weight.num_outputs
    if x.dim() != 2 or not 1 <= rows <= MAX_ROWS or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x of shape {tuple(x.shape)}: need (1 to {MAX_ROWS}, {weight.num_inputs})")
    wanted = (rows, n // 3 if e.store else n)
    for name, t in (("out", out), ("residual", e.residual)):
        if t is not None and tuple(t.shape) != wanted:
            raise ValueError(f"{name} of shape {tuple(t.shape)}: need {wanted}")
    for name, t in (("x", x), ("out", out), ("residual", e.residual), ("weight", weight.data)):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {t.stride()}: call contiguous() first")
    if e.store is not None:
        s = e.store
        if s.pos.numel() != rows or s.keys.stride() != s.values.stride() or s.keys.stride(-1) != 1:
            raise ValueError(
                f"pages: {s.pos.numel()} positions, strides {s.keys.stride()} of the keys, {s.values.stride()} of the"
                f" values: need {rows} positions and equal strides that end in 1"
            )
        if n != 3 * s.keys.shape[1] * s.keys.shape[3]:
            raise ValueError(f"weight of {n} outputs: keys of {tuple(s.keys.shape)} need 3 * H * D")
