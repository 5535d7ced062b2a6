"""The operations of a draft head on NumPy arrays and native matrices; torch_ops.py has the same for tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.utils.arrays import Array, to_numpy

LAYER_NORM_EPS = 1e-5  # PyTorch's default
Values = NDArray[Any]


class Matrix:
    """A float32 matrix, (out, in), packed by the native extension for products on the threads of the engine `native`.

    The products of NumPy run on threads of their own beside them, which compete with the engine's for the cores and
    wait for each other at the end of every product.

    Args:
        values: copied.
        threads: of the pool, which decoders of as many threads share.
        isa: instruction set, "" for the fastest.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, values: NDArray[np.float32], threads: int, isa: str = "") -> None:
        from nanoinfer import _native

        self._matrix: Any = _native.Matrix(values=np.ascontiguousarray(values), threads=threads, isa=isa)

    def __getitem__(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return rows, (len(ids), in). Raises IndexError if one does not exist."""
        rows: NDArray[np.float32] = self._matrix.rows(ids)
        return rows

    def multiply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return x W^T, (rows, out). Raises ValueError if x is not (rows, in)."""
        product: NDArray[np.float32] = self._matrix.multiply(np.ascontiguousarray(x))
        return product


def native_placement(threads: int, isa: str = "") -> Callable[[Any], Any]:
    """Return a function that packs an array of two dimensions, and returns any other."""
    return lambda array: Matrix(array, threads, isa) if array.ndim == 2 else array


def linear(x: Values, weight: Values | Matrix, bias: Values | None = None) -> Values:
    """Return x weight^T + bias."""
    product: Values = weight.multiply(x) if isinstance(weight, Matrix) else x @ weight.T
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
