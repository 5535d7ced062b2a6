"""The bookkeeping of the states of recurrent layers: which rows of memory hold those of which sequence. No tensors.

A row has the state of each recurrent layer after the first `base` tokens of a sequence, and the inputs of up to
num_pending tokens after them: 1, or the proposals of a draft and 1. A step first applies those that are still there,
then computes the new tokens from the result, and keeps the inputs of the new tokens if they are few:

    row   state after 40 tokens, inputs of tokens 40..43      a verification of 3 proposals
          truncate to 42: the last two inputs are forgotten   2 proposals were rejected
    step  state after 42 tokens, inputs of token 42           one token

So the last tokens can be removed without a copy. A fork has its parent's row; the one that runs next gets a copy. A
kept row lets forks be truncated to its length. Kept rows are given up when rows are needed: those between two chunks of
a prompt first, and of each kind the one that was not used for the longest time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

ZEROS = 0
"""The row of an empty sequence, which is never written."""


class StateStep(NamedTuple):
    """The row of one sequence in a step, which no other sequence has."""

    row: int
    """Row to read and to write."""
    num_pending: int
    """Inputs of the row to apply to its states before the new tokens."""


@dataclass(eq=False)
class _Kept:
    row: int
    base: int
    num_pending: int
    inner: bool
    """Whether it is in the middle of a prompt that took several steps: it is given up before others."""
    num_users: int = 1
    """Sequences that can be truncated to it."""

    @property
    def length(self) -> int:
        return self.base + self.num_pending


@dataclass
class _Sequence:
    row: int = ZEROS
    base: int = 0
    num_pending: int = 0
    kept: list[_Kept] = field(default_factory=list)
    """Shortest first."""

    @property
    def length(self) -> int:
        return self.base + self.num_pending


class StatePool:
    """The rows of all open sequences.

    Args:
        num_rows: rows beside that of zeros; at least one for each sequence that may be open.
        num_pending: tokens whose inputs a row keeps.
    """

    def __init__(self, num_rows: int, num_pending: int) -> None:
        self.num_rows, self._num_pending = num_rows, num_pending
        self.clear()

    def clear(self) -> None:
        """Close all sequences."""
        self._sequences: dict[int, _Sequence] = {}
        self._references = [1] + [0] * self.num_rows
        self._free = list(range(self.num_rows, 0, -1))
        self._kept: dict[_Kept, None] = {}  # least recently used first

    def open(self, handle: int) -> None:
        """Add an empty sequence."""
        self._references[ZEROS] += 1
        self._sequences[handle] = _Sequence()

    def fork(self, parent: int, child: int) -> None:
        """Let `child`, which is open and empty, have the row of `parent`, and what is kept of it."""
        of, own = self._sequences[parent], self._sequences[child]
        self._drop(own.row)
        self._references[of.row] += 1
        self._sequences[child] = _Sequence(of.row, of.base, of.num_pending, of.kept.copy())
        for kept in of.kept:
            kept.num_users += 1

    def close(self, handle: int) -> None:
        """Free a sequence."""
        s = self._sequences.pop(handle)
        self._drop(s.row)
        for kept in s.kept:
            self._release(kept)

    def cut(self, handle: int, length: int) -> int:
        """Return the greatest length, at most `length`, to which a sequence can be truncated."""
        s = self._sequences[handle]
        if length >= s.base:
            return min(length, s.length)
        return max((min(k.length, length) for k in self._of(s) if k.base <= length), default=0)

    def truncate(self, handle: int, length: int) -> None:
        """Remove the tokens from position `length` on, which is one that `cut` returns."""
        s = self._sequences[handle]
        if length < s.base:
            found = [k for k in self._of(s) if k.base <= length <= k.length]
            self._drop(s.row)
            s.row, s.base = (found[-1].row, found[-1].base) if found else (ZEROS, 0)
            self._references[s.row] += 1
            for kept in found:  # used now
                self._kept[kept] = self._kept.pop(kept)
        s.num_pending = length - s.base
        for kept in [k for k in s.kept if k.length > length]:
            s.kept.remove(kept)
            self._release(kept)

    def keep(self, handle: int, inner: bool = False) -> None:
        """Keep the row of a sequence as it is, so that forks can be truncated to its length. inner: see `_Kept`."""
        s = self._sequences[handle]
        if s.row != ZEROS and not any(k.length == s.length for k in self._of(s)):
            self._references[s.row] += 1
            s.kept.append(kept := _Kept(s.row, s.base, s.num_pending, inner))
            self._kept[kept] = None

    def step(self, handles: Seq[int], num_new: Seq[int]) -> tuple[list[tuple[int, int]], list[StateStep]]:
        """Extend sequences by new tokens.

        Returns:
            (shared, own) of each row to copy before the step, in this order, and the row of each sequence.
        """
        copies, steps = [], []
        for handle, count in zip(handles, num_new, strict=True):
            s = self._sequences[handle]
            while self._references[s.row] > 1 and not self._free:
                self._evict(next((k for k in self._kept if k.inner), None) or next(iter(self._kept)))
            if self._references[s.row] > 1:
                copies.append((s.row, self._free.pop()))
                self._drop(s.row)
                s.row = copies[-1][1]
                self._references[s.row] = 1
            steps.append(StateStep(s.row, s.num_pending))
            few = count <= self._num_pending
            s.base, s.num_pending = s.length + (0 if few else count), count if few else 0
        return copies, steps

    def _of(self, s: _Sequence) -> list[_Kept]:
        """Return what is still kept of a sequence."""
        s.kept = [kept for kept in s.kept if kept in self._kept]
        return s.kept

    def _evict(self, kept: _Kept) -> None:
        del self._kept[kept]
        self._drop(kept.row)

    def _release(self, kept: _Kept) -> None:
        kept.num_users -= 1
        if not kept.num_users and kept in self._kept:
            self._evict(kept)

    def _drop(self, row: int) -> None:
        self._references[row] -= 1
        if not self._references[row]:
            self._free.append(row)
