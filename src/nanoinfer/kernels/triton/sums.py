"""Device functions of products.py: sums of inputs times weights, for one row and for several.

One row: each thread multiplies and adds the values that it loaded itself, 16 bytes of weights at a time, and the sums
of threads are added after the loop. The first turn's weights and inputs are arguments: the kernel loads them before it
waits for anything, and the loop loads the other weights while the first are on their way.

Codes of int4 become floats without a conversion: a code's 4 bits, as the first bits of a mantissa, are 1 + code / 16.
Scales are applied once to the sum of 16 bytes (one row), and are loaded one turn of the loop ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(w, rows, start, ROW: tl.constexpr, WIDTH: tl.constexpr):
    """Return values [start, start + WIDTH) of rows of ROW values, zero past the end: (rows, WIDTH)."""
    cols = start + tl.arange(0, WIDTH)
    at = w + rows[:, None] * ROW + cols[None, :]
    if ROW % WIDTH == 0:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(cols < ROW)[None, :], other=0)
    return tile


@triton.jit
def load_scales(scale, zero, rows, start, GROUPS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Return scales and zero points of bytes [start, start + WIDTH), one for 16 bytes; zero past the end."""
    group = (start + tl.arange(0, WIDTH // 16) * 16) // HALF
    at = rows[:, None] * GROUPS + group[None, :]
    inside = (group < GROUPS)[None, :]
    return tl.load(scale + at, mask=inside, other=0.0), tl.load(zero + at, mask=inside, other=0)


@triton.jit
def load_rows(x, rows, cols, num_rows, K: tl.constexpr):
    """Return columns of the rows of x: (rows, cols) float32, zero outside."""
    inside = (rows < num_rows)[:, None] & (cols < K)[None, :]
    return tl.load(x + rows[:, None] * K + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_gain(gain, shift, cols, K: tl.constexpr):
    """Return columns of gain and shift of a layer norm; 1 and 0 if there is none, and 0 outside."""
    factor, offset = 1.0, 0.0
    if gain is not None:
        factor = tl.load(gain + cols, mask=cols < K, other=0.0).to(tl.float32)
    if shift is not None:
        offset = tl.load(shift + cols, mask=cols < K, other=0.0).to(tl.float32)
    return factor, offset


@triton.jit
def normalise(a, factor, offset, mean, rstd, NORM: tl.constexpr):
    """Return columns of one row as (1, cols) float32, normalised if NORM."""
    a = a.to(tl.float32)
    if NORM:
        a = (a - mean) * rstd * factor + offset
    return a[None, :]


@triton.jit
def load_row(x, gain, shift, mean, rstd, cols, K: tl.constexpr):
    """Return columns of the one row of x, normalised if there is a gain: (1, cols) float32, zero outside."""
    factor, offset = load_gain(gain, shift, cols, K)
    a = tl.load(x + cols, mask=cols < K, other=0.0)
    return normalise(a, factor, offset, mean, rstd, gain is not None)


@triton.jit
def sum_runs(a, RUN: tl.constexpr):
    """Add up runs of RUN values, which one thread has: (M, N) -> (M, N / RUN)."""
    return tl.sum(tl.reshape(a, (a.shape[0], a.shape[1] // RUN, RUN)), 2)


@triton.jit
def repeat(a, RUN: tl.constexpr):
    """Repeat each value RUN times: (M, N) -> (M, N * RUN)."""
    wide = tl.broadcast_to(a[:, :, None], (a.shape[0], a.shape[1], RUN))
    return tl.reshape(wide, (a.shape[0], a.shape[1] * RUN))


@triton.jit
def shift(words, LEFT: tl.constexpr):
    """Return words << LEFT, or words >> -LEFT."""
    return words << LEFT if LEFT >= 0 else words >> -LEFT


@triton.jit
def codes(words, FIRST: tl.constexpr):
    """Return 1 + code / 16 for one code of each byte of int32 words, that at bit FIRST: (M, N) -> (M, 4 * N)."""
    LEFT: tl.constexpr = 19 - FIRST
    even = tl.join(shift(words, LEFT), shift(words, LEFT - 16))
    odd = tl.join(shift(words, LEFT - 8), shift(words, LEFT - 24))
    mantissa = 0x780000 + tl.program_id(2)  # that is 0: beside two constants, & and | would be two instructions
    values = tl.join(even, odd) & mantissa | 0x3F800000
    return tl.reshape(values.to(tl.float32, bitcast=True), (words.shape[0], words.shape[1] * 4))


@triton.jit
def low_columns(start, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the inputs of the low codes of bytes [start, start + WIDTH); the high codes' are GROUP / 2 further on."""
    places = start + tl.arange(0, WIDTH)
    return places // (GROUP // 2) * GROUP + places % (GROUP // 2)


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """Return acc + a @ b without TF32. WIDEN computes in float32 for the interpreter, where products are exact."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_tile(acc, a, tile, OPERAND: tl.constexpr, WIDEN: tl.constexpr):
    """Return acc + a @ tile.T with operands in the weight's dtype."""
    if WIDEN:
        tile = tile.to(tl.float32)  # NumPy would reinterpret an integer's bits as bfloat16
    return dot(a.to(OPERAND), tl.trans(tile.to(OPERAND)), acc, WIDEN)


# One row -------------------------------------------------------------------------------------------------


@triton.jit
def sum_row(
    x, w, tile, a, gain, shift, mean, rstd, rows,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums over dense or int8 weights, (BLOCK_N,). tile, a: weights and inputs of the first turn."""
    RUN: tl.constexpr = 128 // w.dtype.element_ty.primitive_bitwidth
    acc = tl.zeros((BLOCK_N, BLOCK_K // RUN), tl.float32)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        later = load_tile(w, rows, start, K, BLOCK_K).to(tl.float32)
        acc += sum_runs(later * load_row(x, gain, shift, mean, rstd, start + tl.arange(0, BLOCK_K), K), RUN)
    acc += sum_runs(tile.to(tl.float32) * a, RUN)
    return tl.sum(acc, 1)


@triton.jit
def sum_codes(words, step, origin, low, high):
    """Return the sum of each 16 bytes of int4 weights times the inputs of their low and high codes."""
    origin = repeat(1.0 + origin.to(tl.float32) * 0.0625, 16)
    sums = sum_runs((codes(words, 0) - origin) * low, 16) + sum_runs((codes(words, 4) - origin) * high, 16)
    return 16.0 * step.to(tl.float32) * sums


@triton.jit
def sum_row_int4(
    x, w, scale, zero, tile, step, origin, low, high, gain, shift, mean, rstd, rows,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums over int4 weights, (BLOCK_N,). tile, step, origin, low, high: those of the first turn."""
    HALF: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    acc = tl.zeros((BLOCK_N, WIDTH // 16), tl.float32)
    next_step, next_origin = load_scales(scale, zero, rows, WIDTH, GROUPS, HALF, WIDTH)
    for start in tl.range(WIDTH, GROUPS * HALF, WIDTH, num_stages=STAGES):
        later_step, later_origin = next_step, next_origin
        next_step, next_origin = load_scales(scale, zero, rows, start + WIDTH, GROUPS, HALF, WIDTH)
        later = load_tile(w, rows, start // 4, GROUPS * HALF // 4, WIDTH // 4)
        cols = low_columns(start, GROUP, WIDTH)
        later_low = load_row(x, gain, shift, mean, rstd, cols, K)
        later_high = load_row(x, gain, shift, mean, rstd, cols + HALF, K)
        acc += sum_codes(later, later_step, later_origin, later_low, later_high)
    acc += sum_codes(tile, step, origin, low, high)
    return tl.sum(acc, 1)


# Several rows --------------------------------------------------------------------------------------------


@triton.jit
def sum_rows(
    x, w, rows, outputs, num_rows, first, last,
    K: tl.constexpr, OPERAND: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the sums over inputs [first, last) of dense or int8 weights, (rows, outputs)."""
    acc = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
    for start in tl.range(first, tl.minimum(last, K), BLOCK_K, num_stages=STAGES):
        a = load_rows(x, rows, start + tl.arange(0, BLOCK_K), num_rows, K)
        acc = dot_tile(acc, a, load_tile(w, outputs, start, K, BLOCK_K), OPERAND, WIDEN)
    return acc


@triton.jit
def sum_rows_int4(
    x, w, scale, zero, rows, outputs, num_rows, first, last,
    K: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the sums over bytes [first, last) of int4 weights, (rows, outputs)."""
    HALF: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    acc = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
    next_step, next_origin = load_scales(scale, zero, outputs, first, GROUPS, HALF, WIDTH)
    for start in tl.range(first, tl.minimum(last, GROUPS * HALF), WIDTH, num_stages=STAGES):
        step = repeat(16.0 * next_step.to(tl.float32), 16)
        origin = repeat(1.0 + next_origin.to(tl.float32) * 0.0625, 16)
        next_step, next_origin = load_scales(scale, zero, outputs, start + WIDTH, GROUPS, HALF, WIDTH)
        words = load_tile(w, outputs, start // 4, GROUPS * HALF // 4, WIDTH // 4)
        cols = low_columns(start, GROUP, WIDTH)
        a = load_rows(x, rows, cols, num_rows, K)
        acc = dot_tile(acc, a, (codes(words, 0) - origin) * step, OPERAND, WIDEN)
        a = load_rows(x, rows, cols + HALF, num_rows, K)
        acc = dot_tile(acc, a, (codes(words, 4) - origin) * step, OPERAND, WIDEN)
    return acc
