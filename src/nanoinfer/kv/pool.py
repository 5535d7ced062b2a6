"""The bookkeeping of a paged KV cache: which blocks of one pool hold the tokens of which sequence. No tensors.

A sequence is a length and a table of blocks; position p is in block table[p // KV_BLOCK]. A fork has the same table,
and the pool counts how many tables refer to a block. A sequence that appends to a partly filled block of several tables
gets a copy of it first, so that what the others read does not change:

    a   7 tokens  [0]                  fork b of a       [0]      block 0 has 2 references
                                       b appends 1       [1]      copy of block 0, then the new token; 0 has 1 reference
                                       a appends 10      [0 2]    a's alone: written in place

The pool of the engine `native` (kernels/cpu/model/cache.cpp) gives the same tables for the same calls.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import KV_BLOCK


@dataclass
class _Sequence:
    length: int = 0
    table: list[int] = field(default_factory=list)


class BlockPool:
    """The tables of all open sequences, and the free blocks.

    Args:
        num_blocks: blocks of KV_BLOCK tokens.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Close all sequences."""
        self._sequences: dict[int, _Sequence] = {}
        self._references = [0] * self.num_blocks
        self._free = list(range(self.num_blocks))[::-1]  # the last one is taken next: first 0, 1, 2, ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    @property
    def handles(self) -> Collection[int]:
        """The open sequences."""
        return self._sequences.keys()

    def length(self, handle: int) -> int:
        """Return the number of tokens in a sequence."""
        return self._sequences[handle].length

    def table(self, handle: int) -> list[int]:
        """Return the blocks of a sequence, which must not be modified."""
        return self._sequences[handle].table

    def open(self, handle: int) -> None:
        """Add an empty sequence."""
        self._sequences[handle] = _Sequence()

    def fork(self, parent: int, child: int) -> None:
        """Let `child` share the blocks of `parent`. An open `child` must be empty."""
        s = self._sequences[parent]
        for block in s.table:
            self._references[block] += 1
        self._sequences[child] = _Sequence(s.length, s.table.copy())

    def truncate(self, handle: int, length: int) -> None:
        """Remove the tokens from position `length` on, and the blocks that hold no others."""
        s = self._sequences[handle]
        while len(s.table) > -(-length // KV_BLOCK):
            self._drop(s.table.pop())
        s.length = length

    def close(self, handle: int) -> None:
        """Free a sequence."""
        self.truncate(handle, 0)
        del self._sequences[handle]

    def blocks_needed(self, handle: int, count: int) -> int:
        """Return how many blocks appending `count` tokens takes from the pool.

        Of several sequences that share a partly filled last block and are appended to, each counts a copy, although the
        last one keeps the block.
        """
        s = self._sequences[handle]
        return -(-(s.length + count) // KV_BLOCK) - len(s.table) + self._must_copy(s)

    def check(self, needed: int) -> None:
        """Raise NanoinferError if fewer than `needed` blocks are free."""
        if needed > len(self._free):
            raise NanoinferError(
                f"the KV cache is full: {needed} more blocks of {KV_BLOCK} tokens are needed, {len(self._free)} of"
                f" {self.num_blocks} are free: raise kv_cache_memory, or close sequences"
            )

    def append(self, handle: int, count: int) -> tuple[int, int] | None:
        """Extend a sequence by `count` >= 1 tokens. The pool must have `blocks_needed` free blocks.

        Returns:
            (shared, own): the caller must copy the contents of block `shared` to block `own` before it writes the new
            tokens; None if nothing is to be copied.
        """
        s, copy = self._sequences[handle], None
        if self._must_copy(s):
            copy = s.table[-1], self._take()
            self._drop(s.table[-1])
            s.table[-1] = copy[1]
        s.length += count
        while len(s.table) * KV_BLOCK < s.length:
            s.table.append(self._take())
        return copy

    def _must_copy(self, s: _Sequence) -> bool:
        """Return whether the next token goes to a block that other sequences use."""
        return s.length % KV_BLOCK > 0 and self._references[s.table[-1]] > 1

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)
