"""Drafters that propose what they are told, or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from helpers.models import CHARS, TINY
from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal


class Scripted(Drafter):
    """Proposes what it is told: the right tokens up to a place, wrong ones after it."""

    name = "scripted"

    def __init__(self, texts: dict[tuple[int, ...], list[int]], num_right: Callable[[int], int]) -> None:
        self._texts, self._num_right = texts, num_right
        self.num_open = 0
        self._known: set[SamplerRow] = set()
        self._round = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._round += 1
        return [Proposal(self._follow(request)) for request in requests]

    def _follow(self, request: DraftRequest) -> list[int]:
        self._known.add(request.row)
        assert request.num_tokens >= 1
        text = self._texts[tuple(request.row.prompt_token_ids)]
        done = request.row.num_output_tokens
        right = text[done : done + request.num_tokens]
        right += [0] * (request.num_tokens - len(right))
        count = self._num_right(self._round)
        return [t if i < count else (t + 1) % TINY.vocab_size for i, t in enumerate(right)]

    def forget(self, row: SamplerRow) -> None:
        self._known.discard(row)

    @property
    def num_known(self) -> int:
        return len(self._known)


class FailingDrafter(Drafter):
    """Refuses sequences whose prompt begins with b, and proposes nothing right for the others."""

    name = "failing"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if any(CHARS[a.token_ids[0]] == "b" for a in requests):
            raise RuntimeError("I do not like b")
        return [Proposal([0] * a.num_tokens) for a in requests]
