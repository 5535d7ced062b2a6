"""How large the pieces are into which the kernels cut their work: the one place to tune.

The literals are reasoned, not measured: whoever has a GPU runs `benchmarks/triton_kernels.py` and changes them here.

- A decode step is a stream of weights. What counts is how many bytes are on their way at a time, and that every
  multiprocessor has some: so block_n, the outputs of a program, is the largest that still gives each one a program.
- One row is a sum over products held by threads: no tensor cores, whose 16 rows would be 15 of padding, and so outputs
  can be cut as finely as wanted. From two rows on, tensor cores; an operand in registers then has 8 outputs or more.
- block_k is a multiple of what 32 threads read at 16 bytes each, where the row is that long.
- Where 16 rows meet a narrow output (K = 4C -> N = C), the sum over K is split between programs too, and a second,
  small launch adds the parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTERPRETED_MULTIPROCESSORS = 1
"""Without a device programs run one after another, in Python: the fewer, the better."""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    """Inputs of one turn of its loop."""
    num_warps: int
    num_stages: int
    """Turns of the loop whose loads are under way."""
    num_splits: int = 1
    """Programs that share the inputs of an output."""


# bits of a weight -> (block_n choices, block_k, num_warps, num_stages); 16 KB a turn at most: several programs fit a
# multiprocessor. 8 outputs at 4 bits: with 16 the sums of one row take all registers.
ONE_ROW = {
    32: ((16, 8, 4), 256, 4, 3),
    16: ((16, 8, 4), 512, 4, 3),
    8: ((16, 8, 4), 512, 4, 3),
    4: ((8, 4), 1024, 4, 3),
}
ROWS = {
    32: ((64, 32, 16), 32, 4, 3),
    16: ((64, 32, 16), 128, 4, 4),
    8: ((64, 32, 16), 128, 4, 4),
    4: ((64, 32, 16), 256, 4, 3),
}
MAX_SPLITS = 4
MIN_SPLIT_BYTES = 1 << 22
"""Weights of fewer bytes are not worth a second launch."""

ATTENTION_BLOCK_T = {32: 32, 16: 64}
"""Bits of a key -> keys of one turn of the attention loop."""
ATTENTION_WARPS = 4
ATTENTION_STAGES = 2
MAX_ATTENTION_SPLITS = 16
COMBINE_WARPS = 1


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a device can really run at a time, one on each of its multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def product_tile(n: int, k: int, rows: int, bits: int, processors: int) -> Tile:
    """Return how a product of `rows` rows with a weight (n, k) of `bits` bits is cut.

    product_tile(768, 768, 1, 16, 132) -> block_n 4: 192 programs for 132 multiprocessors
    """
    choices, block_k, num_warps, num_stages = (ONE_ROW if rows == 1 else ROWS)[bits]
    block_n = next((b for b in choices if -(-n // b) >= processors), choices[-1])
    block_k = min(block_k, max(_power_of_two(k), 64))
    num_splits, programs = 1, -(-n // block_n)
    if rows > 1 and n * k * bits // 8 >= MIN_SPLIT_BYTES:
        while programs * num_splits < processors and num_splits < MAX_SPLITS and num_splits * block_k < k:
            num_splits *= 2
    return Tile(block_n, block_k, num_warps, num_stages, num_splits)


def attention_splits(rows_by_heads: int, context: int, bits: int, processors: int) -> int:
    """Return into how many parts the context is split: two programs for each multiprocessor, where it is long enough.

    attention_splits(12, 1024, 16, 132) -> 16 parts of one turn each: 192 programs
    """
    turns = -(-context // ATTENTION_BLOCK_T[bits])
    splits = 1
    while splits * rows_by_heads < 2 * processors and splits < min(turns, MAX_ATTENTION_SPLITS):
        splits *= 2
    return splits


def _power_of_two(n: int) -> int:
    """48 -> 64."""
    return 1 << (n - 1).bit_length()
