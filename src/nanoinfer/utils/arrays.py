"""Arrays at the seams between engines, samplers and checkpoints. This module does not import PyTorch.

Engine `native` returns NumPy arrays, the engines in PyTorch return tensors. Code between an engine and a sampler only
slices rows, which both support; code that computes on the host calls `to_numpy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError, escaped
from nanoinfer.utils.files import RegularFile

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of a value, by the dtypes that stored weights may have. Formats of 8 bits and fewer would need scales."""


class Array(Protocol):
    """A NumPy array or a PyTorch tensor, on any device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    def __getitem__(self, key: Any, /) -> Any:
        """Return some rows, or a part of them."""


def to_numpy(array: Array) -> NDArray[Any]:
    """Return the array as a NumPy array: itself, a view of a tensor on the CPU, or a copy from another device."""
    if isinstance(array, np.ndarray):
        return array
    tensor: Any = array
    return tensor.detach().cpu().numpy()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory, in one of the dtypes of `ITEM_BYTES`. NumPy has no bfloat16."""

    values: NDArray[Any]
    """Any strides. bfloat16 values are their bits, as uint16."""
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.values.shape

    def dense(self) -> HostTensor:
        """Return a tensor whose `values` are numbers: the tensor itself, unless it is a `BlockMatrix`."""
        return self

    def t(self) -> HostTensor:
        """Return the transpose of a matrix, with the same memory."""
        return HostTensor(self.values.T, self.dtype)

    def float32(self) -> NDArray[np.float32]:
        """Return the values as float32; the array itself if it is float32."""
        if self.dtype == "bfloat16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32, copy=False)

    def to(self, dtype: str) -> HostTensor:
        """Return the tensor in another dtype, rounded to nearest; the tensor itself if it has the dtype."""
        if dtype == self.dtype:
            return self
        values = self.float32()
        if dtype == "bfloat16":
            return HostTensor(_bfloat16_bits(values), dtype)
        with np.errstate(over="ignore"):  # to infinity, as PyTorch does
            return HostTensor(values.astype(dtype), dtype)


BlockFormats = tuple[tuple[str, int], ...]
"""Formats of the parts of a matrix, and how many rows each part has: (("q4_k", 3072), ("q6_k", 1024))."""


def format_names(matrices: Mapping[str, BlockFormats]) -> list[str]:
    """Return the formats of some matrices, that of most of their parts first: ["q4_k", "q6_k"]."""
    return [name for name, _ in Counter(name for parts in matrices.values() for name, _ in parts).most_common()]


class Blocks(HostTensor):
    """A matrix that is not stored as numbers, but has those of `float32`."""

    def dense(self) -> HostTensor:
        """Return the values in float32."""
        return HostTensor(self.float32(), "float32")

    def t(self) -> HostTensor:
        """Return the transpose, in float32."""
        return self.dense().t()

    def to(self, dtype: str) -> HostTensor:
        """Return the matrix in another dtype, rounded to nearest; the matrix itself if it has the dtype."""
        return self if dtype == self.dtype else self.dense().to(dtype)


@dataclass(frozen=True)
class BlockMatrix(Blocks):
    """A matrix whose rows are blocks of quantized values, in a format of GGUF files. Its dtype is the format: "q4_k".

    `values` are the blocks, (rows, bytes of a row) uint8.
    """

    columns: int
    dequantize: Callable[[NDArray[np.uint8]], NDArray[np.float32]]
    """Return the values of blocks, (rows, bytes of a row) uint8, as one dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return (len(self.values), self.columns)

    def float32(self) -> NDArray[np.float32]:
        """Return the values as float32."""
        return self.dequantize(self.blocks()).reshape(self.shape)

    def blocks(self) -> NDArray[np.uint8]:
        """Return the blocks, (rows, bytes of a row), row-major."""
        return np.ascontiguousarray(self.values)


@dataclass(frozen=True)
class FileBlocks(BlockMatrix):
    """A matrix of blocks that are still in GGUF files.

    `values` are the places of its rows, (rows, 2) int64: the descriptor of a file, and the row's offset in bytes. Rows
    can so be reordered and joined before they are read.
    """

    row_bytes: int
    files: frozenset[RegularFile]

    def blocks(self) -> NDArray[np.uint8]:
        """Read the blocks, (rows, row_bytes). Raises NanoinferError as `RegularFile.read`."""
        blocks = np.empty((len(self.values), self.row_bytes), np.uint8)
        files = {file.fileno(): file for file in self.files}
        steps = np.diff(self.values, axis=0)
        ends = np.flatnonzero((steps != [0, self.row_bytes]).any(axis=1)) + 1  # of rows that lie side by side
        for start, end in pairwise([0, *ends.tolist(), len(blocks)]):
            descriptor, offset = self.values[start].tolist()
            files[descriptor].read_into(offset, blocks[start:end].reshape(-1).data)
        return blocks

    def read_by(self, reader: Callable[[NDArray[np.int64], int], None]) -> None:
        """Call reader(places of the rows, row_bytes), which reads them itself and raises RuntimeError if it cannot.

        Raises:
            NanoinferError: a file cannot be read, or has changed since it was opened.
        """
        try:
            reader(np.ascontiguousarray(self.values), self.row_bytes)
            failure = None
        except RuntimeError as e:
            failure = str(e)
        for file in self.files:
            file.check()
        if failure is not None:
            paths = ", ".join(sorted(escaped(file.path) for file in self.files))
            raise NanoinferError(f"{paths} cannot be read: {failure}")


@dataclass(frozen=True)
class JoinedBlocks(Blocks):
    """Matrices of blocks in several formats, one below the other. Its dtype is "blocks", and `values` is empty."""

    parts: tuple[HostTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    def float32(self) -> NDArray[np.float32]:
        """Return the values as float32."""
        return np.concatenate([part.float32() for part in self.parts])


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 values rounded to bfloat16, nearest with ties to even, as their bits."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40  # rounding could make an infinity of it
    return rounded
