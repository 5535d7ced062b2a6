"""out = epilogue(norm(x) @ w.T + bias): a linear layer of a step with its surroundings, fused.

The epilogue is the bias, and then one of

    an activation             in the first half of the MLP
    a residual                x + ..., which may be written in place
    a gate                    gate * ..., which may be written in place: a gated MLP
    the store of k and v      q is written to `out`, and k and v to their token's place in the KV cache

Weights are read once, in any format of quantize.py; sums are float32 (sums.py).

One row: one launch, with the layer norm in it. Every program computes the row's statistics (the row is a few
kilobytes), and the first weights are on their way meanwhile. Threads multiply and add their own values.

Several rows: the norm is a launch of its own. `tl.dot` multiplies a block of 16 to 128 rows with operands in the
weight's dtype (float32 in full precision, without TF32); codes become operands in the tile. If tiles.py splits the
inputs between programs, another launch adds the parts in order, so that the result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import Epilogue, finish, load_bias, load_ends, load_place, load_position, load_residual
from .launch import launch_options, wait_for_predecessor
from .quantize import Weight
from .rows import Norm, layer_norm, statistics
from .sums import (
    load_gain,
    load_scales,
    load_tile,
    low_columns,
    normalise,
    sum_row,
    sum_row_int4,
    sum_rows,
    sum_rows_int4,
)  # fmt: skip
from .tiles import Tile, multiprocessors, product_tile

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Python on the CPU (TRITON_INTERPRET=1). Dots are then float32: NumPy has no bfloat16."""


