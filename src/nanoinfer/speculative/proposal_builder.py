"""Sampling of proposals from logits, shared by the drafters that compute logits.

Drafters sample with the target's parameters and with the same uniform for each position (verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nanoinfer.sampling.sampler import Sampler, filtered_weights, sample_from
from nanoinfer.speculative.base import DraftRequest, LookaheadRow, Proposal
from nanoinfer.utils.arrays import Array


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
    """Sample one more token for each proposal.

    Args:
        builders: B proposals; a token is appended to each.
        logits: (B, V) float32.
        sampler: the sampler of plain decoding.

    Raises:
        NanoinferError: a row's logits are not finite.
    """
    rows = [LookaheadRow(s.request.row, list(s.token_ids)) for s in builders]
    if not builders[0].request.with_weights:
        for s, found in zip(builders, sampler(logits, rows), strict=True):
            s.token_ids.append(found.token_id)
        return
    weights = filtered_weights(logits, rows)
    for s, w, token in zip(builders, weights, sample_from(weights, rows), strict=True):
        s.token_ids.append(token)
        s.weights.append(w)
