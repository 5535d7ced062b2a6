"""The reference sampler: the definition of which token is drawn.

    logits (B, V) -> penalties, bias, min_tokens -> greedy: the first largest
                                                 -> else: temperature, top-k, top-p, min-p
                                                          -> inverse transform of one uniform per row

The inverse transform: with weights w in vocabulary order, summed in float64, the token is the first whose
running sum exceeds u * sum(w). u comes from `rng.uniform`, a function of (seed, sample, position) alone.
So the same logits give the same token, whatever else is in the batch and whichever sampler computes it; the
sampler without a sort (native.py) replaces this one on CPUs because it takes the same tokens.

Cost: rows that need nothing but the largest logit share one pass over the logits; the others pay a sort
when top_p is on, and float64 arithmetic over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.errors import NanoinferError
from nanoinfer.sampling import filters
from nanoinfer.sampling.rng import uniform
from nanoinfer.sampling_params import SamplingParams


class SamplerRow(Protocol):
    """What the sampler needs to know of a sequence. Nothing of it is changed."""

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        ...

    @property
    def seed(self) -> int:
        """The request's seed, resolved."""
        ...

    @property
    def sample_index(self) -> int:
        """Which of the request's n texts this is."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens generated so far."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Their number: the position of the token that is drawn now."""
        ...

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Tokens that would end the text (end of text, stop tokens)."""
        ...


@dataclass(frozen=True)
class Sampled:
    """One drawn token."""

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None = None
    """Token id -> (log-probability under the raw logits, rank from 1, the same for equals): the drawn token
    first, then the most likely ones in order. None unless asked for."""


Sampler = Callable[[Tensor, Sequence[SamplerRow]], list[Sampled]]
"""Draws the next token of each row: see `sample`, the definition."""


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Draw the next token of each row.

    Args:
        logits: (B, V) float32, any device; not changed.
        rows: B rows.

    Raises:
        NanoinferError: a row's logits are not finite (the model overflowed).
    """
    if not rows:
        return []
    tokens = [-1] * len(rows)
    plain = [i for i, row in enumerate(rows) if is_plain(row)]
    other = [i for i, row in enumerate(rows) if not is_plain(row)]
    for some, choose in ((plain, _argmax), (other, _choose)):
        if some:
            part = logits if len(some) == len(rows) else logits[some]
            for i, token in zip(some, choose(part, [rows[i] for i in some]), strict=True):
                tokens[i] = token
    return [
        Sampled(token, find_logprobs(logits[i], token, row.params.logprobs))
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True))
    ]


def is_plain(row: SamplerRow) -> bool:
    """Return whether the row takes the largest raw logit: greedy, and nothing changes the logits."""
    return row.params.greedy and not _changes_logits(row)


def _changes_logits(row: SamplerRow) -> bool:
    p = row.params
    return bool(
        p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or excludes_end_tokens(row)
    )


def excludes_end_tokens(row: SamplerRow) -> bool:
    """Return whether min_tokens keeps the row from drawing its end tokens."""
    return bool(row.params.min_tokens > row.num_output_tokens and row.end_token_ids)


