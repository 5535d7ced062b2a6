"""Matrices that several stored tensors describe: integers, scales, zero points.

A `Codec` computes the values of one matrix, or its blocks if these values are exactly those of a format of GGUF files.
`QuantizedTensor` gives it the interface of a `StoredTensor`.

Values are those of the method's formula in exact arithmetic, rounded once to float32. For an integer or an FP8 number
times a scale of at most 24 bits, a product in float32 is that.
"""

# ruff: noqa: D102  (methods without a docstring are those of `StoredTensor` and `Scaled`)

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.formats import BY_NAME, OFFSETS, assemble
from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import ChangedTensor, StoredTensor, contiguous
from nanoinfer.utils.arrays import BlockMatrix, HostTensor
from nanoinfer.utils.files import RegularFile

FLOATS = ("float16", "bfloat16", "float32")
"""Dtypes of scales."""
Numbers = NDArray[Any]
E8M0 = "float8_e8m0fnu"

_CHUNK = 1 << 18  # values that are computed at a time, which limits the memory of intermediate results
_BLOCK = 32  # values in the smallest block of the formats below
_EXACT = (("tq2_0", -1, 2), ("q4_0", -8, 7), ("q5_0", -16, 15), ("q8_0", -128, 127))
"""Formats whose values are (an integer of a range) * (a float16 scale of a block), the smallest first."""


