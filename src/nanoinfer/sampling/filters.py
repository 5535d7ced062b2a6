"""Penalties and filters: functions of a batch of logits with one setting for each row.

Each follows its published definition and is tested against the processor of the transformers library on the same
logits. Rows do not depend on each other. A neutral setting (top_k 0, top_p 1, ...) leaves a row unchanged.

B rows, V tokens; logits are (B, V) float64, -inf for excluded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXCLUDED = float("-inf")
Floats = NDArray[np.float64]


def repetition_penalty(logits: Floats, seen: NDArray[np.bool_], penalty: Floats) -> Floats:
    """Make tokens of prompt and output less likely: divide a positive logit, multiply a negative one.

    Source: Keskar et al., "CTRL", 2019, section 4.1, in the form of the transformers library.

    Args:
        logits: (B, V).
        seen: (B, V) bool, whether the token is in the row's prompt or output.
        penalty: (B, 1); 1 is neutral.
    """
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_frequency_penalty(logits: Floats, counts: Floats, presence: Floats, frequency: Floats) -> Floats:
    """Subtract `presence` once from the logit of each generated token, and `frequency` once for each occurrence.

    Source: the formula in OpenAI's API reference.

    Args:
        logits: (B, V).
        counts: (B, V), number of occurrences of each token in the row's output, without the prompt.
        presence: (B, 1); 0 is neutral.
        frequency: (B, 1); 0 is neutral.
    """
    return logits - presence * (counts > 0) - frequency * counts


def only(logits: Floats, token_ids: Sequence[int]) -> None:
    """Exclude all other tokens of one row, in place: logits (V,), of any type of floats."""
    ids = list(token_ids)
    kept = logits[ids]
    logits[:] = EXCLUDED
    logits[ids] = kept


def top_k(logits: Floats, k: NDArray[np.int64]) -> Floats:
    """Keep the k largest logits of each row, and all that are equal to the k-th.

    Args:
        logits: (B, V).
        k: (B,) int64; 0 is neutral.
    """
    V = logits.shape[-1]
    neutral = (k <= 0) | (k >= V)
    most = int(np.where(neutral, 1, k).max())
    largest = np.sort(np.partition(logits, V - most, -1)[:, V - most :], -1)  # ascending
    threshold = _at(largest, np.where(neutral, 0, most - k))
    return np.where((logits < threshold) & ~neutral[:, None], EXCLUDED, logits)


def top_p(logits: Floats, p: Floats) -> Floats:
    """Keep the smallest set of most likely tokens whose probabilities add up to p or more (the nucleus).

    A token is kept if the probabilities of all more likely tokens add up to less than p. Equally likely tokens are kept
    together, so the result does not depend on the order of a sort. The most likely token is always kept.
    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.

    Args:
        logits: (B, V); excluded tokens have probability 0.
        p: (B, 1); 1 is neutral.
    """
    descending = np.sort(logits, -1)[:, ::-1]
    probs = np.exp(descending - descending[:, :1])
    probs /= probs.sum(-1, keepdims=True)
    before = probs.cumsum(-1) - probs  # sum of the more likely tokens
    num_kept = np.maximum((before < p).sum(-1), 1)
    return np.where((logits < _at(descending, num_kept - 1)) & (p < 1), EXCLUDED, logits)


def min_p(logits: Floats, p: Floats) -> Floats:
    """Keep tokens that are at least p times as likely as the most likely one.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.

    Args:
        logits: (B, V).
        p: (B, 1); 0 is neutral.
    """
    with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf
        return np.where(logits < logits.max(-1, keepdims=True) + np.log(p), EXCLUDED, logits)


def _at(values: Floats, columns: NDArray[Any]) -> Floats:
    """Return one value of each row as a column."""
    return np.take_along_axis(values, columns[:, None], -1)
