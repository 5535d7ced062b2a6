"""Tile sizes of the kernels. All tuning parameters are in this module.

The values are derived, not measured. To tune them, run `benchmarks/triton_kernels.py` on a GPU and change them here.

- A decode step is bound by reading weights. Its speed depends on the bytes in flight, and every multiprocessor must
  have some. block_n, the number of outputs of a program, is at most the largest that gives each one a program.
- One row: threads multiply and add their own values, without tensor cores (15 of whose 16 rows would be padding), so
  block_n can be small: it is chosen so that all multiprocessors have about as many outputs. Two or more rows use tensor
  cores, which need at least 8 outputs for an operand in registers.
- block_k is a multiple of what 32 threads read at 16 bytes each, if the row is that long. Of one row it is all inputs,
  if their weights fit into a program's registers: then all loads are on the way at once, and there is no loop.
- Up to 64 rows: weights are read once, by programs that have all rows. For a narrow output (K = 4C -> N = C), the sum
  over K is split between programs as well, and a second, small launch adds the parts in order.
- More rows are bound by arithmetic and the L2 cache: blocks of rows times outputs, as square as fills the
  multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTERPRETED_MULTIPROCESSORS = 1
"""The interpreter runs programs one after another in Python, so a small number of programs is fastest."""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes."""

    block_n: int
    """Number of outputs of a program."""
    block_k: int
    """Number of inputs in one iteration of its loop."""
    num_warps: int
    num_stages: int
    """Number of iterations in flight: one computes while the others load."""
    num_splits: int = 1
    """Number of programs that share the inputs of an output."""
    spare: int = 0
    """One row: number of the block_n outputs that the program leaves to the next one."""
    block_m: int = 16
    """Several rows: number of rows of a program, a power of two from 16 on."""


# bits of a weight -> (block_n choices, block_k, num_warps). An iteration reads at most 16 KB, so that several programs
# fit on a multiprocessor.
ONE_ROW = {
    32: ((16, 8, 4), 256, 4),
    16: ((16, 8, 4), 512, 4),
    8: ((16, 8, 4), 512, 4),
    4: ((16, 8, 4), 1024, 4),
}
ROWS = {
    32: ((64, 32, 16), 32, 4),
    16: ((64, 32, 16), 128, 4),
    8: ((64, 32, 16), 128, 4),
    4: ((64, 32, 16), 256, 4),
}
BLOCKS_OF_ROWS = {
    32: ((64, 64), 64, 8),
    16: ((128, 128), 64, 8),
    8: ((128, 128), 64, 8),
    4: ((64, 64), 128, 4),
}
"""More than 64 rows: bits of a weight (32 where operands are float32) -> (largest block_m and block_n, block_k,
num_warps)."""
FUSED_TOKENS = {torch.float32: 16, torch.bfloat16: 256, torch.float16: 256}
"""Tokens of the largest step that runs these kernels if the weights are not quantized: larger ones are bound by
arithmetic, and run on PyTorch's libraries. Quantized weights take these kernels in any step."""
SHARED_BYTES = 96 << 10
"""Shared memory that the weights and inputs in flight may take."""
BYTES_IN_FLIGHT = 24 << 10
"""Bytes of weights that a program keeps on the way. An H100 needs about 18 KB for each multiprocessor."""
MIN_STAGES, MAX_STAGES = 3, 8
WHOLE_BYTES = {32: 32 << 10, 16: 32 << 10, 8: 16 << 10, 4: 8 << 10}
"""Bits of a weight -> largest tile of all inputs of one row. A program then loads all its weights into registers before
it waits. Codes take more registers when they are unpacked: larger tiles spill with Triton 3.6."""
MAX_SPLITS = 4
MIN_SPLIT_BYTES = 1 << 22
"""Smallest weight that is split: for fewer bytes, the second launch takes longer than it saves."""

ATTENTION_BLOCK_T = {32: 32, 16: 64}
"""Bits of a key -> number of keys in one iteration of the attention loop."""
ATTENTION_BLOCK_Q = {32: 32, 16: 64}
"""Bits of a key -> largest number of a row's new tokens in a program."""
ATTENTION_WARPS = 4
ATTENTION_STAGES = 3
MAX_ATTENTION_SPLITS = 16
MIN_ATTENTION_TURNS = 4
"""Least iterations of a part of a context: for fewer, the launch that merges the parts takes longer than they save."""
ATTENTION_WIDTH, ATTENTION_WIDTH_OF_ONE = 128, 64
"""Width of a head up to which the four above hold, for several new tokens of a row and for one. Wider heads take fewer
keys and tokens at a time: their sums would not fit in the registers."""
COMBINE_WARPS = 1

