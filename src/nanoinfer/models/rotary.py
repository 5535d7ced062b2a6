"""Frequencies of rotary position embeddings. This module does not import PyTorch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import Rotary


def frequencies(rotary: Rotary, context: int = 1) -> NDArray[np.float32]:
    """Return the angle in radians by which each pair of dimensions turns at each position, (dim / 2,).

    The scalings are those of transformers, modeling_rope_utils.py:

    - llama3 (Meta 2024): with t turns in the original context, a frequency is divided by `factor` if
      t < low_freq_factor, kept if t > high_freq_factor, and blended linearly in t between them.
    - yarn (Peng et al. 2023): the same, blended linearly in the index of the pair.
    - proportional (Gemma 4): pairs after the first `num_turning` do not turn.
    - dynamic: those of texts up to the context length in the config, which no text here exceeds, are not scaled.
    - longrope (Ding et al. 2024): each frequency has its own divisor, one for short contexts and one for long ones.

    Args:
        rotary: the rotary embedding.
        context: the context length in tokens. All positions of a model take the same divisors of longrope, because
            cached keys are not rotated again when a text becomes long.
    """
    exponents = np.arange(0, rotary.dim, 2, dtype=np.float32) / np.float32(rotary.dim)
    plain: NDArray[np.float32] = np.float32(1.0) / np.float32(rotary.base) ** exponents
    if rotary.scaling in ("none", "dynamic"):
        return plain
    if rotary.scaling == "longrope":
        factors = rotary.long_factors if context > rotary.original_context else rotary.short_factors
        divisors: NDArray[np.float32] = np.array(factors, np.float32)
        return plain / divisors
    divided: NDArray[np.float32] = plain / np.float32(rotary.factor)
    if rotary.scaling == "proportional":
        divided[rotary.num_turning :] = 0.0
    if rotary.scaling in ("linear", "proportional"):
        return divided
    kept = _kept_by_yarn(rotary) if rotary.scaling == "yarn" else _kept_by_llama3(rotary, plain)
    blended: NDArray[np.float32] = ((1.0 - kept) * divided + kept * plain).astype(np.float32)
    return blended


def _kept_by_llama3(rotary: Rotary, plain: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the share of each frequency that is not divided, from 0 to 1."""
    turns = rotary.original_context * plain.astype(np.float64) / (2 * math.pi)
    kept: NDArray[np.float64] = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    return np.clip(kept, 0.0, 1.0)


def _kept_by_yarn(rotary: Rotary) -> NDArray[np.float64]:
    """Return the share of each frequency that is not divided, from 0 to 1."""

    def pair(turns: float) -> float:
        """Return the index of the pair, as a fraction, that makes so many turns in the original context."""
        of_base = math.log(rotary.original_context / (turns * 2 * math.pi)) / math.log(rotary.base)
        return rotary.dim * of_base / 2

    first, last = pair(rotary.high_freq_factor), pair(rotary.low_freq_factor)
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    indices = np.arange(rotary.dim // 2, dtype=np.float64)
    return np.clip(1.0 - (indices - first) / (max(last - first, 0.0) or 0.001), 0.0, 1.0)
