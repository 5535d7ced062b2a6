"""The split of a ragged batch into sub-batches of static shape. It does not import PyTorch.

A captured graph and a compiled step have fixed shapes, but a ragged batch may have a new shape at every step. Shapes
are therefore rounded up to buckets: rows and tokens to powers of two, the context to a bucket that covers the longest
sequence.

    batch:       A decodes 1 token, B decodes 1, C has a prompt of 50
    sub-batches: (rows 2, tokens 1, context 64)    A and B
                 (rows 1, tokens 64, context 64)   C with 14 tokens of padding
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 4096
"""Maximum number of tokens in one sub-batch, padding included. It bounds the memory for activations."""
WARM_CONTEXT = 1024
"""Longest context, in tokens, whose decode steps are captured at the start."""


@dataclass(frozen=True)
class Bucket:
    """The static shape of one sub-batch."""

    rows: int
    tokens: int
    """New tokens of a row, padding included."""
    context: int
    """Upper bound of all positions."""
    dense: bool
    """Whether row i is slot i. The cache is then read as a view, without a gather."""


@dataclass(frozen=True)
class SubBatch:
    """A part of a batch that the engine runs in one call."""

    bucket: Bucket
    members: list[int]
    """Indices into the batch."""
    rows: list[int]
    """The row of each member."""


def round_up(n: int) -> int:
    """Return the smallest power of two that is at least n: 5 -> 8."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class BucketLimits:
    """Bounds of the buckets."""

    num_slots: int
    """Slots of the KV cache."""
    block_size: int
    """Tokens that a slot holds."""
    min_context: int = 64
    """Smallest context bucket. A larger one means fewer buckets, but more positions to read for short sequences."""

    def context(self, length: int) -> int:
        """Return the context bucket of sequences of up to `length` tokens, at most block_size: 70 -> 128."""
        return min(max(round_up(length), self.min_context), self.block_size)


def plan(slots: list[int], starts: list[int], num_new: list[int], limits: BucketLimits) -> list[SubBatch]:
    """Return the sub-batches that run a batch.

    Args:
        slots: KV-cache slot of each sequence of the batch, all different.
        starts: current length of each sequence, in tokens.
        num_new: new tokens of each sequence, >= 1.
    """
    groups: dict[int, list[int]] = {}
    for i, new in enumerate(num_new):
        groups.setdefault(min(round_up(new), limits.block_size), []).append(i)
    sub_batches = []
    for tokens, members in sorted(groups.items()):
        members.sort(key=lambda i: slots[i])
        most = max(1, MAX_TOKENS // tokens)
        for at in range(0, len(members), most):
            some = members[at : at + most]
            context = limits.context(max(starts[i] + num_new[i] for i in some))
            sub_batches.append(_sub_batch(some, [slots[i] for i in some], tokens, context, limits.num_slots, most))
    return sub_batches


def warm_buckets(limits: BucketLimits) -> list[Bucket]:
    """Return the buckets of all decode steps up to WARM_CONTEXT, the fewest rows first."""
    rows = sorted({min(round_up(n), limits.num_slots) for n in range(1, limits.num_slots + 1)})
    contexts = sorted({limits.context(n) for n in range(1, min(limits.block_size, WARM_CONTEXT) + 1)})
    every = (Bucket(r, 1, context, dense) for r in rows for dense in (True, False) for context in contexts)
    return [b for b in every if b.dense or b.rows < limits.num_slots]


def _sub_batch(members: list[int], slots: list[int], tokens: int, context: int, num_slots: int, most: int) -> SubBatch:
    """Return the sub-batch of some members in ascending slot order; dense if that at most doubles the rows."""
    dense = min(round_up(slots[-1] + 1), num_slots)
    rows = min(round_up(len(members)), num_slots)
    if dense <= min(2 * rows, max(most, rows)):
        return SubBatch(Bucket(dense, tokens, context, dense=True), members, slots)
    return SubBatch(Bucket(rows, tokens, context, dense=False), members, list(range(len(members))))
