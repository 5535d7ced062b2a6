"""Draft model: a smaller model with the same tokenizer, on its own engine with its own KV cache.

A quantized copy of the target, or its first layers, can be the draft too (draft_factory.py). See Leviathan et al. 2023;
Chen et al. 2023 (arXiv 2302.01318).

The draft's KV cache holds the tokens that it has processed of each sequence. Before it proposes, it truncates each
sequence to the prefix shared with the target's, which removes rejected proposals, and extends it by the new tokens.
Then it runs k - 1 further steps on all sequences together:

    draft's cache   [a b c | x y]      x, y: proposals of the last round; the target accepted x and sampled z
    sequence        [a b c   x z]      ->  truncate to 4, extend by z, sample; extend by the sample, sample; ...

The draft samples with the target's parameters and with the same uniform for each position (verify.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.sampling.sampler import Sampler, SamplerRow
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal, ProposalBuilder, sample_next
from nanoinfer.speculative.step_costs import StepTimes
from nanoinfer.utils.arrays import Array

MAX_NUM_BATCHED_TOKENS = 2048  # in one step of the draft


@dataclass
class Held:
    """One sequence in the draft's KV cache."""

    handle: Handle
    token_ids: list[int] = field(default_factory=list)
    """The tokens in the cache that the target has, too, or may have."""
    first: int = 0
    """Index of the first of them in the sequence (mtp.py)."""


@dataclass
class Draft(ProposalBuilder):
    """A proposal of a draft model under construction."""

    held: Held = field(kw_only=True)
    new: list[int] = field(default_factory=list)
    """The tokens to process next, >= 1."""
    previous: Any = None
    """(len(new), n_embd): hidden states before them (mtp.py)."""


class DraftModel(Drafter):
    """Proposes the tokens that a smaller model generates.

    Args:
        engine: the draft's engine; its max_num_seqs must be at least the target engine's.
        vocab_size: number of tokens that may be sampled, as for the target.
        times: seconds of the draft's steps, with logits for every token.
        reading: with logits for one token; None: as `times`.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        sampler: Sampler,
        vocab_size: int,
        times: StepTimes,
        reading: StepTimes | None = None,
    ) -> None:
        self.name, self.engine, self._sampler = name, engine, sampler
        self._vocab_size, self._times, self._reading = vocab_size, times, reading or times
        self._held: dict[SamplerRow, Held] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the draft's next tokens of each sequence.

        They are empty if the window exceeds the draft's context length, or if the draft's KV cache has no free blocks.

        After an exception the draft's cache holds none of these sequences; the next call processes them again.
        """
        try:
            return self._propose(requests)
        except BaseException:
            for request in requests:
                self.forget(request.row)
            raise

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        fitting = [Draft(request, held=self._hold(request)) if self._fits(request) else None for request in requests]
        drafts = self._with_room(fitting)
        active = [d for d in drafts if d is not None]
        for some in _split(active):
            sample_next(some, self._extend(some), self._sampler)
        while active := [d for d in active if len(d.token_ids) < self._limit(d.request)]:
            for d in active:
                d.new = d.token_ids[-1:]
            sample_next(active, self._extend(active), self._sampler)
        return [d.finish() if d is not None else Proposal([]) for d in drafts]

    def _fits(self, request: DraftRequest) -> bool:
        return len(request.token_ids) - request.start <= self.engine.limits.block_size

    def _limit(self, request: DraftRequest) -> int:
        """Return how many tokens can be proposed. The last one is sampled but never enters the cache."""
        return min(request.num_tokens, self.engine.limits.block_size - (len(request.token_ids) - request.start) + 1)

    def _hold(self, request: DraftRequest) -> Held:
        if (held := self._held.get(request.row)) is None:
            held = self._held[request.row] = Held(self.engine.open())
        return held

    def _with_room(self, drafts: Sequence[Draft | None]) -> list[Draft | None]:
        """Truncate rejected proposals; replace the drafts for which the KV cache has no free blocks by None.

        The draft shares no blocks, so that its sequences may need more than the target's, which have the same tokens.
        """
        drafts = [d if d is not None and self._prepare(d) else None for d in drafts]
        free, kept = self.engine.num_free_blocks, list[Draft | None]()
        for d in drafts:
            if d is not None:
                count = len(d.new) + self._limit(d.request) - 1  # the last proposal is not cached
                needed = self.engine.blocks_needed(d.held.handle, count)
                d = d if needed <= free else None
                free -= needed if d is not None else 0
            kept.append(d)
        return kept

    def _prepare(self, draft: Draft) -> bool:
        """Truncate rejected proposals, and set the tokens to process. Return whether a proposal is possible."""
        held, request = draft.held, draft.request
        keep = common(held.token_ids, request.token_ids, request.start)
        self._cut(held, keep)
        draft.new = request.token_ids[request.start + keep :]
        return True

    def _cut(self, held: Held, keep: int) -> None:
        """Remove all but the first `keep` tokens from the cache."""
        if keep < self.engine.length(held.handle):
            self.engine.truncate(held.handle, keep)
        del held.token_ids[keep:]

    def _extend(self, drafts: Sequence[Draft]) -> Array:
        """Process the new tokens of each draft; return the logits after the last ones, (len(drafts), V)."""
        batch = StepBatch()
        for d in drafts:
            # A prompt may have ids outside the tokenizer. The draft's padded vocabulary can be smaller: replace them.
            batch.add(d.held.handle, [t if t < self._vocab_size else 0 for t in d.new])
        logits = self.engine.extend(batch)
        for d in drafts:
            d.held.token_ids += d.new
        rows: Array = logits[:, : self._vocab_size]
        return rows

    def num_behind(self, request: DraftRequest) -> int:
        """Return how many tokens of the window are not in the draft's cache."""
        held = self._held.get(request.row)
        window = len(request.token_ids) - request.start
        return window if held is None else max(1, window - common(held.token_ids, request.token_ids, request.start))

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the estimated seconds to process `num_behind` tokens and to run the steps after that."""
        reading = self._reading(max(num_behind, num_seqs)) - self._reading(num_seqs)
        return reading + num_tokens * self._times(num_seqs)

    def forget(self, row: SamplerRow) -> None:
        """Close a sequence."""
        if (held := self._held.pop(row, None)) is not None:
            self.engine.close(held.handle)

    def reset(self) -> None:
        """Close all sequences."""
        self._held.clear()
        self.engine.reset()


def common(held: list[int], token_ids: list[int], start: int) -> int:
    """Return how many cached tokens are a prefix of the window, at most its length - 1 (the newest is extended)."""
    limit = min(len(held), len(token_ids) - start - 1)
    if held[:limit] == token_ids[start : start + limit]:
        return limit
    return next(i for i in range(limit) if held[i] != token_ids[start + i])


def _split(drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
    """Split sequences into steps of at most MAX_NUM_BATCHED_TOKENS new tokens; no sequence is divided."""
    some: list[Draft] = []
    count = 0
    for d in drafts:
        new = len(d.new)
        if some and count + new > MAX_NUM_BATCHED_TOKENS:
            yield some
            some, count = [], 0
        some.append(d)
        count += new
    if some:
        yield some
