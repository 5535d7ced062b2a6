"""Products of a mixture of experts: each row times the matrix of one expert, which a tensor on the device names.

The matrices of all E experts are one weight, (E * N, K), in any format of quantize.py. A program multiplies a block of
up to 16 rows with one tile of one expert's outputs, so a step reads the matrices of its experts where they are: none is
copied, and codes become operands in the tile. No shape depends on which experts are chosen.

    block 0   expert 2   row 0             a few rows: each is a block of its own
    block 1   expert 7   row 1
    block 0   expert 0   rows 0 to 15      many rows, with all experts: 16 of them at a time
    block 1   expert 0   rows 16 to 20
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch_options, wait_for_predecessor
from .products import DTYPES, INTERPRETED
from .quantize import Weight
from .rows import check_contiguous
from .sums import sum_rows, sum_rows_int4
from .tiles import multiprocessors, product_tile

BLOCK = 16
"""Rows of a block: those of a tensor core's operand."""


@triton.jit(do_not_specialize=["num_places"])
def expert_kernel(
    out, x, w, scale, zero, bias, experts, places, num_places, num_outputs,
    SHARE: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (block, tile). SHARE: consecutive rows of `out` that have the same inputs."""
    wait_for_predecessor(PDL)
    block = tl.program_id(0).to(tl.int64)
    first = tl.program_id(2) * BLOCK_K  # 0, and a multiple of BLOCK_K to the compiler: loads of 16 bytes
    expert = tl.load(experts + block)
    if places is None:
        rows = tl.where(tl.arange(0, BLOCK) == 0, block, num_places)
    else:
        rows = tl.load(places + block * BLOCK + tl.arange(0, BLOCK))
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = expert * num_outputs + tl.minimum(outputs, num_outputs - 1)
    inputs, num_inputs = rows // SHARE, num_places // SHARE
    if GROUP == 0:
        acc = sum_rows(x, w, inputs, columns, num_inputs, first, first + K, K, OPERAND, BLOCK_K, STAGES, WIDEN)
        if scale is not None:
            acc *= tl.load(scale + columns)[None, :]
    else:
        BYTES: tl.constexpr = (K + GROUP - 1) // GROUP * (GROUP // 2)
        acc = sum_rows_int4(
            x, w, scale, zero, inputs, columns, num_inputs, first, first + BYTES, K, GROUP, OPERAND, BLOCK_K // 2,
            STAGES, WIDEN,
        )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    inside = (rows < num_places)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out + rows[:, None] * num_outputs + outputs[None, :], acc.to(out.dtype.element_ty), mask=inside)


def expert_product(
    x: Tensor, weight: Weight, count: int, experts: Tensor, places: Tensor | None, out: Tensor,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Write products of rows with matrices of experts to `out`.

    Args:
        x: (M, K) contiguous, any float type. Row p of `out` is computed from row p // (P / M).
        weight: (E * N, K): the matrices of the experts, one below the other.
        count: E.
        experts: (blocks,) int64 contiguous, less than E: the expert of each block.
        places: (blocks, BLOCK) int64 contiguous: the rows of `out` of each block, P where it has fewer; None: block b
            has row b alone.
        out: (P, N) contiguous; P is a multiple of M.
        bias: (E * N,); None: there is none.

    Raises:
        ValueError: shapes do not match, or a tensor is not contiguous.
    """
    (M, k), (P, n), blocks = x.shape, out.shape, len(experts)
    check_contiguous(
        x=x, out=out, experts=experts, weight=weight.data, **({} if places is None else {"places": places})
    )
    wanted = (P,) if places is None else (len(places),)
    if k != weight.num_inputs or count * n != weight.num_outputs or P % M or experts.shape != wanted:
        raise ValueError(
            f"x of shape {tuple(x.shape)}, out of {tuple(out.shape)}, {blocks} experts chosen: need"
            f" {weight.num_inputs} inputs, {weight.num_outputs} / {count} outputs, rows of out that are a multiple of"
            f" those of x, and {wanted[0]} experts"
        )
    if places is not None and places.shape[1:] != (BLOCK,):
        raise ValueError(f"places of shape {tuple(places.shape)}: need ({blocks}, {BLOCK})")
    processors = max(1, multiprocessors(x.device) // blocks)
    tile = product_tile(n, k, BLOCK, weight.bits, processors, 8 * weight.operand.itemsize)
    data = weight.data.view(torch.int32) if weight.group else weight.data  # 4 bytes of codes at a time
    expert_kernel[(blocks, triton.cdiv(n, tile.block_n))](
        out, x, data, weight.scale, weight.zero, bias, experts, places, P, n,
        SHARE=P // M, K=k, GROUP=weight.group, OPERAND=DTYPES[weight.operand], BLOCK=BLOCK, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.num_stages, WIDEN=INTERPRETED, num_warps=tile.num_warps,
        **launch_options(x.device),
    )  # fmt: skip