@triton.jit
def product_kernel(
    out, x, w, scale, zero, gain, shift, bias, residual, keys, values, slots, pos,
    num_outputs, stride_slot, stride_head, stride_token, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    GATES: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Grid: (tile). One row: each program computes one tile's columns. BLOCK: a power of two >= K."""
    end = tl.minimum((tl.program_id(0) + 1) * (BLOCK_N - SPARE), num_outputs)
    outputs = tl.program_id(0) * (BLOCK_N - SPARE) + tl.arange(0, BLOCK_N)
    # Columns past the program's last output read the last one again, so that 16-byte loads need no mask.
    columns = tl.minimum(outputs, end - 1).to(tl.int64)
    if SPARE > 0:
        outputs = tl.where(outputs < end, outputs, num_outputs)  # the next program's: not stored
    HALF: tl.constexpr = GROUP // 2
    # 1. Parameters: their loads are on the way while this waits, and while the row's statistics are computed.
    if GROUP == 0:
        cols = tl.arange(0, BLOCK_K)
        tile = load_tile(w, columns, 0, K, BLOCK_K)
    else:
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        cols = low_columns(0, GROUP, BLOCK_K // 2)
        tile = load_tile(w, columns, 0, GROUPS * HALF // 4, BLOCK_K // 8)
        step, origin = load_scales(scale, zero, columns, 0, GROUPS, HALF, BLOCK_K // 2)
        high_factor, high_offset = load_gain(gain, shift, cols + HALF, K)
    factor, offset = load_gain(gain, shift, cols, K)
    if (GROUP == 0) and (scale is not None):
        scales = tl.load(scale + columns)
    added = load_bias(bias, outputs, num_outputs)

    # 2. What earlier kernels wrote. The position is loaded first, because the place depends on it.
    wait_for_predecessor(PDL)
    row = tl.arange(0, 1)
    position = load_position(pos, row, 1)
    before = load_residual(residual, row, outputs, 1, num_outputs)
    a = tl.load(x + cols, mask=cols < K, other=0.0)
    if GROUP != 0:
        high = tl.load(x + cols + HALF, mask=cols + HALF < K, other=0.0)
    mean, rstd = 0.0, 0.0
    if gain is not None:
        _, mean, rstd = statistics(x, tl.arange(0, BLOCK), eps, K, RMS)
    token = load_place(slots, row, position, 1, 1, 0, stride_slot, stride_token)

    # 3. The sums.
    a = normalise(a, factor, offset, mean, rstd, gain is not None)
    if GROUP == 0:
        acc = sum_row(x, w, tile, a, gain, shift, mean, rstd, columns, K, BLOCK_N, BLOCK_K, STAGES)
    else:
        high = normalise(high, high_factor, high_offset, mean, rstd, gain is not None)
        acc = sum_row_int4(
            x, w, scale, zero, tile, step, origin, a, high, gain, shift, mean, rstd, columns,
            K, GROUP, BLOCK_N, BLOCK_K // 2, STAGES,
        )  # fmt: skip
    if (GROUP == 0) and (scale is not None):
        acc *= scales
    finish(
        acc[None, :], out, added, before, token, keys, values, row, outputs, 1, num_outputs, stride_head, ACTIVATION,
        GATES, SCALE, D)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_new"])
def product_rows_kernel(
    out, x, w, scale, zero, bias, residual, keys, values, slots, pos, parts,
    num_rows, num_outputs, num_new, stride_slots, stride_slot, stride_head, stride_token,
    K: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr, SCALE: tl.constexpr,
    OPERAND: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (block of rows, tile, split). Each program computes one tile of a block over one part of the inputs."""
    # The blocks of a tile follow one another, so that all but the first read its weights from the L2 cache.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    columns = tl.minimum(outputs, num_outputs - 1).to(tl.int64)  # as in product_kernel
    TURNS: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    added = load_bias(bias, outputs, num_outputs)
    if (GROUP == 0) and (scale is not None):
        scales = tl.load(scale + columns)
    wait_for_predecessor(PDL)
    EARLY: tl.constexpr = BLOCK_M == 16  # of more rows, it would take the registers of the sums
    if SPLITS == 1 and EARLY:
        before, token = load_ends(residual, pos, slots, rows, outputs, num_rows, num_outputs, num_new,
                                  stride_slots, stride_slot, stride_token)  # fmt: skip
    if GROUP == 0:
        first = split * (TURNS * BLOCK_K)
        acc = sum_rows(
            x, w, rows, columns, num_rows, first, first + TURNS * BLOCK_K,
            K, OPERAND, BLOCK_K, STAGES, WIDEN,
        )  # fmt: skip
    else:
        first = split * (TURNS * BLOCK_K // 2)
        acc = sum_rows_int4(
            x, w, scale, zero, rows, columns, num_rows, first, first + TURNS * BLOCK_K // 2,
            K, GROUP, OPERAND, BLOCK_K // 2, STAGES, WIDEN,
        )  # fmt: skip
    if (GROUP == 0) and (scale is not None):
        acc *= scales[None, :]
    if SPLITS == 1:
        if not EARLY:
            before, token = load_ends(
                residual,
                pos,
                slots,
                rows,
                outputs,
                num_rows,
                num_outputs,
                num_new,
                stride_slots,
                stride_slot,
                stride_token,
            )
        finish(
            acc, out, added, before, token, keys, values, rows, outputs, num_rows, num_outputs, stride_head, ACTIVATION,
            GATES, SCALE, D,
        )  # fmt: skip
    else:
        inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
        at = (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
        tl.store(parts + at, acc, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_new"])
def add_parts_kernel(
    out, parts, bias, residual, keys, values, slots, pos,
    num_rows, num_outputs, num_new, stride_slots, stride_slot, stride_head, stride_token,
    ACTIVATION: tl.constexpr, GATES: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (block of rows, tile). Add the parts of one tile of a block in order, then apply the epilogue."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    added = load_bias(bias, outputs, num_outputs)
    wait_for_predecessor(PDL)
    before, token = load_ends(residual, pos, slots, rows, outputs, num_rows, num_outputs, num_new,
                              stride_slots, stride_slot, stride_token)  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
        acc += tl.load(parts + at, mask=inside, other=0.0)
    finish(
        acc, out, added, before, token, keys, values, rows, outputs, num_rows, num_outputs, stride_head, ACTIVATION,
        GATES, SCALE, D,
    )  # fmt: skip


def product(
    x: Tensor, weight: Weight, out: Tensor, norm: Norm | None = None, epilogue: Epilogue | None = None,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Write epilogue(norm(x) @ weight.T + bias) to `out`: one launch, or up to three for several rows.

    The last bits of the result depend on the tile, but not on timing.

    Args:
        x: (M, K), M >= 1, float32, bfloat16 or float16, contiguous, on the weight's device.
        weight: (N, K).
        out: (M, N), contiguous, any of these types; (M, N / 3) if the epilogue stores k and v.
        norm: norm to apply to the rows of x; None: no norm.
        epilogue: operations after the product; None: no operation.
        tile: tile sizes; None: chosen by tiles.py for this device.

    Raises:
        ValueError: shapes do not match, or a tensor is not contiguous.
    """
    e = epilogue or Epilogue()
    rows, n, k = x.shape[0], weight.num_outputs, weight.num_inputs
    _check(x, weight, out, e)
    tile = tile or product_tile(n, k, rows, weight.bits, multiprocessors(x.device), 8 * weight.operand.itemsize)
    data = weight.data.view(torch.int32) if weight.group else weight.data  # 4 bytes of codes at a time
    s = e.store
    cache = (s.keys, s.values, s.slots, s.pos) if s else (None, None, None, None)
    strides = s.keys.stride()[:3] if s else (0, 0, 0)
    shape = {"ACTIVATION": e.activation, "GATES": e.gates, "SCALE": e.scale}
    shape |= {"D": s.keys.shape[3] if s else 1, **launch_options(x.device)}
    sizes = {"K": k, "GROUP": weight.group, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.num_stages}
    if rows == 1:
        if tile.num_splits > 1:
            raise ValueError(f"num_splits={tile.num_splits} for one row: only the inputs of several rows are split")
        product_kernel[(triton.cdiv(n, tile.block_n - tile.spare),)](
            out, x, data, weight.scale, weight.zero, norm and norm.weight, norm and norm.bias, e.bias, e.residual,
            *cache, n, *strides, norm.eps if norm else 0.0, BLOCK=triton.next_power_of_2(k), SPARE=tile.spare,
            RMS=norm is not None and norm.rms, num_warps=tile.num_warps, **sizes, **shape,
        )  # fmt: skip
        return
    if norm is not None:
        normed = torch.empty(rows, k, dtype=weight.operand, device=x.device)
        layer_norm(x, norm, normed)
        x = normed
    parts = torch.empty(tile.num_splits, rows, n, device=x.device) if tile.num_splits > 1 else None
    numbers = (rows, n, s.pos.shape[-1] if s else 1, s.slots.stride(0) if s else 0, *strides)
    row_blocks = triton.cdiv(rows, tile.block_m)
    product_rows_kernel[(row_blocks, triton.cdiv(n, tile.block_n), tile.num_splits)](
        out, x, data, weight.scale, weight.zero, e.bias, e.residual, *cache, parts, *numbers,
        OPERAND=DTYPES[weight.operand], BLOCK_M=tile.block_m, SPLITS=tile.num_splits, WIDEN=INTERPRETED,
        num_warps=tile.num_warps, **sizes, **shape,
    )  # fmt: skip
    if parts is not None:
        add_parts_kernel[(triton.cdiv(rows, 16), triton.cdiv(n, 64))](
            out, parts, e.bias, e.residual, *cache, *numbers, BLOCK_M=16, BLOCK_N=64, SPLITS=tile.num_splits, **shape,
        )  # fmt: skip


def _check(x: Tensor, weight: Weight, out: Tensor, e: Epilogue) -> None:
    """Raise ValueError if the shapes do not match: a kernel would read past the end of a tensor."""
    rows, n = x.shape[0], weight.num_outputs
    if x.dim() != 2 or rows < 1 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x of shape {tuple(x.shape)}: need (1 or more, {weight.num_inputs})")
    wanted = (rows, n // 3 if e.store else n)
    for name, t in (("out", out), ("residual", e.residual)):
        if t is not None and tuple(t.shape) != wanted:
            raise ValueError(f"{name} of shape {tuple(t.shape)}: need {wanted}")
    for name, t in (("x", x), ("out", out), ("residual", e.residual), ("weight", weight.data)):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {t.stride()}: call contiguous() first")
    if e.store is not None:
        s = e.store
        if s.pos.numel() != rows:
            raise ValueError(f"places: {s.pos.numel()} positions: need {rows}, one a row of x")
        if n != 3 * s.keys.shape[1] * s.keys.shape[3]:
            raise ValueError(f"weight of {n} outputs: keys of {tuple(s.keys.shape)} need 3 * H * D")