USE_PDL = True
"""Whether kernels start while the kernel before them still runs (launch.py), on devices that can do it."""


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; INTERPRETED_MULTIPROCESSORS for the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def product_tile(n: int, k: int, rows: int, bits: int, processors: int, operand_bits: int = 16) -> Tile:
    """Return the tile of a product of `rows` rows with a weight (n, k) of `bits` bits.

    product_tile(768, 768, 1, 16, 132) -> block_n 4: 192 programs for 132 multiprocessors
    """
    block_m = min(max(_power_of_two(rows), 16), 64)
    choices, block_k, num_warps = (ONE_ROW if rows == 1 else ROWS)[bits]
    if rows > 16:
        block_k = min(block_k, 128 if bits == 4 else 64)
    block_n, spare = next((b for b in choices if -(-n // b) >= processors), choices[-1]), 0
    if rows == 1:
        block_n, spare = even_outputs(n, choices, processors)
    if rows > 64:
        largest, block_k, num_warps = BLOCKS_OF_ROWS[bits if operand_bits < 32 else 32]
        block_m, block_n = square_blocks(rows, n, largest, processors)
    whole = max(_power_of_two(k), 64)
    if whole < block_k or (rows == 1 and block_n * whole * bits // 8 <= WHOLE_BYTES[bits]):
        block_k = whole
    turn = block_n * block_k * bits // 8
    wanted = 1 - (-BYTES_IN_FLIGHT // turn)
    num_stages = max(min(wanted, -(-k // block_k), MAX_STAGES), MIN_STAGES)
    if rows > 16:  # codes are unpacked into shared memory, too
        unpacked = block_n * block_k * operand_bits // 8 if bits < 16 else 0
        num_stages = min(num_stages, (SHARED_BYTES - unpacked) // (turn + block_m * block_k * operand_bits // 8))
    num_splits, programs = 1, -(-n // block_n) * (1 if rows == 1 else -(-rows // block_m))
    if rows > 1 and n * k * bits // 8 >= MIN_SPLIT_BYTES:
        while programs * num_splits < processors and num_splits < MAX_SPLITS and num_splits * block_k < k:
            num_splits *= 2
    return Tile(block_n, block_k, num_warps, num_stages, num_splits, spare, block_m)


def square_blocks(rows: int, n: int, largest: tuple[int, int], processors: int) -> tuple[int, int]:
    """Return block_m and block_n of a product of many rows.

    A program's time is that of reading its rows and outputs, and the multiprocessors' that of the one with the most
    programs.

    square_blocks(512, 768, (128, 128), 132) -> (64, 64): 96 programs at once. (128, 128) would leave 108 of 132 idle.
                                                Tensor cores of compute capability 9.0 take 64 rows.
    """
    blocks = [(m, b) for m in (64, 128) for b in (16, 32, 64, 128) if m <= largest[0] and b <= largest[1]]

    def time(block: tuple[int, int]) -> tuple[int, int]:
        m, b = block
        num_programs = -(-rows // m) * -(-n // b)
        return -(-num_programs // processors) * (m + b), num_programs

    return min(blocks, key=time)


def even_outputs(n: int, choices: tuple[int, ...], processors: int) -> tuple[int, int]:
    """Return block_n, and how many outputs of it a program leaves out, so that multiprocessors have equal shares of n.

    The time is that of the multiprocessor with the most programs: in between what each of them reads (its outputs) and
    what it computes (block_n). Of the choices within a tenth of the shortest time, the largest block_n is taken: fewer
    programs read the inputs and compute their norm.

    even_outputs(6400, (16, 8, 4), 132) -> (8, 1): 915 programs of 7 outputs, 7 on most multiprocessors and never more.
                                           400 programs of 16 would be 3 on most, and 4 on some
    """
    times = {}
    for block_n in choices:
        for spare in range(block_n // 8 + 1):
            num_programs = -(-n // (block_n - spare))
            if num_programs >= processors or block_n == choices[-1]:
                times[block_n, spare] = -(-num_programs // processors) * (2 * block_n - spare)
    within = {chosen: time for chosen, time in times.items() if 10 * time <= 11 * min(times.values())}
    return max(within, key=lambda chosen: (chosen[0], -within[chosen]))


def attention_splits(num_programs: int, context: int, bits: int, processors: int) -> int:
    """Return the number of parts of the context: about two programs for each multiprocessor, if it is long enough.

    attention_splits(12, 1024, 16, 132) -> 4 parts of 4 iterations each: 48 programs
    """
    most = min(context // ATTENTION_BLOCK_T[bits] // MIN_ATTENTION_TURNS, MAX_ATTENTION_SPLITS)
    splits = 1
    while splits * num_programs < 2 * processors and 2 * splits <= most:
        splits *= 2
    return splits


def attention_blocks(width: int, bits: int, num_new: int) -> tuple[int, int, int]:
    """Return the keys of an iteration, the largest number of a row's new tokens in a program, and the iterations in
    flight. width: that of a head, a power of two. num_new: new tokens of a row.

    attention_blocks(512, 16, 100) -> 16 keys, 16 tokens, 3 iterations
    """
    most = ATTENTION_WIDTH_OF_ONE if num_new == 1 else ATTENTION_WIDTH
    block_t, block_q = ATTENTION_BLOCK_T[bits], ATTENTION_BLOCK_Q[bits]
    if width > most:  # tensor cores take 16 of both
        block_t, block_q = (max(16, b * most // width) for b in (block_t, block_q))
    turn = 2 * block_t * width * bits // 8
    return block_t, block_q, max(1, min(ATTENTION_STAGES, SHARED_BYTES // turn))


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n: 48 -> 64."""
    return 1 << (n - 1).bit_length()
