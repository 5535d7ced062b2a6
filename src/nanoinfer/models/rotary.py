"""Frequencies of rotary position embeddings. This module does not import PyTorch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import Rotary


def frequencies(rotary: Rotary) -> NDArray[np.float32]:
    """Return the angle in radians by which each pair of dimensions turns at each position, (dim / 2,).

    llama3 is the scaling of Llama 3.1 (Meta 2024; transformers, modeling_rope_utils.py): with t turns in the original
    context, a frequency is divided by `factor` if t < low_freq_factor, kept if t > high_freq_factor, and blended
    linearly in t between them.
    """
    exponents = np.arange(0, rotary.dim, 2, dtype=np.float32) / np.float32(rotary.dim)
    plain: NDArray[np.float32] = np.float32(1.0) / np.float32(rotary.base) ** exponents
    if rotary.scaling == "none":
        return plain
    divided: NDArray[np.float32] = plain / np.float32(rotary.factor)
    if rotary.scaling == "linear":
        return divided
    turns = rotary.original_context * plain.astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor), 0.0, 1.0)
    blended: NDArray[np.float32] = ((1.0 - kept) * divided + kept * plain).astype(np.float32)
    return blended