@dataclass(frozen=True)
class QuantizedTensor(StoredTensor):
    """A matrix that a codec reads. Its dtype is that of dense values."""

    codec: Codec
    format: str | None
    """The first result of `Codec.exact`."""
    first: int = 0
    """Row of the codec's matrix that is the first row here."""

    @staticmethod
    def of(codec: Codec, format: str | None) -> QuantizedTensor:
        """Return the whole matrix."""
        return QuantizedTensor(codec.file, 0, "float32", codec.shape, contiguous(codec.shape), codec, format)

    @property
    def block_format(self) -> str | None:
        rows = len(self.shape) == 2 and self.strides == contiguous(self.shape)
        return self.format if rows else None

    def equal_parts(self, count: int) -> list[StoredTensor]:
        shape = (self.shape[0] // count, *self.shape[1:])
        return [replace(self, shape=shape, first=self.first + i * shape[0]) for i in range(count)]

    def unfolded(self, count: int) -> StoredTensor:
        """Return `StoredTensor.unfolded` of dense values: a row's scales may be those of several rows."""
        shape = (self.shape[0] * count, self.shape[1] // count)
        return ChangedTensor.of(self, shape, lambda values: values.reshape(shape))

    def each(self) -> list[StoredTensor]:
        parts = [QuantizedTensor.of(codec, self.format) for codec in self._views(StoredTensor.each)]
        return [part if self.strides == contiguous(self.shape) else part.t() for part in parts]

    def alternate(self, count: int) -> list[StoredTensor]:
        codecs = self._views(lambda tensor: tensor.alternate(count))
        return [QuantizedTensor.of(codec, self.format) for codec in codecs]

    def _views(self, split: Callable[[StoredTensor], list[StoredTensor]]) -> list[Mxfp4]:
        return cast(Mxfp4, self.codec).views(split)

    def read(self) -> HostTensor:
        """Return a `BlockMatrix` if the matrix has a `block_format`, else the values in float32.

        Raises:
            NanoinferError: a file has changed since it was opened.
        """
        if (format := self.block_format) is not None:
            blocks = self.codec.blocks(format)[self.first : self.first + self.shape[0]]
            return BlockMatrix(blocks, format, self.shape[1], BY_NAME[format.upper()].dequantize)
        values = self.codec.dense()
        if self.strides != contiguous(self.shape):
            return HostTensor(values.T, "float32")
        return HostTensor(values[self.first : self.first + self.shape[0]], "float32")


@dataclass(frozen=True, eq=False)
class Scaled:
    """The values (code - zero point) * scale, where rectangles of a matrix share a scale and a zero point."""

    file: RegularFile
    shape: tuple[int, ...]
    codes: Callable[[], Numbers]
    """Read the integers, or the indices into `table`: (out, in), of 8 bits."""
    scales: Callable[[], Numbers] = lambda: np.ones((1, 1), np.float32)
    """Read the scales, float32 or float64: one for each rectangle, as rows of rectangles."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of a rectangle; those at the ends may be smaller."""
    zeros: Callable[[], Numbers] = lambda: np.zeros((1, 1), np.int16)
    """Read the zero points: one for each rectangle, or (1, 1)."""
    limits: tuple[int, int] = (0, 0)
    """The lowest and the highest code."""
    table: NDArray[np.float32] | None = None
    """The values of codes that are no integers."""
    whole: bool = True
    """Whether the codes are integers."""
    order: NDArray[np.intp] | None = None
    """The column of rectangles to which each column belongs; None: consecutive columns share one."""

    def exact(self) -> tuple[str | None, str]:
        """Return the format of GGUF files that has exactly the same values; None if there is none, and why.

        Scales and zero points are read.
        """
        if self.table is not None or not self.whole:
            return None, "codes are not integers"
        if self.order is not None:
            return None, "columns are ordered by activations"
        if self.shape[1] % _BLOCK or (self.block[1] % _BLOCK and self.block[1] < self.shape[1]):
            return None, f"groups are not multiples of {_BLOCK}"
        scales = self.scales()
        with np.errstate(over="ignore", invalid="ignore"):
            if not (scales.astype(np.float16) == scales).all():  # NaN is not equal either
                return None, "scales are not float16"
        zeros = self.zeros()
        low, high = self.limits[0] - int(zeros.max()), self.limits[1] - int(zeros.min())
        sizes = (self.shape[1], self.block[1] if self.block[1] < self.shape[1] else 0)  # a block has one scale
        fitting = (
            name for name, least, highest in _EXACT
            if least <= low and high <= highest and not any(n % BY_NAME[name.upper()].block_size for n in sizes)
        )  # fmt: skip
        name = next(fitting, None)
        return name, "" if name else "codes without their zero points have more than 8 bits"

    def _spread(self, numbers: Numbers, start: int, end: int, step: int = 1) -> Numbers:
        """Return the numbers of rectangles for each value of some rows, or for the first of each `step` values."""
        rows = numbers[np.arange(start, end) // self.block[0]] if len(numbers) > 1 else numbers
        if rows.shape[1] == 1:
            return rows
        if self.order is not None:
            return rows[:, self.order]
        return np.repeat(rows, self.block[1] // step, axis=1)[:, : self.shape[1] // step]

    def dense(self) -> NDArray[np.float32]:
        """Read the tensors and return the values."""
        codes, scales, zeros = self.codes(), self.scales(), self.zeros()
        values = np.empty(self.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN
            for start, end in _chunks(self.shape):
                some = codes[start:end]
                numbers = some.astype(np.float32) if self.table is None else np.take(self.table, some)
                if zeros.any():
                    numbers -= self._spread(zeros, start, end)
                np.multiply(numbers, self._spread(scales, start, end), out=values[start:end], casting="same_kind")
        return values

    def blocks(self, format: str) -> NDArray[np.uint8]:
        """Read the tensors and return the rows' blocks in the format of `exact`, (out, bytes of a row)."""
        codes, scales, zeros = self.codes(), self.scales(), self.zeros()
        kind, (rows, columns) = BY_NAME[format.upper()], self.shape
        size = kind.block_size
        blocks = np.empty((rows, columns // size * kind.block_bytes), np.uint8)
        below = (zeros.astype(np.int16) - OFFSETS[kind.name]).astype(np.uint8)  # modulo 256: results have 8 bits
        for start, end in _chunks(self.shape):
            u = codes[start:end].view(np.uint8) - self._spread(below, start, end)
            shape = (end - start, columns // size)
            each = np.broadcast_to(self._spread(scales, start, end, size), shape)
            blocks[start:end] = assemble(kind.name, each.reshape(-1), u.reshape(-1, size)).reshape(shape[0], -1)
        return blocks


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """Numbers of 4 bits, the first of a pair in the low bits, and a power of 2 for each 32 of them."""

    packed: StoredTensor
    """(..., out, in / 2) or (..., out, in / 32, 16), uint8."""
    scale: StoredTensor
    """Exponent + 127: (..., out, in / 32), uint8."""
    shape: tuple[int, ...]

    @property
    def file(self) -> RegularFile:
        return self.packed.file

    def exact(self) -> tuple[str | None, str]:
        return "mxfp4", ""

    def views(self, split: Callable[[StoredTensor], list[StoredTensor]]) -> list[Mxfp4]:
        """Return the codecs of parts. `split` is applied to the stored tensors, which have the rows of the matrices."""
        pairs = zip(split(self.packed), split(self.scale), strict=True)
        return [Mxfp4(packed, scale, (*scale.shape[:-1], scale.shape[-1] * 32)) for packed, scale in pairs]

    def dense(self) -> NDArray[np.float32]:
        return BY_NAME["MXFP4"].dequantize(self._blocks()).reshape(self.shape)

    def blocks(self, format: str) -> NDArray[np.uint8]:
        return self._blocks().reshape(self.shape[0], -1)

    def _blocks(self) -> NDArray[np.uint8]:
        """Return (num_blocks, 17) bytes: the scale, then values i and i + 16 in the low and high bits of a byte."""
        codes = unpack(self.packed.read().values.reshape(-1, 16), 4, 32)
        return np.concatenate([self.scale.read().values.reshape(-1, 1), codes[:, :16] | codes[:, 16:] << 4], axis=1)


Codec = Scaled | Mxfp4
"""The storage of one matrix, or of several."""


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the row after the last one of parts of a matrix, about `_CHUNK` values each."""
    step = max(1, _CHUNK // shape[1])
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


class Parts:
    """The stored tensors of one matrix.

    Args:
        stem: how their names begin.
        tensors: the ends of their names -> the tensors.
    """

    def __init__(self, stem: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.stem, self._tensors = stem, tensors
        self._taken: set[str] = set()

    @property
    def untaken(self) -> list[str]:
        """The ends of the names of tensors that were not taken."""
        return sorted(self._tensors.keys() - self._taken)

    def __contains__(self, end: str) -> bool:
        return end in self._tensors

    def take(self, end: str, dtypes: Sequence[str], shape: Sequence[int | None] | None = None) -> StoredTensor:
        """Return a tensor.

        Args:
            end: of its name.
            dtypes: that it may have.
            shape: that it must have, where None stands for any size above 0; None: any.

        Raises:
            NanoinferError: it is missing, or has another dtype or shape.
        """
        if (tensor := self._tensors.get(end)) is None:
            raise self.error(end, "is missing")
        self._taken.add(end)
        if tensor.dtype not in dtypes:
            raise self.error(end, f"is {escaped(tensor.dtype, 40)}, but must be {' or '.join(dtypes)}")
        actual, expected = tensor.shape, tensor.shape if shape is None else tuple(shape)
        same = len(actual) == len(expected) and all(w in (n, None) and n for n, w in zip(actual, expected, strict=True))
        if not same:
            text = ", ".join("any" if n is None else str(n) for n in expected)
            raise self.error(end, f"is {list(actual)}, but must be [{text}], without empty dimensions")
        return tensor

    def error(self, end: str, what: str) -> NanoinferError:
        """Return an error about a tensor."""
        return NanoinferError(f"tensor {show(self.stem + end)[1:-1]} {what}")


@dataclass(frozen=True)
class Scheme:
    """The storage of the matrices of one folder."""

    open: Callable[[Parts], Codec]
    """Check the tensors of a matrix and return its codec. Raises NanoinferError."""
    activations: bool = False
    """Whether the config quantizes activations too."""


@dataclass(frozen=True)
class Method:
    """A method of quantization: its tensors, and how its config is read."""

    marks: tuple[str, ...]
    """Ends of names by which a quantized matrix is known."""
    others: tuple[str, ...]
    """Ends of the names of its other tensors."""
    read: Callable[[Fields], Scheme]
    """Check the config's fields and return the scheme. Raises NanoinferError."""
    result: str = ".weight"
    """End of the name of the matrix."""
    linear: bool = True
    """Whether a matrix is (out, in) even where the family stores it transposed."""


def unpack(words: Numbers, bits: int, count: int) -> NDArray[np.uint8]:
    """Return integers of `bits` bits, the lowest bits of a word first: (rows, words) -> (rows, count)."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits:
        digits = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * bits].reshape(len(packed), count, bits)
        return np.packbits(digits, axis=2, bitorder="little")[..., 0]
    each = np.empty((*packed.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        each[..., i] = packed >> np.uint8(bits * i) & np.uint8((1 << bits) - 1)
    return each.reshape(len(packed), -1)[:, :count]


def groups_of(parts: Parts, end: str, columns: int, groups: int) -> int:
    """Return how many columns share a scale. Raise NanoinferError if the groups do not divide the columns."""
    if columns % groups:
        raise parts.error(end, f"has {groups} groups, which do not divide {columns} columns")
    return columns // groups


def order_of(parts: Parts, end: str, columns: int, groups: int) -> NDArray[np.intp] | None:
    """Return the group of each column; None if the tensor is missing, or groups are consecutive columns.

    Raises:
        NanoinferError: the tensor has another shape, or a group that does not exist.
    """
    if end not in parts:
        return None
    order = parts.take(end, ("int32", "int64"), (columns,)).read().values.astype(np.intp)
    if order.min() < 0 or order.max() >= groups:
        wrong = int(order[(order < 0) | (order >= groups)][0])
        raise parts.error(end, f"names the group {wrong}, but there are {groups}")
    if columns % groups == 0 and np.array_equal(order, np.arange(columns) // (columns // groups)):
        return None
    return order


def _float8(exponent_bits: int, mantissa_bits: int) -> NDArray[np.float32]:
    """Return the values of the 256 codes of a format with sign, exponent and mantissa, without those of infinity."""
    codes = np.arange(256)
    exponent, mantissa = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    fraction = (mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)).astype(np.float32)
    bias = (1 << exponent_bits - 1) - 1 + mantissa_bits
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    signed: NDArray[np.float32] = np.where(codes & 128, -values, values)
    return signed


def _tables() -> dict[str, NDArray[np.float32]]:
    e4m3, e5m2 = _float8(4, 3), (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    e4m3[[0x7F, 0xFF]] = np.nan
    e8m0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    return {"float8_e4m3fn": e4m3, "float8_e5m2": e5m2, E8M0: e8m0}


TABLES = _tables()
"""The values of the codes of each format of 8 bits."""
