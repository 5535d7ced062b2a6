"""Kept sequences: they stay open in the engine after their request, so that a later request continues them.

    request 1   prompt A, output B      ->  kept: A B
    request 2   prompt A B C            ->  takes the sequence over, extends it by C only

The new request shares the longest common prefix of its window and the kept tokens, but not its last token, whose logits
it needs. Kept sequences are closed, least recently used first, when running requests need their room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.scheduling.sequence import Sequence


@dataclass(eq=False)
class KeptSequence:
    """A place for one kept sequence. A request that is made with it continues the sequence, and leaves its own there.

    While such a request runs, and after the engine was reset, the place is empty.
    """

    handle: int = -1
    """Handle of the engine's sequence."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens in it."""
    released: bool = False
    """Whether its owner has dropped it."""


class KeptSequences:
    """The kept sequences of an engine, least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[KeptSequence, None] = {}

    def __contains__(self, kept: object) -> bool:
        return kept in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def handles(self) -> list[int]:
        """Handles of the kept sequences."""
        return [kept.handle for kept in self._kept]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all kept sequences."""
        return sum(len(kept.token_ids) for kept in self._kept)

    def add(self, kept: KeptSequence, handle: int, token_ids: list[int]) -> None:
        """Keep a sequence in an empty place."""
        kept.handle, kept.token_ids = handle, token_ids
        self._kept[kept] = None

    def pop(self, kept: KeptSequence | None = None) -> int:
        """Empty a place, or that of the least recently used sequence, and return the handle."""
        kept = kept if kept is not None else next(iter(self._kept))
        del self._kept[kept]
        return kept.handle

    def clear(self) -> None:
        """Forget all, after the engine was reset."""
        self._kept.clear()

    def resume(self, sequence: Sequence) -> None:
        """Let a new sequence continue the one that its request has a place for, if there is one."""
        kept = sequence.request.kept
        if kept is None or kept not in self._kept:
            return
        window = sequence.token_ids[sequence.wanted_start :]
        sequence.handle = self.pop(kept)
        sequence.start = sequence.wanted_start
        sequence.num_cached = sequence.num_shared = _num_shared(kept.token_ids, window)
        sequence.request.num_cached_tokens = sequence.num_cached


def _num_shared(kept: list[int], window: list[int]) -> int:
    """Return the length of the longest common prefix, at most that of the window - 1."""
    most = min(len(kept), len(window) - 1)
    if kept[:most] == window[:most]:
        return most
    return next(i for i in range(most) if kept[i] != window[i])
