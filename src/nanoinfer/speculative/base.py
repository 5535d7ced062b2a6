"""The interface of drafters: requests, proposals, and their class; sampling of proposals from logits.

verify.py guarantees the output whatever a drafter proposes. A poor drafter affects speed only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engines.base import Handle
from nanoinfer.sampling.sampler import Sampler, SamplerRow, filtered_weights, sample_from
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.arrays import Array


@dataclass(frozen=True)
class DraftRequest:
    """A sequence to propose tokens for."""

    row: SamplerRow
    """The sequence: its sampling state, and the key of the state that a drafter keeps for it."""
    token_ids: list[int]
    """Prompt and output tokens. Do not modify."""
    start: int
    """First token of the target's window."""
    num_tokens: int
    """Maximum number of tokens to propose, >= 1."""
    salt: str | None = None
    """Proposals come from requests of the same salt only."""
    handle: Handle | None = None
    """The sequence of the target's engine."""
    with_weights: bool = False
    """Whether to return the distributions of the proposed tokens (rule reject). Equal for all requests of a call."""


@dataclass(frozen=True)
class Proposal:
    """Proposed next tokens of one sequence."""

    token_ids: list[int]
    """At most `num_tokens` tokens; empty if the drafter has no proposal."""
    weights: NDArray[np.float64] | None = None
    """(len(token_ids), V): unnormalized distribution that each token was sampled from. None: the tokens were
    not sampled, or the distributions were not requested."""


class Drafter(ABC):
    """Proposes tokens. Not thread-safe. What is here is of a drafter without a state of its own."""

    name: str

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return a proposal for each request, in order."""

    def num_behind(self, request: DraftRequest) -> int | None:
        """Return the number of tokens that the drafter must process before it can propose; None: it has no proposal."""
        return 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the estimated duration of `propose`: a few microseconds.

        Args:
            num_seqs: number of requests.
            num_tokens: proposed tokens per request.
            num_behind: tokens to process first, summed over the requests (see the method `num_behind`).
        """
        return 5e-6 * num_seqs

    def forget(self, row: SamplerRow) -> None:  # noqa: B027
        """Free the state of a sequence, if there is any."""

    def reset(self) -> None:  # noqa: B027
        """Free the state of all sequences. Works after an exception interrupted any other method."""

    def observe(self, sequences: Sequence[SamplerRow], first: int, rows: NDArray[np.float32]) -> None:  # noqa: B027
        """Read the target's final hidden states after new tokens, from index `first` on, of sequences that have them.

        They are computed for a drafter that has this method of its own.

        Args:
            sequences: one, and its forks.
            first: index of the first of the tokens; what was read from there on does not hold any more.
            rows: (n, n_embd). They are valid during the call.
        """


class LookaheadRow:
    """A sequence's sampling state after `tokens` have been appended.

    Penalties, bad_words and min_tokens read the tokens, and the uniform is the one of the later position. The sampler
    therefore samples the token of plain decoding, provided that `tokens` are the tokens of plain decoding.
    """

    __slots__ = ("_row", "_tokens", "bad_words", "end_token_ids", "params", "prompt_token_ids", "sample_index", "seed")

    def __init__(self, row: SamplerRow, tokens: Sequence[int]) -> None:
        self._row, self._tokens = row, tokens
        self.params: SamplingParams = row.params
        self.seed, self.sample_index = row.seed, row.sample_index
        self.prompt_token_ids, self.end_token_ids = row.prompt_token_ids, row.end_token_ids
        self.bad_words = row.bad_words

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the token to sample, which is its position in the output."""
        return self._row.num_output_tokens + len(self._tokens)

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The output tokens so far, followed by `tokens`."""
        return [*self._row.output_token_ids, *self._tokens]


@dataclass
class ProposalBuilder:
    """A proposal under construction."""

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    weights: list[NDArray[np.float64]] = field(default_factory=list)

    def finish(self) -> Proposal:
        """Return the proposal with the tokens sampled so far."""
        return Proposal(self.token_ids, np.stack(self.weights) if self.weights else None)


def sample_next(builders: Sequence[ProposalBuilder], logits: Array, sampler: Sampler) -> None:
    """Sample one more token for each proposal, with the target's parameters and uniforms (verify.py).

    Args:
        builders: B proposals; a token is appended to each.
        logits: (B, V) float32.
        sampler: the sampler of plain decoding.

    Raises:
        NanoinferError: a row's logits are not finite.
    """
    rows = [LookaheadRow(s.request.row, list(s.token_ids)) for s in builders]
    if not builders[0].request.with_weights:
        for s, sampled in zip(builders, sampler(logits, rows), strict=True):
            s.token_ids.append(sampled.token_id)
        return
    weights = filtered_weights(logits, rows)
    for s, w, token in zip(builders, weights, sample_from(weights, rows), strict=True):
        s.token_ids.append(token)
        s.weights.append(w)
