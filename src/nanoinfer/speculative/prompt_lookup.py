"""Prompt lookup: propose the tokens that followed the last occurrence of the sequence's last n tokens.

Saxena, "Prompt Lookup Decoding", 2023. A proposal takes microseconds. It is accepted often where sequences repeat
earlier tokens: summaries, edits, code, tables; it makes no proposal for n-grams that have not occurred.

Each sequence has an index of its n-grams (5 down to 2 tokens), so a proposal takes one look-up per n-gram length.
With a pool, sequences that have ended are looked up, too: agents send and generate the same text in many requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal

LENGTHS = (5, 4, 3, 2)  # of the n-grams, in order of the look-ups
POOL_LENGTH = 4  # of the n-grams in the pool, which come after those of the sequence that are as long
POOL_TOKENS = 1 << 16  # of draft="prompt-lookup:shared": at most 20 MB

_Key = tuple[str | int | None, ...]
"""A salt, and the tokens of an n-gram."""


@dataclass
class _Index:
    """The last position of each n-gram of a sequence, except the n-grams at its end."""

    salt: str | None
    token_ids: list[int] = field(default_factory=list)
    """The tokens of the sequence."""
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> the position after it."""
    num_indexed: int = 0
    """The n-grams that end before this position are in `after`."""

    def update(self, token_ids: list[int]) -> None:
        """Add the new n-grams, except those at the end, which no token follows yet."""
        self.token_ids = token_ids
        for end in range(self.num_indexed + 1, len(token_ids)):
            for n in LENGTHS:
                if n <= end:
                    self.after[tuple(token_ids[end - n : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def find(self, pool: _Pool) -> tuple[list[int], int] | None:
        """Return a text and the position in it after the last occurrence of the longest n-gram at the end, or None."""
        token_ids = self.token_ids
        for n in LENGTHS:
            if n < len(token_ids) and (position := self.after.get(tuple(token_ids[-n:]))) is not None:
                return token_ids, position
            if n == POOL_LENGTH and (found := pool.find(self.salt, token_ids[-n:])) is not None:
                return found
        return None


class _Pool:
    """Texts of sequences that have ended: of the newest ones, `max_tokens` tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._texts: deque[tuple[str | None, list[int]]] = deque()
        self._after: dict[_Key, tuple[list[int], int]] = {}

    def find(self, salt: str | None, ngram: Sequence[int]) -> tuple[list[int], int] | None:
        """Return the newest text of this salt in which a token follows the n-gram, and its position, or None."""
        return self._after.get((salt, *ngram)) if self._after else None

    def add(self, salt: str | None, token_ids: Sequence[int]) -> None:
        """Add a text, without what the pool has of its beginning: turns of a conversation repeat the ones before."""
        begin, n = max(0, len(token_ids) - self._max_tokens), POOL_LENGTH
        while begin + n < len(token_ids) and (known := self.find(salt, token_ids[begin : begin + n])) is not None:
            if known[0][known[1]] != token_ids[begin + n]:
                break
            begin += 1
        text = list(token_ids[begin:])
        if len(text) <= n:
            return
        for end, key in self._ngrams(salt, text):
            self._after[key] = text, end
        self._texts.append((salt, text))
        self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            salt, old = self._texts.popleft()
            self._num_tokens -= len(old)
            for _, key in self._ngrams(salt, old):
                if key in self._after and self._after[key][0] is old:
                    del self._after[key]

    @staticmethod
    def _ngrams(salt: str | None, text: Sequence[int]) -> Iterator[tuple[int, _Key]]:
        """Yield the position after each n-gram that a token follows, and its key."""
        for end in range(POOL_LENGTH, len(text)):
            yield end, (salt, *text[end - POOL_LENGTH : end])


class PromptLookup(Drafter):
    """Proposes the continuation of an earlier occurrence of the last n-gram.

    Args:
        pool_tokens: number of tokens of ended sequences to look up, too; proposals come from those of the same salt.
    """

    name = "prompt-lookup"

    def __init__(self, pool_tokens: int = 0) -> None:
        self._indices: dict[SamplerRow, _Index] = {}
        self._pool_tokens, self._pool = pool_tokens, _Pool(pool_tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the tokens after the occurrence; a continuation that reaches the sequence's end is repeated."""
        return [Proposal(self._follow(request)) for request in requests]

    def _follow(self, request: DraftRequest) -> list[int]:
        if (found := self._find(request)) is None:
            return []
        text, at = found
        tokens = text[at : at + request.num_tokens]
        period = len(text) - at  # "ab ab" continues with "ab ab ab"
        while text is request.token_ids and len(tokens) < request.num_tokens:
            tokens.append(tokens[len(tokens) - period])
        return tokens

    def _find(self, request: DraftRequest) -> tuple[list[int], int] | None:
        index = self._indices.get(request.row)
        if index is None:
            index = self._indices[request.row] = _Index(request.salt)
        index.update(request.token_ids)
        return index.find(self._pool)

    def num_behind(self, request: DraftRequest) -> int | None:
        """Return 0, or None without an occurrence: the time to index tokens is negligible."""
        return None if self._find(request) is None else 0

    def forget(self, row: SamplerRow) -> None:
        """Drop the index of a sequence, and add its text to the pool."""
        if (index := self._indices.pop(row, None)) is not None and self._pool_tokens:
            self._pool.add(index.salt, index.token_ids)

    def reset(self) -> None:
        """Drop all indices, and the pool."""
        self._indices, self._pool = {}, _Pool(self._pool_tokens)
