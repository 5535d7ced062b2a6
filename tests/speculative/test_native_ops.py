"""Matrices of the native extension outside a decoder: rows as given, and products whatever the rows and the threads."""

from __future__ import annotations

import numpy as np
import pytest

from nanoinfer.speculative import numpy_ops

pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("out, columns", [(1, 1), (33, 7), (100, 130), (257, 64)])
def test_products_are_those_of_numpy(out: int, columns: int, threads: int) -> None:
    values, bias = RANDOM.normal(size=(out, columns)).astype(np.float32), np.ones(out, np.float32)
    matrix = numpy_ops.Matrix(values, threads)
    for rows in (1, 2, 5, 70):
        x = RANDOM.normal(size=(rows, columns)).astype(np.float32)
        product = numpy_ops.linear(x, matrix, bias)
        assert product.dtype == np.float32
        np.testing.assert_allclose(product, numpy_ops.linear(x, values, bias), rtol=1e-4, atol=1e-4)
        alone = [numpy_ops.linear(row, numpy_ops.Matrix(values, 1), bias) for row in x[:, None]]
        assert np.array_equal(product, np.concatenate(alone))


def test_rows_are_as_they_were_given() -> None:
    values = RANDOM.normal(size=(70, 9)).astype(np.float32)
    matrix = numpy_ops.native_placement(threads=2)(values[:, :5])  # not contiguous
    assert np.array_equal(matrix[[69, 0, 33, 0]], values[[69, 0, 33, 0], :5])
    assert matrix[[]].shape == (0, 5)
    vector = values[0]
    assert numpy_ops.native_placement(threads=2)(vector) is vector


def test_what_is_refused() -> None:
    matrix = numpy_ops.Matrix(np.ones((3, 4), np.float32), 1)
    for ids in ([3], [-1], [0, 2**62]):
        with pytest.raises(IndexError, match="outside the matrix of 3"):
            matrix[ids]
    for shape in ((2, 3), (0, 4)):
        with pytest.raises(ValueError, match=r"must be \(rows, 4\) with at least one row"):
            matrix.multiply(np.ones(shape, np.float32))
    for threads in (0, 1025):
        with pytest.raises(ValueError, match="threads must be from 1 to 1024"):
            numpy_ops.Matrix(np.ones((3, 4), np.float32), threads)
    with pytest.raises(ValueError, match="at least one output and one input"):
        numpy_ops.Matrix(np.ones((0, 4), np.float32), 1)
