"""The reference sampler, which defines the token that is sampled (docs/sampling.md).

    logits (B, V) -> penalties, bias, exclusions -> greedy: the first largest
                                                 -> else: temperature, top-k, top-p, min-p
                                                          -> inverse transform of one uniform per row

The uniform is a function of (seed, sample, position) alone (rng.py), so the same logits give the same token with any
other sequences in the batch and with any sampler: native.py and triton.py compute the same tokens without a sort. Rows
that need only the largest logit share one pass over the logits. Arithmetic is NumPy's; logits on another device are
copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError, TokensExcluded
from nanoinfer.sampling import filters
from nanoinfer.sampling.filters import Floats
from nanoinfer.sampling.rng import uniform
from nanoinfer.sampling_params import WHOLE_VOCABULARY, BadWords, SamplingParams
from nanoinfer.utils.arrays import Array, to_numpy


class SamplerRow(Protocol):
    """The state of a sequence that the sampler reads. The sampler does not change it."""

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""

    @property
    def seed(self) -> int:
        """Seed of the request's random numbers."""

    @property
    def sample_index(self) -> int:
        """Index among the request's n samples."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Tokens of the prompt."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens generated so far."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far, which is the position of the token to sample."""

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Tokens that end the sequence: end-of-text and stop tokens."""

    @property
    def bad_words(self) -> BadWords | None:
        """The tokens of its parameters' bad_words; None: there are none."""


class Sampled(NamedTuple):
    """One sampled token."""

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None = None
    """Token id -> (log-probability under the raw logits, rank from 1, equal for equal values): the sampled token first,
    then the most likely ones in order. None if not requested."""


Sampler = Callable[[Array, Sequence[SamplerRow]], list[Sampled]]
"""Samples the next token of each row, as `sample` does."""


