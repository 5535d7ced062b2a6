"""Multi-token prediction: a block that ships with a model proposes the tokens after the next one.

The block has one layer, the model's embedding and its output head (models/layers.py, `MTPInput`; Gloeckle et al. 2024,
arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437). Its entry for token j takes the target's hidden state after token
j - 1, and predicts token j + 1:

    target     t0 t1 t2 t3 |         hidden states h0 h1 h2, as t3 is the newest token
    block         t1 t2 t3 |         with       h0 h1 h2       -> x1, with its own hidden state -> x2, ...

`observe` keeps the target's hidden states until the block has processed their tokens. Entries that were made of the
block's own hidden states are removed before the next proposal, whether their tokens were accepted or not.

A prefix that a sequence shares with another one was not computed for it, so its hidden states are missing; the block's
context then begins after the prefix. If the kept states exceed MAX_KEPT_BYTES, the oldest ones of the longest sequence
are dropped. Both change the acceptance rate alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engines.base import StepBatch
from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.speculative.base import DraftRequest
from nanoinfer.speculative.draft_model import Draft, DraftModel, common
from nanoinfer.utils.arrays import Array, to_numpy

MAX_KEPT_BYTES = 2**28
MAX_CHUNKS = 64

Rows = NDArray[np.float32]


@dataclass
class _Kept:
    """Hidden states of the target after `num` consecutive tokens of a sequence, (num, n_embd)."""

    first: int
    """Index of the first token in the sequence."""
    num: int = 0
    chunks: list[Rows] = field(default_factory=list)
    """Forks share them."""

    def put(self, first: int, rows: Rows) -> None:
        """Add the rows from token `first` on, in place of those that are there; without a gap before them."""
        self.first = self.first if self.first <= first <= self.first + self.num else first
        self.chunks, self.num = [*self.between(self.first, first), rows.copy()], first - self.first + len(rows)
        if len(self.chunks) > MAX_CHUNKS:
            self.chunks = [np.concatenate(self.chunks)]

    def between(self, start: int, end: int) -> list[Rows]:
        """Return the rows of tokens `start` up to `end`, those that are there."""
        parts, at = [], self.first
        for rows in self.chunks:
            if len(part := rows[max(0, start - at) : max(0, end - at)]):
                parts.append(part)
            at += len(rows)
        return parts

    def drop(self, start: int) -> None:
        """Remove the rows before token `start`."""
        self.chunks, end = self.between(start, self.first + self.num), self.first + self.num
        self.first = min(max(self.first, start), end)
        self.num = end - self.first


class NextTokens(DraftModel):
    """Proposes what a block for multi-token prediction generates. Arguments: see `DraftModel`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept: dict[SamplerRow, _Kept] = {}

    def observe(self, sequences: Sequence[SamplerRow], first: int, rows: Rows) -> None:
        """Keep hidden states of the target: those of sequences with the same tokens, from token `first` on."""
        own, *forks = sequences
        kept = self._kept.setdefault(own, _Kept(first))
        kept.put(first, rows)
        self._kept |= {fork: replace(kept) for fork in forks}
        most = MAX_KEPT_BYTES // rows[:1].nbytes if len(rows) else 0
        while most and sum(kept.num for kept in self._kept.values()) > most:
            longest = max(self._kept.values(), key=lambda kept: kept.num)
            longest.drop(longest.first + len(longest.chunks[0]))

    def _place(self, request: DraftRequest) -> tuple[int, int] | None:
        """Return the token of the block's first entry and how many of its entries stay; None: states are missing."""
        kept, held, newest = self._kept.get(request.row), self._held.get(request.row), len(request.token_ids) - 1
        if kept is None or not max(kept.first, request.start) < newest <= kept.first + kept.num:
            return None
        if held is not None and held.first > request.start:
            keep = common(held.token_ids, request.token_ids, held.first)
            if held.first + keep > kept.first:
                return held.first, keep
        return max(kept.first, request.start) + 1, 0

    def num_behind(self, request: DraftRequest) -> int:
        """Return how many entries are missing."""
        place = self._place(request)
        return len(request.token_ids) - (request.start if place is None else sum(place))

    def _prepare(self, draft: Draft) -> bool:
        request, held = draft.request, draft.held
        if (place := self._place(request)) is None:
            return False
        held.first, keep = place
        self._cut(held, keep)
        next_entry, newest = held.first + keep, len(request.token_ids) - 1
        draft.new = request.token_ids[next_entry:]
        draft.previous = np.concatenate(self._kept[request.row].between(next_entry - 1, newest))
        return True

    def _extend(self, drafts: Sequence[Draft]) -> Array:
        batch = StepBatch(previous=np.concatenate([d.previous for d in drafts]))
        for d in drafts:
            batch.add(d.held.handle, d.new)
        logits = self.engine.extend(batch)
        for d, row in zip(drafts, to_numpy(self.engine.hidden()), strict=True):
            if not d.token_ids:  # of the target's hidden states
                d.held.token_ids += d.new
                self._kept[d.request.row].drop(len(d.request.token_ids) - 2)
            d.previous = row[None].copy()
        rows: Array = logits[:, : self._vocab_size]
        return rows

    def forget(self, row: SamplerRow) -> None:
        """Close a sequence, and drop the hidden states of its tokens."""
        super().forget(row)
        self._kept.pop(row, None)

    def reset(self) -> None:
        """Close all sequences."""
        super().reset()
        self._kept.clear()
