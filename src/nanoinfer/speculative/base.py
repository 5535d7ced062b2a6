"""What a drafter is asked and what it answers; one drafter a file.

A drafter only predicts. Whatever it proposes, verify.py keeps the text what it would have been, so a bad drafter
costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that wants proposals."""

    row: SamplerRow
    """The sequence: how its next token is drawn, and the key of what a drafter keeps for it."""
    token_ids: list[int]
    """Prompt and output. Not to be changed."""
    start: int
    """First token of the window that the target sees."""
    num_tokens: int
    """Most tokens to propose, >= 1."""
    with_weights: bool = False
    """Whether to return the distributions that the tokens were drawn from (rule reject); the same in one call."""


@dataclass(frozen=True)
class Proposal:
    """What may come next in one sequence."""

    token_ids: list[int]
    """At most as many as asked for; none where the drafter has no idea."""
    weights: Tensor | None = None
    """(len(token_ids), V) float64: the distribution that each token was drawn from, up to a factor. None: the
    tokens were not drawn at random, or nobody needs to know."""


class Drafter(Protocol):
    """Proposes tokens. Not thread-safe."""

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return a proposal for each request, in order."""
        ...

    def num_behind(self, request: DraftRequest) -> int:
        """Return how many tokens it must read before it can propose for a sequence: a prompt that it has not seen."""
        ...

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return about how long `propose` takes.

        Args:
            num_seqs: sequences asked for.
            num_tokens: proposals for each.
            num_behind: tokens to read first, in all of them together.
        """
        ...

    def forget(self, row: SamplerRow) -> None:
        """Free what is kept for a sequence, if anything."""
        ...

    def reset(self) -> None:
        """Free what is kept for all sequences, also where an exception came in the middle of a call."""
        ...


@runtime_checkable
class UsesHidden(Protocol):
    """What a drafter has besides, if it wants the target's hidden states."""

    def update_hidden(self, rows: Sequence[SamplerRow], hidden: Tensor) -> None:
        """Take note of a step of the target, plain or verifying; also of those that are not asked for.

        Args:
            rows: the sequences that drew.
            hidden: (len(rows), n_embd) float32: of each, the final hidden state that its newest token was drawn from.
                The drafter's to keep.
        """
        ...


class LookaheadRow:
    """A sequence as it will be once `tokens` have been drawn: what the sampler sees at a later position.

    Penalties count those tokens, min_tokens does, and the uniform is that of the later position: so the sampler
    draws there what it would draw in plain decoding, given that the tokens turn out to be right.
    """

    __slots__ = ("_row", "_tokens", "end_token_ids", "params", "prompt_token_ids", "sample_index", "seed")

    def __init__(self, row: SamplerRow, tokens: Sequence[int]) -> None:
        self._row, self._tokens = row, tokens
        self.params: SamplingParams = row.params
        self.seed, self.sample_index = row.seed, row.sample_index
        self.prompt_token_ids, self.end_token_ids = row.prompt_token_ids, row.end_token_ids

    @property
    def num_output_tokens(self) -> int:
        """The position of the token that is drawn."""
        return self._row.num_output_tokens + len(self._tokens)

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens generated so far, those ahead included."""
        return [*self._row.output_token_ids, *self._tokens]
