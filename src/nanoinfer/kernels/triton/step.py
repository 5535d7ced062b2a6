"""The first kernel of a step: positions, the tokens sampled last, embeddings.

One program prepares one row of the step's inputs (engines/transfers.py), so that it can also advance the row's length:
no other program of any kernel reads it. Rows of more than MAX_TOKENS are shared by several programs, and another launch
advances the lengths. The sampler's last kernel stores the sampled tokens (sampler.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch_options, wait_for_predecessor
from .rows import check_contiguous

MAX_TOKENS = 16
"""New tokens of a row that one program prepares."""
MAX_TILE = 8192
"""Values of the embeddings that a program holds at a time: 32 registers a thread."""
NUM_WARPS = 8


@triton.jit(do_not_specialize=["stride", "num_positions", "padding"])
def begin_kernel(
    x, pos, given, start, count, slots, last, wte, wpe, stride, num_positions, padding, factor,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (row, block of tokens). Write positions and embeddings of the tokens; the only block advances the start."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    length = tl.load(start + row * stride)
    num_new = tl.load(count + row * stride)
    position = tl.where(i < num_new, length + i, padding)
    tl.store(pos + row * N + i, position, mask=i < N)
    token = tl.load(given + row * stride + i, mask=i < N, other=0)
    sampled = tl.load(last + tl.load(slots + row * stride))
    token = tl.where(token < 0, sampled, token)
    position = tl.minimum(position, num_positions - 1)
    for begin in tl.static_range(0, C, BLOCK_C):
        cols = begin + tl.arange(0, BLOCK_C)
        inside = (i < N)[:, None] & (cols < C)[None, :]
        e = tl.load(wte + token[:, None] * C + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if factor is not None:
            e *= factor
        if wpe is not None:
            e += tl.load(wpe + position[:, None] * C + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(x + (row * N + i)[:, None] * C + cols[None, :], e, mask=inside)
    if BLOCK_N >= N:
        tl.debug_barrier()  # all threads have read the length
        tl.store(start + row * stride, length + num_new)


def begin(
    given: Tensor, start: Tensor, count: Tensor, slots: Tensor, last: Tensor, wte: Tensor, wpe: Tensor | None,
    padding: int, pos: Tensor, x: Tensor, factor: float | None = None,
) -> None:  # fmt: skip
    """Write the positions of a step's tokens to `pos` and their embeddings to `x`, and advance `start` by `count`.

    Args:
        given: (R, n) int64, 1 <= n: token ids < V; negative for the row's element of `last`.
        start: (R,) int64: length of the row's sequence. This and the next two have the row stride of `given`.
        count: (R,) int64: number of tokens of the row, 0 to n; the others are padding.
        slots: (R,) int64: index of the row in `last`.
        last: int64 contiguous: token ids < V.
        wte: (V, C) contiguous.
        wpe: (positions, C) contiguous. Padding gets the last position's embedding. None: positions have none.
        padding: position of padding.
        pos: (R, n) int64 contiguous.
        x: (R * n, C) float32 contiguous.
        factor: of the embeddings of tokens; None: 1.

    Raises:
        ValueError: a shape or stride does not match.
    """
    (R, n), C, stride = given.shape, wte.shape[1], given.stride(0)
    check_contiguous(last=last, wte=wte, pos=pos, x=x, **({} if wpe is None else {"wpe": wpe}))
    for name, t in (("start", start), ("count", count), ("slots", slots)):
        if t.shape != (R,) or t.stride(0) != stride:
            raise ValueError(f"{name} of shape {tuple(t.shape)}, strides {t.stride()}: need ({R},), ({stride},)")
    if pos.shape != given.shape or x.shape != (R * n, C) or given.stride(1) != 1:
        raise ValueError(
            f"pos of shape {tuple(pos.shape)}, x of {tuple(x.shape)}, given with strides {given.stride()}: need"
            f" ({R}, {n}), ({R * n}, {C}) and a last stride of 1"
        )
    BLOCK_N = min(triton.next_power_of_2(n), MAX_TOKENS)
    begin_kernel[(R, triton.cdiv(n, BLOCK_N))](
        x, pos, given, start, count, slots, last, wte, wpe, stride, 1 if wpe is None else wpe.shape[0], padding, factor,
        N=n, C=C, BLOCK_N=BLOCK_N, BLOCK_C=min(triton.next_power_of_2(C), MAX_TILE // BLOCK_N), num_warps=NUM_WARPS,
        PDL=launch_options(x.device)["PDL"],  # not launch_pdl: the step's first kernel has no predecessor in a graph
    )  # fmt: skip
    if n > BLOCK_N:
        start.add_(count)
