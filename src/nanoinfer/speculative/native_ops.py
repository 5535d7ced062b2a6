"""The operations of numpy_ops.py, the products of which are in the native extension.

The products run on the threads of the engine `native`. Those of NumPy run on threads of their own beside them, which
compete with the engine's for the cores and wait for each other at the end of every product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.speculative.numpy_ops import Values, concatenate, finite, gelu, layer_norm, like, stack

__all__ = ["Matrix", "concatenate", "finite", "gelu", "layer_norm", "like", "linear", "placement", "stack"]


class Matrix:
    """A float32 matrix, (out, in), packed for products.

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


def placement(threads: int, isa: str = "") -> Callable[[Any], Any]:
    """Return a function that packs an array of two dimensions, and returns any other."""
    return lambda array: Matrix(array, threads, isa) if array.ndim == 2 else array


def linear(x: Values, weight: Matrix, bias: Values | None = None) -> Values:
    """Return x weight^T + bias, (rows, out)."""
    product = weight.multiply(x)
    return product if bias is None else product + bias
