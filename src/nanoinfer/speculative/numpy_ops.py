"""The operations of a draft head on NumPy arrays; torch_ops.py has the same functions for tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.utils.arrays import Array, to_numpy

LAYER_NORM_EPS = 1e-5  # PyTorch's default
Values = NDArray[Any]


def linear(x: Values, weight: Values, bias: Values | None = None) -> Values:
    """Return x weight^T + bias."""
    product: Values = x @ weight.T
    return product if bias is None else product + bias


def layer_norm(x: Values, weight: Values, bias: Values) -> Values:
    """Normalize the last dimension."""
    centered = x - x.mean(-1, keepdims=True)
    variance = np.square(centered).mean(-1, keepdims=True)
    return centered / np.sqrt(variance + LAYER_NORM_EPS) * weight + bias  # type: ignore[no-any-return]


def gelu(x: Values) -> Values:
    """Return GELU in its tanh approximation."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))  # type: ignore[no-any-return]


def concatenate(arrays: Sequence[Values]) -> Values:
    """Concatenate along the last dimension."""
    return np.concatenate(arrays, -1)


def like(x: Array, other: Values) -> Values:
    """Return x as an array of the dtype of `other`; x may be a tensor."""
    return to_numpy(x).astype(other.dtype, copy=False)


def stack(rows: Sequence[Values]) -> Values:
    """Stack along a new first dimension."""
    return np.stack(rows)


def finite(x: Values) -> NDArray[np.float32]:
    """Return float32, with 0 for NaN and the largest numbers for infinities."""
    return np.nan_to_num(x.astype(np.float32, copy=False))
