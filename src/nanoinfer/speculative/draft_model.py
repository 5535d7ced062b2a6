"""A draft model: a smaller model with the same tokenizer, on an engine and a cache of its own.

Also a copy of the target in fewer bits or with fewer layers (build.py makes those). Source of the idea: Leviathan et
al. 2023; Chen et al. 2023 (arXiv 2302.01318).

The draft keeps what it has read of each sequence. Before it proposes it forgets what was rejected (truncate to the
common beginning), reads what it has not seen, and then runs k - 1 steps more, all sequences together:

    its tokens   [a b c | x y]      x, y: its own proposals of the last round; the target kept x and said z
    the text     [a b c   x z]      ->  truncate to 4, extend by z, draw; extend by that, draw; ...

It draws as the target does, with the same parameters and the same uniform of each position (verify.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.sampling.sampler import Sampler, SamplerRow
from nanoinfer.speculative.base import DraftRequest, Proposal
from nanoinfer.speculative.proposal_builder import ProposalBuilder, draw_next
from nanoinfer.speculative.step_costs import StepTimes

if TYPE_CHECKING:
    from torch import Tensor

MAX_NUM_BATCHED_TOKENS = 2048  # in one step of the draft


@dataclass
class _Held:
    """What the draft's engine holds of one sequence."""

    handle: Handle
    token_ids: list[int] = field(default_factory=list)


@dataclass
class _Draft(ProposalBuilder):
    held: _Held = field(kw_only=True)


class DraftModel:
    """Proposes what a smaller model would say.

    Args:
        name: of the model, for people.
        engine: the draft's own; it must hold as many sequences as the target's.
        sampler: draws its tokens.
        vocab_size: tokens that may be drawn; the target's.
        times: seconds of its steps.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        sampler: Sampler,
        vocab_size: int,
        times: StepTimes,
    ) -> None:
        self.name = name
        self.engine = engine
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._times = times
        self._held: dict[SamplerRow, _Held] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the draft's next tokens of each sequence; none where its context is too short for the window.

        After an exception the draft holds nothing of these sequences, and reads them again when it is asked again.
        """
        try:
            return self._propose(requests)
        except BaseException:
            for request in requests:
                self.forget(request.row)
            raise

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [_Draft(request, held=self._hold(request)) if self._fits(request) else None for request in requests]
        active = [d for d in drafts if d is not None]
        for some in _split(active):
            self._draw(some, self._extend([(d.held, self._catch_up(d)) for d in some]))
        while active := [d for d in active if len(d.token_ids) < self._limit(d.request)]:
            self._draw(active, self._extend([(d.held, d.token_ids[-1:]) for d in active]))
        return [d.finish() if d is not None else Proposal([]) for d in drafts]

    def _draw(self, drafts: Sequence[_Draft], logits: Tensor) -> None:
        draw_next(drafts, logits, self._sampler)

    def _fits(self, request: DraftRequest) -> bool:
        return len(request.token_ids) - request.start <= self.engine.limits.block_size

    def _limit(self, request: DraftRequest) -> int:
        """Return how many tokens can be proposed: the last one is drawn and not fed."""
        return min(request.num_tokens, self.engine.limits.block_size - (len(request.token_ids) - request.start) + 1)

    def _hold(self, request: DraftRequest) -> _Held:
        if (held := self._held.get(request.row)) is None:
            held = self._held[request.row] = _Held(self.engine.open())
        return held

    def _catch_up(self, draft: _Draft) -> list[int]:
        """Forget what the text did not become, and return what has not been read: the newest token at least."""
        held, request = draft.held, draft.request
        keep = _common(held.token_ids, request.token_ids, request.start)
        if keep < len(held.token_ids):
            self.engine.truncate(held.handle, keep)
            del held.token_ids[keep:]
        return request.token_ids[request.start + keep :]

    def _extend(self, new: Sequence[tuple[_Held, list[int]]]) -> Tensor:
        batch = StepBatch()
        for held, token_ids in new:
            # Ids without text can stand in a prompt, and the draft's vocabulary may have fewer of them: any other does.
            batch.add(held.handle, [t if t < self._vocab_size else 0 for t in token_ids])
        logits = self.engine.extend(batch)
        for held, token_ids in new:
            held.token_ids += token_ids
        return logits[:, : self._vocab_size]

    def num_behind(self, request: DraftRequest) -> int:
        """Return how many tokens of the window it has not read."""
        held = self._held.get(request.row)
        window = len(request.token_ids) - request.start
        return window if held is None else max(1, window - _common(held.token_ids, request.token_ids, request.start))

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the time of reading `num_behind` tokens and of the steps after that."""
        return self._times(max(num_behind, num_seqs)) + (num_tokens - 1) * self._times(num_seqs)

    def forget(self, row: SamplerRow) -> None:
        """Close a sequence."""
        if (held := self._held.pop(row, None)) is not None:
            self.engine.close(held.handle)

    def reset(self) -> None:
        """Close all sequences."""
        self._held.clear()
        self.engine.reset()


def _common(held: list[int], token_ids: list[int], start: int) -> int:
    """Return how many held tokens begin the window, one less than the window at most: the newest is fed again."""
    most = min(len(held), len(token_ids) - start - 1)
    if held[:most] == token_ids[start : start + most]:
        return most
    return next(i for i in range(most) if held[i] != token_ids[start + i])


def _split(drafts: Sequence[_Draft]) -> Iterator[list[_Draft]]:
    """Split what is read into steps of a bounded number of tokens; one sequence is never split."""
    some: list[_Draft] = []
    count = 0
    for d in drafts:
        new = max(1, len(d.request.token_ids) - d.request.start - len(d.held.token_ids))
        if some and count + new > MAX_NUM_BATCHED_TOKENS:
            yield some
            some, count = [], 0
        some.append(d)
        count += new
    if some:
        yield some
