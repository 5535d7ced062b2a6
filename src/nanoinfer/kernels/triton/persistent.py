"""A whole decode step of one token in one launch: all layers, with a barrier of the whole grid between their phases.

Even a replayed graph drains the GPU between two kernels: the last programs of one must end before the first of the next
may load. A persistent kernel starts as many programs as fit the device at once and keeps them: what lies between two
phases is an atomic counter (Spector et al., "Look Ma, No Bubbles!", 2025, take a 1B model to one launch that way).

    phase    0         embedding
             1 + 6l    layer l: norm, qkv and store | attention | joining | product | norm, product, GELU | product
             1 + 6L    final norm

A phase is a function of (program, number of programs) that takes its share of the tiles. So the same body is driven in
two ways: phase by phase, a launch each, where the end of a launch is the barrier (`in_one_launch=False`: what Triton's
interpreter can run with many programs), or all at once.

The barrier is sound only when all programs run at the same time: one for each multiprocessor, launched cooperatively.
Neither that nor the speed has been seen on a GPU: off unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import attend_part, join_parts, score_scale
from .products import DTYPES, INTERPRETED, accumulate, finish
from .quantize import Weight
from .rows import embed_row, norm_row
from .tiles import ATTENTION_BLOCK_T, attention_splits, product_tile

PHASES_PER_LAYER = 6
PERSISTENT_WARPS = 4
PERSISTENT_STAGES = 2


@dataclass(frozen=True)
class Linear:
    """One linear layer of all blocks: weight (L, N, K), bias (L, N)."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True)
class Stack:
    """The weights of a model, stacked by layer; on one device, contiguous."""

    wte: Tensor
    wpe: Tensor
    linears: tuple[Linear, ...]
    """c_attn, attn.c_proj, c_fc, mlp.c_proj, all in one format."""
    norms: tuple[Tensor, Tensor | None, Tensor, Tensor | None]
    """Weight and bias of ln_1 and of ln_2, (L, C) each."""
    final_norm: tuple[Tensor, Tensor | None]
    gelu: int
    eps: float


@dataclass(frozen=True)
class Cache:
    """Keys and values of all layers, (L, num_slots, H, columns, D), and whose turn it is."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    """(1,) int64."""
    pos: Tensor
    """(1, 1) int64."""


@triton.jit
def grid_barrier(counter, arrivals):
    """Wait until all programs have come here: the counter, zero at the start of the launch, is to reach `arrivals`.

    All threads of a program have stored before the first barrier; the atomic releases what they stored and acquires
    what others did; none of its threads goes on before the second.
    """
    tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while seen < arrivals:
        seen = tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def layer_of(pointer, layer, size):
    """A layer's part of a stacked tensor; None stays None."""
    if pointer is None:
        part = None
    else:
        part = pointer + layer.to(tl.int64) * size
    return part