def sample(logits: Array, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Sample the next token of each row.

    Args:
        logits: (B, V) float32, on any device; not changed.
        rows: B rows.

    Raises:
        NanoinferError: a row's logits are not finite (the model overflowed).
    """
    if not rows:
        return []
    plain = [i for i, row in enumerate(rows) if is_plain(row)]
    other = [i for i, row in enumerate(rows) if not is_plain(row)]
    return sample_parts(to_numpy(logits), rows, ((plain, _argmax), (other, _choose)))


def sample_parts(
    logits: Array,
    rows: Sequence[SamplerRow],
    parts: Iterable[tuple[list[int], Callable[[Any, Sequence[SamplerRow]], list[int]]]],
) -> list[Sampled]:
    """Sample each part of the rows with a function of its own.

    Args:
        logits: (B, V).
        rows: B rows.
        parts: the indices of some rows, and the function that returns the tokens for their logits. Each row is in one
            part; a part may be empty.
    """
    tokens = [-1] * len(rows)
    for some, choose in parts:
        if some:
            part = logits if len(some) == len(rows) else logits[some]
            for i, token in zip(some, choose(part, [rows[i] for i in some]), strict=True):
                tokens[i] = token
    return add_logprobs(logits, tokens, rows)


def add_logprobs(logits: Array, tokens: Sequence[int], rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Return the token of each row with the log-probabilities that its parameters request; `logits` are (B, V)."""
    counts = [row.params.num_logprobs for row in rows]
    return [
        Sampled(token) if count is None else Sampled(token, find_logprobs(logits[i], token, count))
        for i, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]


def sample_tokens(logits: Array, rows: Sequence[SamplerRow]) -> list[int]:
    """Return the next token of each row, as `sample` does."""
    return [sampled.token_id for sampled in sample(logits, rows)]


def is_plain(row: SamplerRow) -> bool:
    """Return whether the row takes the largest raw logit: it is greedy, and no parameter changes the logits."""
    return row.params.greedy and not changes_logits(row)


def changes_logits(row: SamplerRow) -> bool:
    """Return whether penalties, bias or exclusions change the row's logits."""
    p = row.params
    return bool(
        p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or p.allowed_token_ids
        or p.bad_words
        or excludes_end_tokens(row)
    )


def excludes_end_tokens(row: SamplerRow) -> bool:
    """Return whether min_tokens excludes the row's end tokens at this position."""
    most = row.params.min_tokens
    return bool(most and most > row.num_output_tokens and row.end_token_ids)


def excluded_tokens(row: SamplerRow) -> list[int]:
    """Return the tokens that min_tokens and bad_words exclude at this position."""
    excluded = list(row.end_token_ids) if excludes_end_tokens(row) else []
    return excluded if row.bad_words is None else excluded + row.bad_words.excluded(row.output_token_ids)


def _argmax(logits: NDArray[Any], rows: Sequence[SamplerRow]) -> list[int]:
    """Return the first largest logit of each row."""
    best = logits.argmax(-1)  # the first NaN, if there is one
    _require_finite(np.take_along_axis(logits, best[:, None], -1))
    tokens: list[int] = best.tolist()
    return tokens


def _require_finite(largest: NDArray[Any]) -> None:
    finite = np.isfinite(largest)
    if not finite.all():
        value = largest[~finite][0]
        if value == -np.inf:  # arithmetic that overflows gives inf and nan
            raise TokensExcluded
        raise NanoinferError(not_finite(value))


def not_finite(value: object = "not finite") -> str:
    """Return the error message for a row whose largest logit is not finite."""
    return (
        f"the model's largest logit is {value}: its arithmetic overflowed, or the parameters exclude every token: use"
        " dtype=float32, and check logit_bias, bad_words, allowed_token_ids and the weights"
    )


def _choose(logits: NDArray[Any], rows: Sequence[SamplerRow]) -> list[int]:
    """Return one token of each row, sampled from its filtered distribution."""
    return sample_from(filtered_weights(logits, rows), rows)


def sample_from(weights: Floats, rows: Sequence[SamplerRow], purpose: int = 0) -> list[int]:
    """Return one token of each row, sampled in proportion to its weights.

    Args:
        weights: (B, V), from `filtered_weights`.
        rows: B rows, which determine the random numbers.
        purpose: 0, or an offset for another random number of the same token (rng.py).
    """
    u = [uniform(seed=r.seed, sample=r.sample_index + purpose, position=r.num_output_tokens) for r in rows]
    tokens: list[int] = inverse_transform(weights, _column(u)).tolist()
    return tokens


def filtered_weights(logits: Array, rows: Sequence[SamplerRow]) -> Floats:
    """Return weights, (B, V), that are proportional to each row's filtered probabilities.

    A greedy row has weight 1 at the first largest logit and 0 elsewhere.

    Args:
        logits: (B, V) float32, on any device; not changed.
        rows: B rows.
    """
    params = [row.params for row in rows]
    adjusted = adjust(logits, rows)
    V, largest = adjusted.shape[-1], adjusted.max(-1, keepdims=True)
    _require_finite(largest)
    with np.errstate(over="ignore"):  # to -inf, by a tiny temperature
        # Subtract the largest first, so that tiny temperatures give finite values.
        scaled = (adjusted - largest) / _column([p.temperature or 1.0 for p in params])
    if any(p.top_k for p in params):
        scaled = filters.top_k(scaled, np.array([min(p.top_k, V) for p in params]))
    if any(p.top_p < 1 for p in params):
        scaled = filters.top_p(scaled, _column([p.top_p for p in params]))
    if any(p.min_p for p in params):
        scaled = filters.min_p(scaled, _column([p.min_p for p in params]))
    weights: Floats = np.exp(scaled)
    for i, p in enumerate(params):
        if p.greedy:
            weights[i] = 0.0
            weights[i, scaled[i].argmax()] = 1.0
    return weights


def inverse_transform(weights: Floats, u: Floats) -> NDArray[np.int64]:
    """Return the first index of each row whose running sum of weights exceeds u times the row's sum.

    Args:
        weights: (B, V), >= 0, not all 0. An index of weight 0 is never returned: the running sum does not grow there.
        u: (B, 1) in [0, 1).

    Returns:
        (B,).
    """
    running = weights.cumsum(-1)  # in order, unlike `sum`
    first: NDArray[np.int64] = (running > u * running[:, -1:]).argmax(-1)
    return first


def adjust(logits: Array, rows: Sequence[SamplerRow]) -> Floats:
    """Return the logits, (B, V), after penalties, bias and exclusions, as new memory."""
    adjusted: Floats = to_numpy(logits).astype(np.float64)
    V, params = adjusted.shape[-1], [row.params for row in rows]
    if any(p.repetition_penalty != 1 for p in params):
        seen = np.zeros(adjusted.shape, np.bool_)
        for i, row in enumerate(rows):
            if row.params.repetition_penalty != 1:
                seen[i, _ids({*row.prompt_token_ids, *row.output_token_ids}, V)] = True
        adjusted = filters.repetition_penalty(adjusted, seen, _column([p.repetition_penalty for p in params]))
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        counts = np.zeros_like(adjusted)
        for i, row in enumerate(rows):
            counts[i] = np.bincount(_ids(row.output_token_ids, V), minlength=V)
        adjusted = filters.presence_frequency_penalty(
            adjusted,
            counts,
            _column([p.presence_penalty for p in params]),
            _column([p.frequency_penalty for p in params]),
        )
    for i, row in enumerate(rows):
        if bias := row.params.logit_bias:
            adjusted[i, list(bias)] += list(bias.values())
        if (allowed := row.params.allowed_token_ids) is not None:
            filters.only(adjusted[i], allowed)
        if excluded := excluded_tokens(row):
            adjusted[i, excluded] = filters.EXCLUDED
    return adjusted


def _column(values: list[float]) -> Floats:
    """Return one setting for each row as a column: [0.5, 1.0] -> [[0.5], [1.0]]."""
    return np.array(values, np.float64)[:, None]


def _ids(token_ids: Sequence[int] | set[int], V: int) -> NDArray[np.int64]:
    """Return token ids below V as an array. A prompt may contain larger ids, which are never sampled."""
    return np.array([t for t in token_ids if t < V], np.int64)


def find_logprobs(logits: Array, token: int, count: int | None) -> dict[int, tuple[float, int]] | None:
    """Return log-probability and rank of the sampled token and the `count` most likely, from raw logits (V,).

    A count of WHOLE_VOCABULARY is V.
    """
    if count is None:
        return None
    logprobs = to_numpy(logits).astype(np.float64)
    count = len(logprobs) if count == WHOLE_VOCABULARY else count
    with np.errstate(invalid="ignore"):  # an infinite logit gives NaN
        logprobs -= logprobs.max()
        logprobs -= np.log(np.exp(logprobs).sum())
    found = {token: (logprobs[token].item(), int((logprobs > logprobs[token]).sum()) + 1)}
    ranks: dict[float, int] = {}  # equal values share the rank of the first
    for place, i in enumerate(largest(logprobs, count), start=1):
        value = logprobs[i].item()
        found.setdefault(i, (value, ranks.setdefault(value, place)))
    return found


def largest(values: NDArray[Any], count: int) -> list[int]:
    """Return the indices of the `count` largest values, in descending order; of equal values, the first."""
    if count == 0:
        return []
    least = np.partition(values, -count)[-count] if count < len(values) else -np.inf
    (indices,) = np.nonzero(values >= least)
    order: list[int] = indices[np.argsort(-values[indices], kind="stable")][:count].tolist()
    return order
