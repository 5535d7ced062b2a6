"""The reference sampler, which defines the token that is sampled.

    logits (B, V) -> penalties, bias, min_tokens -> greedy: the first largest
                                                 -> else: temperature, top-k, top-p, min-p
                                                          -> inverse transform of one uniform per row

The inverse transform: weights w are summed in float64 in vocabulary order; the token is the first one whose running sum
exceeds u * sum(w). u comes from `rng.uniform`, a function of (seed, sample, position) alone. The same logits therefore
give the same token, independent of the other sequences in the batch and of the sampler: native.py and triton.py compute
the same tokens without a sort.

Cost: rows that need only the largest logit share one pass over the logits. The others need float64 arithmetic over the
vocabulary, and a sort if top_p is used.
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
    """The state of a sequence that the sampler reads. The sampler does not change it."""

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the request's random numbers."""
        ...

    @property
    def sample_index(self) -> int:
        """Index among the request's n samples."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Tokens of the prompt."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens generated so far."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far, which is the position of the token to sample."""
        ...

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Tokens that end the sequence: end-of-text and stop tokens."""
        ...


@dataclass(frozen=True)
class Sampled:
    """One sampled token."""

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None = None
    """Token id -> (log-probability under the raw logits, rank from 1, equal for equal values): the sampled token first,
    then the most likely ones in order. None if not requested."""


Sampler = Callable[[Tensor, Sequence[SamplerRow]], list[Sampled]]
"""Samples the next token of each row, as `sample` does."""


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Sample the next token of each row.

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
    """Return whether the row takes the largest raw logit: it is greedy, and no parameter changes the logits."""
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
    """Return whether min_tokens excludes the row's end tokens at this position."""
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
    """Return the error message for a row whose largest logit is not finite."""
    return (
        f"the model's largest logit is {value}: its arithmetic overflowed, or the parameters exclude every token: use"
        " dtype=float32, and check logit_bias and the weights"
    )


def _choose(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """Return one token of each row, sampled from its filtered distribution."""
    return draw_from(filtered_weights(logits, rows), rows)


def draw_from(weights: Tensor, rows: Sequence[SamplerRow], purpose: int = 0) -> list[int]:
    """Return one token of each row, sampled in proportion to its weights.

    Args:
        weights: (B, V) float64, from `filtered_weights`.
        rows: B rows, which determine the random numbers.
        purpose: 0, or an offset for another random number of the same token (rng.py).
    """
    uniforms = [uniform(seed=r.seed, sample=r.sample_index + purpose, position=r.num_output_tokens) for r in rows]
    u = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)
    tokens: list[int] = inverse_transform(weights, u[:, None]).tolist()
    return tokens


def filtered_weights(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return weights, (B, V) float64, that are proportional to each row's filtered probabilities.

    A greedy row has weight 1 at the first largest logit and 0 elsewhere.

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
    """Return (B, V) float64: adjusted logits minus the row's largest, divided by the temperature."""
    logits = _adjust(logits.double(), rows)
    largest = logits.amax(-1, keepdim=True)
    _require_finite(largest)
    # Subtract the largest first, so that tiny temperatures give finite values.
    return (logits - largest) / _column([row.params.temperature or 1.0 for row in rows], logits.device)


def _column(values: list[float], device: torch.device) -> Tensor:
    """Return one setting for each row as a float64 column: [0.5, 1.0] -> [[0.5], [1.0]]."""
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def inverse_transform(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first index of each row with a weight > 0 whose running sum exceeds u times the row's sum.

    Args:
        weights: (B, V) float64, >= 0, not all 0.
        u: (B, 1) float64 in [0, 1).

    Returns:
        (B,) int64. An index of weight 0 is never returned, even if a device sums in parallel and its running sum is
        not monotonic in the last bits.
    """
    running = weights.cumsum(-1)
    return ((running > u * running[:, -1:]) & (weights > 0)).byte().argmax(-1)


def _adjust(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return the logits after penalties, bias and min_tokens. The tensor may be changed in place."""
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
    """Return token ids below V as a tensor. A prompt may contain larger ids, which are never sampled."""
    return torch.tensor([t for t in token_ids if t < V], dtype=torch.int64, device=device)


def find_logprobs(logits: Tensor, token: int, count: int | None) -> dict[int, tuple[float, int]] | None:
    """Return log-probability and rank of the sampled token and the `count` most likely, from raw logits (V,)."""
    if count is None:
        return None
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    found = {token: (logprobs[token].item(), int((logprobs > logprobs[token]).sum()) + 1)}
    ranks: dict[float, int] = {}  # equal values share the rank of the first
    for place, (i, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), start=1):
        found.setdefault(i, (value, ranks.setdefault(value, place)))
    return found
