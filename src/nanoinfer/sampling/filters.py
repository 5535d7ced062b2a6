"""Penalties and filters: functions of a batch of logits with one setting for each row.

Each follows its published definition and is tested against the processor of the transformers library on the same
logits. Rows do not depend on each other. A neutral setting (top_k 0, top_p 1, ...) leaves a row unchanged.

B rows, V tokens; logits are (B, V) float64, -inf for excluded tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXCLUDED = float("-inf")


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens of prompt and output less likely: divide a positive logit, multiply a negative one.

    Source: Keskar et al., "CTRL", 2019, section 4.1, in the form of the transformers library.

    Args:
        logits: (B, V).
        seen: (B, V) bool, whether the token is in the row's prompt or output.
        penalty: (B, 1); 1 is neutral.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_frequency_penalty(logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Subtract `presence` once from the logit of each generated token, and `frequency` once for each occurrence.

    Source: the formula in OpenAI's API reference.

    Args:
        logits: (B, V).
        counts: (B, V), number of occurrences of each token in the row's output, without the prompt.
        presence: (B, 1); 0 is neutral.
        frequency: (B, 1); 0 is neutral.
    """
    return logits - presence * (counts > 0) - frequency * counts


def top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep the k largest logits of each row, and all that are equal to the k-th.

    Args:
        logits: (B, V).
        k: (B,) int64; 0 is neutral.
    """
    V = logits.shape[-1]
    k = torch.where(k <= 0, V, k.clamp(max=V))
    largest = logits.topk(int(k.max()), dim=-1).values if int(k.max()) < V else logits.sort(-1, descending=True).values
    threshold = largest.gather(-1, (k - 1)[:, None])
    return logits.masked_fill(logits < threshold, EXCLUDED)


def top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities add up to p or more (the nucleus).

    A token is kept if the probabilities of all more likely tokens add up to less than p. Equally likely tokens are kept
    together, so the result does not depend on the order of a sort. The most likely token is always kept.
    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.

    Args:
        logits: (B, V); excluded tokens have probability 0.
        p: (B, 1); 1 is neutral.
    """
    descending = logits.sort(-1, descending=True).values
    probs = descending.softmax(-1)
    before = probs.cumsum(-1) - probs  # sum of the more likely tokens
    num_kept = (before < p).sum(-1, keepdim=True).clamp(min=1)
    threshold = descending.gather(-1, num_kept - 1)
    return logits.masked_fill((logits < threshold) & (p < 1), EXCLUDED)


def min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep tokens that are at least p times as likely as the most likely one.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.

    Args:
        logits: (B, V).
        p: (B, 1); 0 is neutral.
    """
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + p.log(), EXCLUDED)
