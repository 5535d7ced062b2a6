"""Verification: decide which proposals are accepted. Both rules preserve the target's output distribution.

The target extends a sequence by its newest token and k proposals x_1 .. x_k, and returns k + 1 rows of logits. Row i
contains the logits after x_1 .. x_i. Rows after the first rejected proposal are discarded.

reproduce (the default)
    Sample from row 0, row 1, ... with the sampler of plain decoding and the uniform of each position. Stop after the
    first token that differs from its proposal; keep all sampled tokens.
    Proof: the token at a position is a function of the logits there and of one uniform, which is a function of
    (seed, sample, position). Row i equals the logits of plain decoding if x_1 .. x_i are the tokens of plain decoding.
    This holds for row 0; and if the token sampled from row i equals x_{i+1}, then x_{i+1} is the token of plain
    decoding, so it holds for row i + 1. Hence every kept token is the token of plain decoding, greedy or sampled, and a
    seed gives the same output with and without speculation. A proposal is accepted if target and drafter choose the
    same token; this is frequent for a drafter that samples with the same uniform.

reject (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, arXiv 2302.01318, algorithm 2)
    Proposal x was sampled from q; the target's distribution is p; both after all filters. Accept x with probability
    min(1, p(x) / q(x)). On rejection, sample from max(p - q, 0), normalized, and drop the remaining proposals. If all
    are accepted, sample one more token from the last row.
    Proof, for one position: x is accepted with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)). A rejection has
    probability 1 - sum min(p, q) = sum max(p - q, 0), and the replacement is y with probability
    max(p(y) - q(y), 0) / sum max(p - q, 0). So the result is y with min(p(y), q(y)) + max(p(y) - q(y), 0) = p(y).
    For several positions: whether position t is verified, and with which q, depends only on the kept tokens before it
    and on random numbers of earlier positions. The three random numbers of position t (sampling the proposal,
    accepting, replacing) affect no other kept token. So each kept token has distribution p, given the tokens before it.
    A deterministic drafter (prompt lookup) has q(x) = 1.
    The acceptance rate is sum min(p, q), the maximum for any rule. The output differs from the output without
    speculation, but has the same distribution.

At temperature 0 both rules are the same, because p and q have a single token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanoinfer.sampling.rng import ACCEPT, REPLACE, uniform
from nanoinfer.sampling.sampler import Sampled, Sampler, SamplerRow, add_logprobs, filtered_weights, sample_from
from nanoinfer.speculative.base import LookaheadRow, Proposal
from nanoinfer.utils.arrays import Array

Group = tuple[SamplerRow, Proposal | None]
"""A sequence to sample and its proposal, if any. It has 1 + len(proposal) rows of logits."""


def sample_and_verify(
    sampler: Sampler, logits: Array, groups: Sequence[Group], *, rule: str = "reproduce"
) -> list[list[Sampled]]:
    """Return the next tokens of each sequence: the accepted proposals and one more token.

    Args:
        sampler: the sampler of plain decoding.
        logits: (sum over groups of 1 + number of proposals, V) float32, the rows of each group consecutive.

    Raises:
        NanoinferError: a row's logits are not finite (the model overflowed).
    """
    if all(proposal is None for _, proposal in groups):
        return [[token] for token in sampler(logits, [row for row, _ in groups])]
    rows: list[SamplerRow] = []
    for row, proposal in groups:
        drafts = proposal.token_ids if proposal is not None else []
        rows.append(row)
        rows += [LookaheadRow(row, drafts[: i + 1]) for i in range(len(drafts))]
    sampled = sampler(logits, rows)
    kept, at = [], 0
    for row, proposal in groups:
        drafts = proposal.token_ids if proposal is not None else []
        end = at + 1 + len(drafts)
        if proposal is not None and drafts and rule == "reject" and not row.params.greedy:
            kept.append(_by_rejection(logits[at:end], rows[at:end], proposal))
        else:
            kept.append(_reproduced(sampled[at:end], drafts))
        at = end
    return kept


def _reproduced(sampled: list[Sampled], drafts: list[int]) -> list[Sampled]:
    """Return the sampled tokens up to and including the first that differs from its proposal."""
    for i, token in enumerate(drafts):
        if sampled[i].token_id != token:
            return sampled[: i + 1]
    return sampled


def _by_rejection(logits: Array, rows: Sequence[SamplerRow], proposal: Proposal) -> list[Sampled]:
    """Return one sequence's tokens by the rule `reject` (see the module's docstring).

    Args:
        logits: (k + 1, V).
        rows: the sequence at each of the k + 1 positions.
        proposal: of k tokens.
    """
    p = _normalised(filtered_weights(logits, rows))  # (k + 1, V)
    if proposal.weights is None:
        q = np.zeros((len(proposal.token_ids), p.shape[-1]))  # (k, V)
        q[np.arange(len(q)), proposal.token_ids] = 1.0
    else:
        q = _normalised(proposal.weights)
    kept: list[int] = []
    for i, token in enumerate(proposal.token_ids):
        row = rows[i]
        u: float = uniform(seed=row.seed, sample=row.sample_index + ACCEPT, position=row.num_output_tokens)
        if u * q[i, token] >= p[i, token]:
            rest = np.maximum(p[i] - q[i], 0.0)
            if rest.sum() <= 0.0:  # p and q differ only by rounding: sample from p
                rest = p[i]
            (token,) = sample_from(rest[None], rows[i : i + 1], REPLACE)
        kept.append(token)
        if token != proposal.token_ids[i]:
            break
    else:
        kept += sample_from(p[-1:], rows[-1:])
    return add_logprobs(logits, kept, rows[: len(kept)])


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return weights / weights.sum(-1, keepdims=True)  # type: ignore[no-any-return]
