"""Prompt lookup: propose the tokens that followed the last occurrence of the sequence's last n tokens.

Saxena, "Prompt Lookup Decoding", 2023. A proposal takes microseconds. It is accepted often where sequences repeat
earlier tokens: summaries, edits, code, tables; it makes no proposal for n-grams that have not occurred.

Each sequence has an index of its n-grams (5 down to 2 tokens), so a proposal takes one look-up per n-gram length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.speculative.base import DraftRequest, Proposal

LENGTHS = (5, 4, 3, 2)  # of the n-grams, in order of the look-ups


@dataclass
class _Index:
    """The last position of each n-gram of a sequence, except the n-grams at its end."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> the position after it."""
    num_indexed: int = 0
    """The n-grams that end before this position are in `after`."""

    def update(self, token_ids: Sequence[int]) -> None:
        """Add the new n-grams, except those at the end, which no token follows yet."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for n in LENGTHS:
                if n <= end:
                    self.after[tuple(token_ids[end - n : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the last earlier occurrence of the longest n-gram at the end, or None."""
        for n in LENGTHS:
            if n < len(token_ids) and (position := self.after.get(tuple(token_ids[-n:]))) is not None:
                return position
        return None


class PromptLookup:
    """Proposes the continuation of an earlier occurrence of the last n-gram."""

    name = "prompt-lookup"

    def __init__(self) -> None:
        self._indices: dict[SamplerRow, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the tokens after the earlier occurrence; a continuation that reaches the end is repeated."""
        return [Proposal(self._follow(request)) for request in requests]

    def _follow(self, request: DraftRequest) -> list[int]:
        index = self._indices.get(request.row)
        if index is None:
            index = self._indices[request.row] = _Index()
        index.update(request.token_ids)
        if (at := index.find(request.token_ids)) is None:
            return []
        tokens = request.token_ids[at : at + request.num_tokens]
        period = len(request.token_ids) - at  # "ab ab" continues with "ab ab ab"
        while len(tokens) < request.num_tokens:
            tokens.append(tokens[len(tokens) - period])
        return tokens

    def num_behind(self, request: DraftRequest) -> int:
        """Return 0: the time to index tokens is negligible."""
        return 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the estimated seconds of a few dictionary look-ups per sequence."""
        return 5e-6 * num_seqs

    def forget(self, row: SamplerRow) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(row, None)

    def reset(self) -> None:
        """Drop all indices."""
        self._indices.clear()
