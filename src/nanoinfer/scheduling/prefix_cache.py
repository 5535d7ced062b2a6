"""The prefix cache: sequences that begin with the same tokens share their keys and values.

    running   A B C D E          a request with the prompt A B C X forks the sequence with the longest common prefix,
    idle      A B F              truncates the fork to A B C, and extends it by X

A radix tree over token ids has all sequences: running ones by their prompts, and those that ended, which stay
open, by all of their tokens. Idle sequences are closed, least recently used first, when their blocks or slots are
needed. Sequences of different salts or adapters share nothing.

All of this uses the engine's verbs and counts of blocks, so it works on every engine. Sharing costs nothing where forks
share blocks (native, paged); other engines copy. The idea of a radix tree is that of SGLang's RadixAttention (Zheng et
al. 2023, arXiv 2312.07104); block tables that are copied when written are those of PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import cast

from nanoinfer.engines.base import Engine, Handle
from nanoinfer.errors import NanoinferError
from nanoinfer.scheduling.sequence import CacheKey, Sequence

log = logging.getLogger("nanoinfer")

MIN_WAIT = 16
"""Tokens that must be gained for a request to wait until another one has processed their common prefix."""
_HEADROOM = 16
"""Tokens that each running sequence can grow by after an admission before blocks run out."""
_MIN_STORED = 16
"""Tokens that must be gained for a stored sequence to be read."""
STORED = Handle(-1)
Load = Callable[[Handle, int], None]
"""(handle, length): extend a sequence, whose tokens are the first of a stored one, to `length` tokens."""


@dataclass(eq=False)
class _Node:
    """The tokens between two positions where sequences part or end."""

    token_ids: list[int]
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    """By their first token."""
    entries: dict[Entry, None] = field(default_factory=dict)
    """The sequences that begin with the tokens from the root to here, oldest first."""


@dataclass(eq=False)
class Entry:
    """A sequence in the tree."""

    handle: Handle
    """STORED: the engine does not have it."""
    token_ids: list[int]
    """Its tokens from position 0 on; those of a running one are its prompt."""
    key: CacheKey = (None, 0)
    sequence: Sequence | None = None
    """The running sequence; None: it is idle."""
    end: _Node | None = None
    """Where its tokens end in the tree."""
    load: Load | None = None
    """Reads a stored sequence, which is neither idle nor running."""

    @property
    def num_cached(self) -> int:
        """Number of its tokens that the engine has."""
        if self.sequence is None:
            return len(self.token_ids)
        return min(self.sequence.num_cached, len(self.token_ids))


class PrefixCache:
    """Opens and closes the engine's sequences, and shares prefixes between them.

    Args:
        engine: whose sequences these are.
        enabled: whether prefixes are shared, and ended sequences stay open.
    """

    def __init__(self, engine: Engine, enabled: bool = True) -> None:
        self.engine = engine
        self.enabled = enabled
        self._roots: dict[CacheKey, _Node] = {}
        self._idle: dict[Entry, None] = {}  # least recently used first
        self._running: dict[Sequence, Entry] = {}
        self._stored: list[Entry] = []
        self._max_open = engine.limits.max_num_seqs + engine.limits.max_idle_seqs

    @property
    def idle(self) -> list[Handle]:
        """Handles of the idle sequences, least recently used first."""
        return [entry.handle for entry in self._idle]

    @property
    def kept(self) -> Iterable[Entry]:
        """Idle and stored sequences, most recently used first."""
        return [*reversed(self._idle), *self._stored]

    def store(self, key: CacheKey, token_ids: list[int], load: Load) -> None:
        """Add a sequence that `load` reads when a request shares its tokens."""
        self._stored.append(entry := Entry(STORED, token_ids, key, load=load))
        self._insert(entry)

    def find(self, token_ids: list[int], key: CacheKey) -> tuple[Entry | None, int]:
        """Return the sequence with the longest prefix of `token_ids` in common, and the length of that prefix.

        It is at most len(token_ids) - 1, because the logits after the last token are needed. Of several sequences, it
        is one that has the prefix cached, if there is one, and one that can be cut there. A sequence that cannot be
        cut there shares what it can (`Engine.cut`); another one that parts earlier may share more. A stored sequence is
        read into an idle one.
        """
        entry, length = self._find(token_ids, key)
        return (entry, length) if entry is None or entry.load is None else self._load(entry, length)

    def _load(self, stored: Entry, length: int) -> tuple[Entry | None, int]:
        """Return an idle sequence with the first tokens of a stored one, and their number: fewer if blocks are few."""
        base, num_shared = self._find([*stored.token_ids[:length], -1], stored.key, stored=False)
        num_shared = 0 if base is None else min(num_shared, base.num_cached)
        if length < num_shared + _MIN_STORED or not self._free_slot(base):
            return base, num_shared
        engine = self.engine
        handle = engine.fork(base.handle) if base is not None else engine.open()
        engine.truncate(handle, num_shared)
        while engine.blocks_needed(handle, length - num_shared) > engine.num_free_blocks:
            if not self.close_oldest():
                break
        else:
            try:
                cast(Load, stored.load)(handle, length)
            except NanoinferError as e:  # the file is damaged or was changed
                log.warning("%s", e)
                self.forget_stored()
        if engine.length(handle) < length:
            engine.close(handle)
            return self._find([*stored.token_ids[:length], -1], stored.key, stored=False)  # some may have been closed
        self._idle[loaded := Entry(handle, stored.token_ids[:length], stored.key)] = None
        self._insert(loaded)
        return loaded, length

    def forget_stored(self) -> None:
        """Remove the stored sequences."""
        for entry in self._stored:
            self._remove(entry)
        self._stored.clear()

    def _find(self, token_ids: list[int], key: CacheKey, stored: bool = True) -> tuple[Entry | None, int]:
        """`find` without reading; stored: whether stored sequences count."""
        node, length, limit = self._roots.get(key), 0, len(token_ids) - 1
        if node is None:
            return None, 0
        path: list[tuple[_Node, int]] = []
        while length < limit and (child := node.children.get(token_ids[length])) is not None:
            node = child
            common = num_common(child.token_ids, token_ids[length:limit])
            length += common
            path.append((node, length))
            if common < len(child.token_ids):
                break
        best: tuple[Entry | None, int] = None, 0
        for node, length in reversed(path):
            if best[1] >= length:
                break
            entries = [e for e in reversed(node.entries) if stored or e.load is None]
            best = max(best, self._longest(entries, length), key=itemgetter(1))
        return best

    def _longest(self, entries: Iterable[Entry], length: int) -> tuple[Entry | None, int]:
        """Return the sequence that shares the most of the first `length` tokens of a node, and how many.

        A sequence that is still processing them shares all of them later."""
        best: tuple[Entry | None, int, int] = None, 0, 0
        for entry in entries:
            cached = min(entry.num_cached, length)
            found = entry, self.engine.cut(entry.handle, length) if cached == length else length, cached
            if best[0] is None or found[2:0:-1] > best[2:0:-1]:
                best = found
            if best[1:] == (length, length):
                break
        return best[:2]

    def open(self, sequence: Sequence, token_ids: list[int], entry: Entry | None, num_shared: int) -> None:
        """Give a sequence its handle: a fork of `entry` truncated to `num_shared` tokens, or an empty sequence.

        An idle sequence is taken over instead of forked if all of its tokens are shared, or if no slot is free.
        """
        engine = self.engine
        if entry is None or not num_shared:
            self._free_slot()
            handle = engine.open(sequence.request.adapter)
        elif entry in self._idle and (num_shared == len(entry.token_ids) or not self._free_slot(entry)):
            self._remove(entry)
            handle = entry.handle
        else:
            self._free_slot(entry)
            handle = engine.fork(entry.handle)
            if entry in self._idle:  # used now
                self._idle[entry] = self._idle.pop(entry)
        sequence.handle = handle
        if engine.length(handle) > num_shared:
            engine.truncate(handle, num_shared)
        if self.enabled:
            self._running[sequence] = running = Entry(handle, token_ids, sequence.request.cache_key, sequence)
            self._insert(running)

    def detach(self, sequence: Sequence) -> None:
        """Remove a running sequence from the tree, because its first tokens will be replaced."""
        if (entry := self._running.pop(sequence, None)) is not None:
            self._remove(entry)

    def retire(self, sequence: Sequence) -> None:
        """Make an ended or preempted sequence idle. Close it if it failed, or if another one has its tokens."""
        assert sequence.handle is not None
        handle, engine = sequence.handle, self.engine
        self.detach(sequence)
        length = min(engine.length(handle), len(sequence.token_ids) - sequence.start)  # the engine may have more
        token_ids = sequence.token_ids[sequence.start : sequence.start + length]
        if not self.enabled or sequence.error is not None or self._has(token_ids, sequence.request.cache_key):
            engine.close(handle)
        else:
            engine.truncate(handle, length)
            self._idle[entry := Entry(handle, token_ids, sequence.request.cache_key)] = None
            self._insert(entry)
        sequence.handle = None

    def free_slots(self, num_seqs: int) -> bool:
        """Close idle sequences until `num_seqs` more can be opened; return whether they can."""
        return all(self.close_oldest() for _ in range(len(self.engine.handles) + num_seqs - self._max_open))

    def clear(self) -> None:
        """Forget all sequences but those that are stored, after the engine was reset."""
        self._roots.clear()
        self._idle.clear()
        self._running.clear()
        for entry in self._stored:
            self._insert(entry)

    def _free_slot(self, spare: Entry | None = None) -> bool:
        return len(self.engine.handles) < self._max_open or self.close_oldest(spare)

    def close_oldest(self, spare: Entry | None = None) -> bool:
        """Close the idle sequence that was not used for the longest time; return whether there was one but `spare`."""
        entry = next((e for e in self._idle if e is not spare), None)
        if entry is None:
            return False
        self._close(entry)
        return True

    def _close(self, entry: Entry) -> None:
        """Close an idle sequence."""
        self._remove(entry)
        self.engine.close(entry.handle)

    def close_adapter(self, adapter: int) -> None:
        """Close the idle sequences of an adapter."""
        for entry in [entry for entry in self._idle if entry.key[1] == adapter]:
            self._close(entry)

    # Blocks --------------------------------------------------------------------------

    def reserved_for(self, running: Seq[Sequence]) -> int:
        """Return the number of blocks that the running sequences need to continue for some steps."""
        return sum(self.blocks_to_continue(s) for s in running if s.handle is not None)

    def blocks_to_continue(self, s: Sequence) -> int:
        """Return the number of blocks for a sequence's uncached tokens and the next few, if it may have so many."""
        more = min(
            _HEADROOM, s.max_tokens - s.num_output_tokens, self.engine.limits.block_size - (s.num_tokens - s.start)
        )
        return self.blocks_needed(s, s.num_uncached + max(0, more))

    def free_blocks(self, s: Sequence, count: int, reserved: int) -> bool:
        """Close idle sequences until `count` tokens fit beside `reserved` blocks; return whether they do."""
        while reserved + self.blocks_needed(s, count) > self.engine.num_free_blocks:  # in this order: it may slide
            if not self.close_oldest():
                return False
        return True

    def blocks_needed(self, s: Sequence, count: int) -> int:
        """Return the number of blocks that processing `count` tokens of a running sequence takes."""
        if s.start != s.next_start:  # its window slides: all of its blocks are replaced
            self.slide(s)
        return self.engine.blocks_needed(cast(Handle, s.handle), count)

    def slide(self, s: Sequence) -> None:
        """Remove all cached tokens, whose positions change."""
        s.start, s.num_cached = s.next_start, 0
        self.detach(s)
        self.engine.truncate(cast(Handle, s.handle), 0)

    # The tree --------------------------------------------------------------------------------------------

    def _insert(self, entry: Entry) -> None:
        node = self._roots.setdefault(entry.key, _Node([]))
        node.entries[entry] = None
        rest = entry.token_ids
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node(rest, node)
            elif (common := num_common(child.token_ids, rest)) < len(child.token_ids):
                child = _split(child, common)
            child.entries[entry] = None
            node, rest = child, rest[len(child.token_ids) :]
        entry.end = node

    def _remove(self, entry: Entry) -> None:
        self._idle.pop(entry, None)
        node = entry.end
        while node is not None:
            node.entries.pop(entry, None)
            parent = node.parent
            if not node.entries:
                if parent is None:
                    self._roots.pop(entry.key, None)
                else:
                    parent.children.pop(node.token_ids[0], None)
            node = parent

    def _has(self, token_ids: list[int], key: CacheKey) -> bool:
        """Return whether another sequence has all of these tokens cached."""
        entry, length = self._find([*token_ids, -1], key, stored=False)
        return length == len(token_ids) and (entry is None or entry.num_cached >= length)


def _split(node: _Node, length: int) -> _Node:
    """Split a node after `length` tokens; return the new one, which has the first of them."""
    assert node.parent is not None
    head = _Node(node.token_ids[:length], node.parent, {node.token_ids[length]: node}, dict(node.entries))
    node.parent.children[node.token_ids[0]] = head
    node.token_ids, node.parent = node.token_ids[length:], head
    return head


def num_common(a: Seq[int], b: Seq[int]) -> int:
    """Return the length of the longest common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
