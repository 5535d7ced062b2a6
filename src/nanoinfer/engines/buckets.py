"""Which shapes a ragged batch is run in: integers only, no tensor library.

A captured graph and a compiled step have fixed shapes, and a ragged batch has a new one at every step. So shapes are
rounded up to a few: rows and tokens to powers of two, the context to a bucket that covers the longest text.

    batch: A decodes 1 token, B decodes 1, C has a prompt of 50
    calls: (rows 2, tokens 1, context 64)    A and B
           (rows 1, tokens 64, context 64)   C, 14 tokens of padding
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 4096
"""Tokens of one call, padding included: bounds what a step takes beside the weights and the cache."""


@dataclass(frozen=True)
class Bucket:
    """The static shape of one call."""

    rows: int
    tokens: int
    """New tokens of a row, padding included."""
    context: int
    """Every position is below it."""
    dense: bool
    """Row i is slot i: the cache is read where it lies, not gathered."""


@dataclass(frozen=True)
class SubBatch:
    """A part of a batch that is run at once."""

    shape: Bucket
    members: list[int]
    """Indices into the batch."""
    rows: list[int]
    """The row of each member."""


def round_up(n: int) -> int:
    """Return the smallest power of two that is at least n: 5 -> 8."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class BucketLimits:
    """What calls may be made for."""

    num_slots: int
    """Slots there are."""
    block_size: int
    """Tokens that a slot holds."""
    min_context: int = 64
    """The smallest bucket of the context: fewer buckets, or less to read."""

    def context(self, length: int) -> int:
        """Return the context to read for texts up to `length` tokens: 70 -> 128, and never more than block_size."""
        return min(max(round_up(length), self.min_context), self.block_size)


def plan(slots: list[int], starts: list[int], num_new: list[int], room: BucketLimits) -> list[SubBatch]:
    """Return the calls that run a batch.

    Args:
        slots: where each sequence of the batch lives, all different.
        starts: tokens that each has already.
        num_new: new tokens of each, >= 1.
        room: slots, their length, and buckets.
    """
    groups: dict[int, list[int]] = {}
    for i, new in enumerate(num_new):
        groups.setdefault(min(round_up(new), room.block_size), []).append(i)
    calls = []
    for tokens, members in sorted(groups.items()):
        members.sort(key=lambda i: slots[i])
        most = max(1, MAX_TOKENS // tokens)
        for at in range(0, len(members), most):
            some = members[at : at + most]
            context = room.context(max(starts[i] + num_new[i] for i in some))
            calls.append(_call(some, [slots[i] for i in some], tokens, context, room.num_slots, most))
    return calls


def _call(members: list[int], slots: list[int], tokens: int, context: int, num_slots: int, most: int) -> SubBatch:
    """Return the call of some members, by ascending slot: dense where that takes at most twice the rows."""
    dense = min(round_up(slots[-1] + 1), num_slots)
    rows = min(round_up(len(members)), num_slots)
    if dense <= min(2 * rows, max(most, rows)):
        return SubBatch(Bucket(dense, tokens, context, dense=True), members, slots)
    return SubBatch(Bucket(rows, tokens, context, dense=False), members, list(range(len(members))))