@triton.jit
def product_phase(
    program, num_programs, layer, out, x, w, scale, zero, gain, shift, bias, residual, keys, values, table, pos,
    stride_layer, stride_block, stride_head, stride_token, eps, N: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, GELU: tl.constexpr, OPERAND: tl.constexpr, BLOCK_LEN: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's tiles of one layer's product of one row."""
    if GROUP == 0:
        w = layer_of(w, layer, N * K)
        scale = layer_of(scale, layer, N)
    else:
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        w = layer_of(w, layer, N * GROUPS * (GROUP // 2))
        scale = layer_of(scale, layer, N * GROUPS)
        zero = layer_of(zero, layer, N * GROUPS)
    gain = layer_of(gain, layer, C)
    shift = layer_of(shift, layer, C)
    bias = layer_of(bias, layer, N)
    keys = layer_of(keys, layer, stride_layer)
    values = layer_of(values, layer, stride_layer)
    for tile in range(program, tl.cdiv(N, BLOCK_N), num_programs):
        outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = accumulate(
            x, w, scale, zero, gain, shift, 1, N, eps, outputs, 0,
            K, GROUP, OPERAND, 1, BLOCK_N, BLOCK_K, 1, STAGES, False,
        )  # fmt: skip
        finish(
            acc, out, bias, residual, keys, values, table, pos, outputs, 1, N, 1,
            1, stride_block, stride_head, stride_token, GELU, 1, BLOCK_LEN, D,
        )  # fmt: skip


@triton.jit
def step_kernel(
    idx, pos, table, wte, wpe, w0, s0, z0, b0, w1, s1, z1, b1, w2, s2, z2, b2, w3, s3, z3, b3, gain1, shift1, gain2,
    shift2, gain_f, shift_f, keys, values, x, q, y, h, parts, stats, out, counter, first, last, num_layers,
    num_positions, context, stride_layer, stride_block, stride_head, stride_token, eps, scale,
    C: tl.constexpr, INNER: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_LEN: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    GELU: tl.constexpr, OPERAND: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """Phases first..last: one of many programs, each of which takes its share of every phase."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for phase in range(first, last):
        layer = (phase - 1) // 6
        part = (phase - 1) % 6
        if phase == 0:
            if program == 0:
                embed_row(0, x, idx, pos, wte, wpe, num_positions, C, BLOCK_C)
        elif phase == 1 + 6 * num_layers:
            if program == 0:
                norm_row(0, out, x, gain_f, shift_f, eps, C, BLOCK_C)
        elif part == 0:
            product_phase(
                program, num_programs, layer, q, x, w0, s0, z0, gain1, shift1, b0, None, keys, values, table, pos,
                stride_layer, stride_block, stride_head, stride_token, eps, 3 * C, C, C,
                GROUP, 0, OPERAND, BLOCK_LEN, D, N0, BLOCK_K, STAGES,
            )  # fmt: skip
        elif part == 1:
            for item in range(program, H * SPLITS, num_programs):
                attend_part(
                    0, item % H, item // H, q, layer_of(keys, layer, stride_layer),
                    layer_of(values, layer, stride_layer), table, pos, y, parts, stats, 1, H, 1, context,
                    1, stride_block, stride_head, stride_token, scale,
                    D, BLOCK_D, BLOCK_LEN, 1, BLOCK_T, SPLITS, STAGES, False,
                )  # fmt: skip
        elif part == 2:
            if SPLITS > 1:
                for item in range(program, H, num_programs):
                    join_parts(item, y, parts, stats, H, D, BLOCK_D, SPLITS)
        elif part == 3:
            product_phase(
                program, num_programs, layer, x, y, w1, s1, z1, None, None, b1, x, None, None, None, None,
                0, 0, 0, 0, eps, C, C, C, GROUP, 0, OPERAND, 1, 1, N1, BLOCK_K, STAGES,
            )  # fmt: skip
        elif part == 4:
            product_phase(
                program, num_programs, layer, h, x, w2, s2, z2, gain2, shift2, b2, None, None, None, None, None,
                0, 0, 0, 0, eps, INNER, C, C, GROUP, GELU, OPERAND, 1, 1, N2, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            product_phase(
                program, num_programs, layer, x, h, w3, s3, z3, None, None, b3, x, None, None, None, None,
                0, 0, 0, 0, eps, C, INNER, C, GROUP, 0, OPERAND, 1, 1, N3, BLOCK_K, STAGES,
            )  # fmt: skip
        if BARRIER:
            grid_barrier(counter, (phase + 1 - first) * num_programs)


def decode_step(
    stack: Stack, cache: Cache, idx: Tensor, context: int, num_programs: int, in_one_launch: bool = True
) -> Tensor:
    """Run one token through all layers and return what the final norm makes of it, (1, C) in the weights' dtype.

    Args:
        stack: the weights.
        cache: stores the new keys and values too.
        idx: (1,) int64, the token.
        context: the position is below it; cache.pos at or above it is padding.
        num_programs: at most the device's multiprocessors, all of which must be free: they wait for each other.
        in_one_launch: False: a launch a phase, and no barrier.
    """
    _, _, H, columns, D = cache.keys.shape
    linears, c_attn = stack.linears, stack.linears[0].weight
    C, inner, L = H * D, linears[2].weight.num_outputs, cache.keys.shape[0]
    bits, dtype, device = c_attn.bits, c_attn.operand, idx.device
    tiles = [product_tile(x.weight.num_outputs, x.weight.num_inputs, 1, bits, num_programs) for x in linears]
    key_bits = 8 * cache.keys.itemsize
    splits = attention_splits(H, context, key_bits, num_programs)
    x, counter = torch.empty(1, C, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    q, y, out = (torch.empty(1, C, dtype=dtype, device=device) for _ in range(3))
    h = torch.empty(1, inner, dtype=dtype, device=device)
    parts, stats = (torch.empty(splits, 1, H, n, device=device) for n in (D, 2))
    weights = [t for x in linears for t in (x.weight.data, x.weight.scale, x.weight.zero, x.bias)]
    phases = PHASES_PER_LAYER * L + 2
    for first in range(1 if in_one_launch else phases):
        step_kernel[(num_programs,)](
            idx, cache.pos, cache.slots, stack.wte, stack.wpe, *weights, *stack.norms, *stack.final_norm,
            cache.keys, cache.values, x, q, y, h, parts, stats, out, counter,
            first, phases if in_one_launch else first + 1, L, stack.wpe.shape[0], context, *cache.keys.stride()[:4],
            stack.eps, score_scale(D),
            C=C, INNER=inner, H=H, D=D, BLOCK_C=triton.next_power_of_2(C), BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_LEN=columns, BLOCK_T=ATTENTION_BLOCK_T[key_bits], SPLITS=splits, GROUP=c_attn.group,
            GELU=stack.gelu, OPERAND=DTYPES[dtype], N0=tiles[0].block_n, N1=tiles[1].block_n, N2=tiles[2].block_n,
            N3=tiles[3].block_n, BLOCK_K=min(t.block_k for t in tiles), STAGES=PERSISTENT_STAGES, BARRIER=in_one_launch,
            num_warps=PERSISTENT_WARPS, launch_cooperative_grid=in_one_launch and not INTERPRETED,
        )  # fmt: skip
    return out
