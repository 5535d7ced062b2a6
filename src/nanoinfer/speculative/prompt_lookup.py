"""Prompt lookup: what followed the last time that these words stood here, in the prompt or in the text so far.

Source of the idea: Saxena, "Prompt Lookup Decoding", 2023. Costs microseconds, so it pays wherever texts repeat
themselves: summaries, edits, code, tables. It has nothing to say about new text.

An index of n-grams (5 down to 2 tokens) is kept for each text and grows with it: a proposal is one look-up a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.speculative.base import DraftRequest, Proposal

LENGTHS = (5, 4, 3, 2)  # of the n-grams, the most telling first


@dataclass
class _Index:
    """Where n-grams of a text ended last, all of them but those at its very end."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> the position after it."""
    num_indexed: int = 0
    """The n-grams that end before this position are in `after`."""

    def update(self, token_ids: Sequence[int]) -> None:
        """Add what is new, but not the n-grams that nothing follows yet."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for n in LENGTHS:
                if n <= end:
                    self.after[tuple(token_ids[end - n : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the last earlier place that ends as the text does, by the longest n-gram."""
        for n in LENGTHS:
            if n < len(token_ids) and (found := self.after.get(tuple(token_ids[-n:]))) is not None:
                return found
        return None


class PromptLookup:
    """Proposes a continuation that has been seen in the text itself."""

    name = "prompt-lookup"

    def __init__(self) -> None:
        self._indices: dict[SamplerRow, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return what followed last time; where that runs into the text's end, it goes on with itself."""
        return [Proposal(self._follow(request)) for request in requests]

    def _follow(self, request: DraftRequest) -> list[int]:
        index = self._indices.get(request.row)
        if index is None:
            index = self._indices[request.row] = _Index()
        index.update(request.token_ids)
        if (at := index.find(request.token_ids)) is None:
            return []
        tokens = request.token_ids[at : at + request.num_tokens]
        period = len(request.token_ids) - at  # a text that ends in "ab ab" goes on with "ab ab ab"
        while len(tokens) < request.num_tokens:
            tokens.append(tokens[len(tokens) - period])
        return tokens

    def num_behind(self, request: DraftRequest) -> int:
        """Return 0: reading is next to free."""
        return 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return about how long a proposal takes: a few dictionary look-ups."""
        return 5e-6 * num_seqs

    def forget(self, row: SamplerRow) -> None:
        """Drop a text's index."""
        self._indices.pop(row, None)

    def reset(self) -> None:
        """Drop all indices."""
        self._indices.clear()