def _argmax(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """Return the first largest logit of each row."""
    largest, tokens = logits.max(-1)
    _require_finite(largest)
    return tokens.tolist()


def _require_finite(largest: Tensor) -> None:
    if not bool(largest.isfinite().all()):
        raise NanoinferError(not_finite(largest[~largest.isfinite()][0].item()))


def not_finite(value: object = "not finite") -> str:
    """Return the message of the error that a row's largest logit makes."""
    return (
        f"the model's largest logit is {value}: its arithmetic overflowed, or the parameters exclude every token; use"
        " dtype=float32, and check logit_bias and the weights"
    )


def _choose(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """Return the token of each row, by the inverse transform of its filtered distribution."""
    return draw_from(filtered_weights(logits, rows), rows)


def draw_from(weights: Tensor, rows: Sequence[SamplerRow], purpose: int = 0) -> list[int]:
    """Return the token that each row draws from its weights.

    Args:
        weights: (B, V) float64, from `filtered_weights`.
        rows: B rows; they say which uniforms decide.
        purpose: 0, or another random number of the same token (rng.py).
    """
    uniforms = [uniform(seed=r.seed, sample=r.sample_index + purpose, position=r.num_output_tokens) for r in rows]
    u = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)
    tokens: list[int] = inverse_transform(weights, u[:, None]).tolist()
    return tokens


def filtered_weights(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return what each row draws from: weights, (B, V) float64, proportional to the filtered probabilities.

    A greedy row has weight 1 at the largest logit (the first of equals) and 0 elsewhere.

    Args:
        logits: (B, V) float32, any device; not changed.
        rows: B rows.
    """
    logits = _scaled(logits, rows)
    V, params, device = logits.shape[-1], [row.params for row in rows], logits.device
    if any(p.top_k for p in params):
        logits = filters.top_k(logits, torch.tensor([min(p.top_k, V) for p in params], device=device))
    if any(p.top_p < 1 for p in params):
        logits = filters.top_p(logits, _column([p.top_p for p in params], device))
    if any(p.min_p for p in params):
        logits = filters.min_p(logits, _column([p.min_p for p in params], device))
    weights = logits.exp()
    for i, p in enumerate(params):
        if p.greedy:
            best = logits[i].argmax()
            weights[i] = 0.0
            weights[i, best] = 1.0
    return weights


def probabilities(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return each row's probabilities at its temperature, before top-k, top-p and min-p: (B, V) float64."""
    return _scaled(logits, rows).softmax(-1)


def _scaled(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return (B, V) float64: how far adjusted logits lie from the row's largest, in units of the temperature."""
    logits = _adjust(logits.double(), rows)
    largest = logits.amax(-1, keepdim=True)
    _require_finite(largest)
    # Subtracting the largest first keeps tiny temperatures finite.
    return (logits - largest) / _column([row.params.temperature or 1.0 for row in rows], logits.device)


def _column(values: list[float], device: torch.device) -> Tensor:
    """[0.5, 1.0] -> [[0.5], [1.0]] in float64: one setting per row."""
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def inverse_transform(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first index of each row, of those with a weight, whose running sum exceeds u times the row's sum.

    Args:
        weights: (B, V) float64, >= 0, not all 0.
        u: (B, 1) float64 in [0, 1).

    Returns:
        (B,) int64. An index of weight 0 is never returned, also where a device sums in parallel and its running
        sum wavers in the last bits.
    """
    running = weights.cumsum(-1)
    return ((running > u * running[:, -1:]) & (weights > 0)).byte().argmax(-1)


def _adjust(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return the logits after penalties, bias and min_tokens. The tensor given may be changed."""
    V, device = logits.shape[-1], logits.device
    params = [row.params for row in rows]
    if any(p.repetition_penalty != 1 for p in params):
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
        for i, row in enumerate(rows):
            if row.params.repetition_penalty != 1:
                seen[i, _ids({*row.prompt_token_ids, *row.output_token_ids}, V, device)] = True
        logits = filters.repetition_penalty(logits, seen, _column([p.repetition_penalty for p in params], device))
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        counts = torch.zeros_like(logits)
        for i, row in enumerate(rows):
            counts[i] = torch.bincount(_ids(row.output_token_ids, V, device), minlength=V)
        logits = filters.presence_frequency_penalty(
            logits,
            counts,
            _column([p.presence_penalty for p in params], device),
            _column([p.frequency_penalty for p in params], device),
        )
    for i, row in enumerate(rows):
        if bias := row.params.logit_bias:
            ids = torch.tensor(list(bias), device=device)
            logits[i, ids] += torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
        if excludes_end_tokens(row):
            logits[i, list(row.end_token_ids)] = filters.EXCLUDED
    return logits


def _ids(token_ids: Sequence[int] | set[int], V: int, device: torch.device) -> Tensor:
    """Return token ids as a tensor, less those past V: ids that can stand in a prompt but are never sampled."""
    return torch.tensor([t for t in token_ids if t < V], dtype=torch.int64, device=device)


def find_logprobs(logits: Tensor, token: int, count: int | None) -> dict[int, tuple[float, int]] | None:
    """Return log-probability and rank of the drawn token and the `count` most likely, from raw logits (V,)."""
    if count is None:
        return None
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    found = {token: (logprobs[token].item(), int((logprobs > logprobs[token]).sum()) + 1)}
    ranks: dict[float, int] = {}  # equals share the rank of the first
    for place, (i, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), start=1):
        found.setdefault(i, (value, ranks.setdefault(value, place)))
    return found
