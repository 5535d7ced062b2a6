"""Room in the KV cache: how many blocks sequences need, and making room by closing kept sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanoinfer.engines.base import Engine, Handle
from nanoinfer.scheduling.prefix_cache import PrefixCache
from nanoinfer.scheduling.sequence import Sequence

_HEADROOM = 16
"""Tokens that each running sequence can grow by after an admission before blocks run out."""


class Room:
    """The blocks of an engine's pool.

    Args:
        engine: its limits and its number of free blocks.
        cache: closes kept sequences.
    """

    def __init__(self, engine: Engine, cache: PrefixCache) -> None:
        self._engine, self._cache = engine, cache

    def reserved_for(self, running: Seq[Sequence]) -> int:
        """Return the number of blocks that the running sequences need to continue for some steps."""
        return sum(self.blocks_to_continue(s) for s in running if s.handle is not None)

    def blocks_to_continue(self, s: Sequence) -> int:
        """Return the number of blocks for a sequence's uncached tokens and the next few, if it may have so many."""
        more = min(
            _HEADROOM, s.max_tokens - s.num_output_tokens, self._engine.limits.block_size - (s.num_tokens - s.start)
        )
        return self.blocks_needed(s, s.num_uncached + max(0, more))

    def make(self, s: Sequence, count: int, reserved: int) -> bool:
        """Close kept sequences until `count` tokens fit beside `reserved` blocks; return whether they do."""
        while reserved + self.blocks_needed(s, count) > self._engine.num_free_blocks:  # in this order: it may slide
            if not self._cache.close_oldest():
                return False
        return True

    def blocks_needed(self, s: Sequence, count: int) -> int:
        """Return the number of blocks that processing `count` tokens of a running sequence takes."""
        if s.start != s.next_start:  # its window slides: all of its blocks are replaced
            self.slide(s)
        return self._engine.blocks_needed(Handle(s.handle or 0), count)

    def slide(self, s: Sequence) -> None:
        """Remove all cached tokens, whose positions change."""
        s.start, s.num_cached = s.next_start, 0
        self._cache.detach(s)
        self._engine.truncate(Handle(s.handle or 0), 0)
