"""Which proposals are kept. Two rules; both leave the words to the target.

The target extends a sequence by its newest token and k proposals x_1 .. x_k, and returns k + 1 rows of logits: row i
is what plain decoding would see after x_1 .. x_i. Rows past the first wrong proposal mean nothing and are dropped.

reproduce (the default)
    Draw from row 0, from row 1, ... with the sampler of plain decoding, each with the uniform of its own position,
    for as long as what is drawn equals the proposal; keep what was drawn.
    Proof: the token at a position is a function of the logits there and of one uniform, which is keyed by
    (seed, sample, position). Row i has the logits of plain decoding if x_1 .. x_i are the tokens of plain
    decoding. Row 0 always has; and when the draw from row i equals x_{i+1}, then x_{i+1} is that token, so row
    i + 1 has too. Hence every kept token is plain decoding's, greedy or sampled, and the seed means the same with
    speculation on or off. A proposal is accepted when target and drafter choose the same token; a drafter that
    draws with the same uniform does so often.

reject (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, arXiv 2302.01318, algorithm 2)
    Proposal x was drawn from q, the target's distribution is p, both after all filters. Accept x with probability
    min(1, p(x) / q(x)); on rejection draw from max(p - q, 0), normalised, and drop the rest; if all are accepted draw
    one more from the last row.
    Proof, for one position: x is kept with probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)). Something is
    rejected with probability 1 - sum min(p, q) = sum max(p - q, 0), and is then replaced by y with probability
    max(p(y) - q(y), 0) / sum max(p - q, 0). So y comes out with min(p(y), q(y)) + max(p(y) - q(y), 0) = p(y).
    For several positions: whether position t is looked at, and with which q, is decided by the kept tokens before
    it and by random numbers of earlier positions alone; its own three (drawing the proposal, accepting, replacing)
    are used by no other kept token. So given the kept tokens before it, each is distributed as p.
    A tie is broken towards keeping: a q that is not random (prompt lookup) has q(x) = 1.
    It accepts sum min(p, q) of the proposals, the most that any rule can; the text is another one than without
    speculation, of the same distribution.

At temperature 0 the two are one: p and q are single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoinfer.sampling.rng import ACCEPT, REPLACE, uniform
from nanoinfer.sampling.sampler import Sampled, Sampler, SamplerRow, draw_from, filtered_weights, find_logprobs
from nanoinfer.speculative.base import LookaheadRow, Proposal

if TYPE_CHECKING:
    from torch import Tensor

Group = tuple[SamplerRow, Proposal | None]
"""A sequence that draws, and what was proposed for it: it has 1 + len(proposal) rows of logits."""


def draw(sampler: Sampler, logits: Tensor, groups: Sequence[Group], *, rule: str = "reproduce") -> list[list[Sampled]]:
    """Draw the next tokens of each sequence: one, or as many as its proposal has right and one more.

    Args:
        sampler: of plain decoding.
        logits: (sum over groups of 1 + number of proposals, V) float32, each group's rows one after the other.
        groups: the sequences.
        rule: reproduce or reject.

    Raises:
        NanoinferError: a row's logits are not finite (the model overflowed).
    """
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
    """Return the draws up to and with the first that differs from its proposal."""
    for i, token in enumerate(drafts):
        if sampled[i].token_id != token:
            return sampled[: i + 1]
    return sampled


def _by_rejection(logits: Tensor, rows: Sequence[SamplerRow], proposal: Proposal) -> list[Sampled]:
    """Return one sequence's tokens by the rejection rule: see the proof above.

    Args:
        logits: (k + 1, V).
        rows: the sequence at each of the k + 1 positions.
        proposal: of k tokens.
    """
    import torch

    p = _normalised(filtered_weights(logits, rows))  # (k + 1, V)
    drafts = torch.tensor(proposal.token_ids, device=p.device)
    q = torch.nn.functional.one_hot(drafts, p.shape[-1]).double() if proposal.weights is None else proposal.weights
    q = _normalised(q)  # (k, V)
    kept: list[Sampled] = []
    for i, token in enumerate(proposal.token_ids):
        row = rows[i]
        u: float = uniform(seed=row.seed, sample=row.sample_index + ACCEPT, position=row.num_output_tokens)
        if u * float(q[i, token]) >= float(p[i, token]):
            rest = (p[i] - q[i]).clamp(min=0.0)
            if float(rest.sum()) <= 0.0:  # p and q are equal but for rounding: p is what is wanted
                rest = p[i]
            (token,) = draw_from(rest[None], rows[i : i + 1], REPLACE)
        kept.append(_sampled(token, logits[i], rows[i]))
        if token != proposal.token_ids[i]:
            return kept
    (token,) = draw_from(p[-1:], rows[-1:])
    kept.append(_sampled(token, logits[-1], rows[-1]))
    return kept


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _sampled(token: int, logits: Tensor, row: SamplerRow) -> Sampled:
    return Sampled(token, find_logprobs(logits, token, row.params.logprobs))
