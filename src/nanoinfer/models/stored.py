"""Tensors stored in a file; reader and writer of the safetensors format.

Files are untrusted. The header is compared with the file's size before any tensor is read. A tensor is read on demand,
and only its own bytes are read. The format: 8 bytes with the length of the header, little-endian; the header, JSON of
name -> dtype, shape, and begin and end offsets after the header; the values, without gaps.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.utils.arrays import ITEM_BYTES, BlockFormats, BlockMatrix, FileBlocks, HostTensor, JoinedBlocks
from nanoinfer.utils.files import RegularFile, first_bytes, parse_json

MAX_HEADER_BYTES = 16 << 20  # GPT-2 XL's has 60 KB
MAX_TENSORS = 1 << 16  # of a file; models have some hundreds to some thousands
PART_ROWS = 32  # outputs of a panel in engine native (kernels/cpu/kernels/kernels.h)
_DTYPES = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I8": "int8", "U8": "uint8",
    "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_RAW = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1", "float8_e8m0fnu": "u1"}
"""Dtypes that NumPy lacks -> that of their bits."""
_ITEM_BYTES = (
    {"bool": 1} | dict.fromkeys(_RAW, 1) | {f"{u}int{8 * n}": n for u in ("", "u") for n in (1, 2, 4, 8)} | ITEM_BYTES
)
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file. Equal objects refer to the same values."""

    file: RegularFile
    start: int
    """Offset of the first value in the file, in bytes. Values are little-endian."""
    dtype: str
    """PyTorch's name of the dtype."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in values, as in PyTorch; not negative."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in memory; with strides of 0, more than in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def block_format(self) -> str | None:
        """The format of GGUF files to compute in if the tensor is stored in blocks of quantized values."""
        return None

    @property
    def block_formats(self) -> BlockFormats | None:
        """`block_format` as that of the only part."""
        return ((self.block_format, self.shape[0]),) if self.block_format else None

    def t(self) -> StoredTensor:
        """Return the transpose of a matrix, or of each of several."""
        swapped = [(*n[:-2], n[-1], n[-2]) for n in (self.shape, self.strides)]
        return replace(self, shape=swapped[0], strides=swapped[1])

    def merged(self) -> StoredTensor:
        """Return the matrix whose rows are those of a row-major tensor of two or more dimensions; a vector is a row."""
        shape = (math.prod(self.shape[:-1]), self.shape[-1])
        return replace(self, shape=shape, strides=contiguous(shape))

    def unfolded(self, count: int) -> StoredTensor:
        """Return a row-major matrix with each of its rows as `count` rows."""
        shape = (self.shape[0] * count, self.shape[1] // count)
        return replace(self, shape=shape, strides=contiguous(shape))

    def equal_parts(self, count: int) -> list[StoredTensor]:
        """Return `count` parts of the rows, one below the other, for a row-major tensor whose rows they divide."""
        shape = (self.shape[0] // count, *self.shape[1:])
        num_bytes = self._stored_bytes(shape)
        return [replace(self, shape=shape, start=self.start + i * num_bytes) for i in range(count)]

    def each(self) -> list[StoredTensor]:
        """Return the tensors that follow each other in the first dimension."""
        return [self._view(self.shape[1:], self.strides[1:], i * self.strides[0]) for i in range(self.shape[0])]

    def alternate(self, count: int) -> list[StoredTensor]:
        """Return `count` parts of the rows: row i is one of part i % count."""
        shape, strides = (self.shape[0] // count, *self.shape[1:]), (self.strides[0] * count, *self.strides[1:])
        return [self._view(shape, strides, i * self.strides[0]) for i in range(count)]

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> StoredTensor:
        """Return a part that begins with value `first`."""
        return replace(self, shape=shape, strides=strides, start=self.start + first * ITEM_BYTES.get(self.dtype, 1))

    def _stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the first rows in the file."""
        return math.prod(shape) * ITEM_BYTES.get(self.dtype, 1)

    def read(self) -> HostTensor:
        """Read the tensor into new memory; strides are kept. float64 is converted to float32.

        Integers, and FP8 numbers as their bits, are parts of quantized matrices (`quantized`).

        Raises:
            NanoinferError: the file has changed since it was opened.
        """
        values = np.empty(span(self.shape, self.strides), _RAW.get(self.dtype, self.dtype))
        self.file.read_into(self.start, values.view(np.uint8).data)
        dtype = self.dtype
        if dtype == "float64":
            values, dtype = values.astype(np.float32), "float32"
        strides = [n * values.itemsize for n in self.strides]
        return HostTensor(np.lib.stride_tricks.as_strided(values, self.shape, strides), dtype)


@dataclass(frozen=True, eq=False)
class ChangedTensor(StoredTensor):
    """A matrix that is computed from a stored one."""

    source: StoredTensor
    change: Callable[[NDArray[Any]], NDArray[Any]]
    """Takes the values of `source`; bfloat16 as its bits."""

    @staticmethod
    def of(
        source: StoredTensor, shape: tuple[int, ...], change: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> ChangedTensor:
        """Return the matrix with this shape. Values that are stored in blocks become float32."""
        dtype = source.dtype if source.dtype in ITEM_BYTES and not source.block_format else "float32"
        return ChangedTensor(source.file, source.start, dtype, shape, contiguous(shape), source, change)

    def read(self) -> HostTensor:
        """Read the source and compute the values. Raises as `StoredTensor.read`."""
        tensor = self.source.read().dense()
        return HostTensor(np.ascontiguousarray(self.change(tensor.values)), tensor.dtype)


@dataclass(frozen=True, eq=False)
class JoinedTensor:
    """Stored tensors that are read as one: joined along their rows, which are then reordered."""

    parts: tuple[StoredTensor, ...]
    order: NDArray[np.intp] | None = None
    """Row i is row order[i] of the joined parts; None: the same order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def block_formats(self) -> BlockFormats | None:
        """The formats of our rows if any part has blocks, and Q8_0 for those of the others; equal ones are one part.

        Rows of one format must be multiples of PART_ROWS: otherwise all rows are rounded to Q8_0.
        """
        if not any(part.block_format for part in self.parts):
            return None
        runs = self._runs()
        if any(len(rows) % PART_ROWS for _, rows in runs[:-1]):
            return (("q8_0", self.shape[0]),)
        return tuple((format, len(rows)) for format, rows in runs)

    @property
    def _formats(self) -> list[str]:
        """The format of each part."""
        return [part.block_format or "q8_0" for part in self.parts]

    def _runs(self) -> list[tuple[str, NDArray[np.intp]]]:
        """Return our rows as rows of the joined parts, split where the format changes, with their formats."""
        names = sorted(set(self._formats))
        kinds = np.repeat([names.index(name) for name in self._formats], [part.shape[0] for part in self.parts])
        order = np.arange(self.shape[0]) if self.order is None else self.order
        runs = np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)
        return [(names[kinds[rows[0]]], rows) for rows in runs]

    def read(self) -> HostTensor:
        """Read the parts into new memory, in their dtype, or if they differ as `JoinedBlocks` or in float32."""
        tensors = [part.read() for part in self.parts]
        order = np.arange(self.shape[0]) if self.order is None else self.order
        if len({t.dtype for t in tensors}) == 1:
            joined = _join(tensors)
            return joined if self.order is None else replace(joined, values=joined.values[order])
        formats = self.block_formats
        if formats is None or len(formats) == 1:
            return HostTensor(np.concatenate([t.float32() for t in tensors])[order], "float32")
        starts = np.cumsum([0, *(t.shape[0] for t in tensors)])
        place, joined_of = np.empty(starts[-1], np.intp), {}  # of a row among those of its format
        for format in set(self._formats):
            same = [i for i, name in enumerate(self._formats) if name == format]
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in same])
            place[rows] = np.arange(len(rows))
            exact = all(tensors[i].dtype == format for i in same)
            joined_of[format] = _join([tensors[i] if exact else tensors[i].to("float32") for i in same])
        runs = [(joined_of[format], place[rows]) for format, rows in self._runs()]
        parts = [replace(joined, values=joined.values[rows]) for joined, rows in runs]
        return JoinedBlocks(np.empty(0, np.uint8), "blocks", tuple(parts))


def _join(tensors: Sequence[HostTensor]) -> HostTensor:
    """Return tensors of one dtype, one below the other."""
    if len({type(t) for t in tensors}) > 1 and isinstance(first := tensors[0], BlockMatrix):
        blocks = [t.blocks() for t in tensors if isinstance(t, BlockMatrix)]
        return BlockMatrix(np.concatenate(blocks), first.dtype, first.columns, first.dequantize)
    joined = replace(tensors[0], values=np.concatenate([t.values for t in tensors]))
    if isinstance(joined, FileBlocks):
        return replace(joined, files=frozenset().union(*(t.files for t in tensors if isinstance(t, FileBlocks))))
    return joined


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of stored values from a tensor's first to its last: (2, 3) with strides (1, 2) -> 6."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides: (2, 3, 4) -> (12, 4, 1)."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as a safetensors file, whatever its name is."""
    head = first_bytes(path, 9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, which stays open as long as one of them exists.

    Raises:
        NanoinferError: the file is missing or is not a valid safetensors file.
    """
    return read_with_metadata(path)[0]


def read_with_metadata(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the tensors of a safetensors file and its metadata, which is empty if it is not an object.

    Raises:
        NanoinferError: as `read_safetensors`.
    """
    file = RegularFile(path, "safetensors")
    broken = f"{escaped(path)} is not a valid safetensors file"
    length = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else 0
    if not 0 < length <= min(MAX_HEADER_BYTES, file.size - 8):
        limit = max(0, min(MAX_HEADER_BYTES, file.size - 8))
        raise NanoinferError(f"{broken}: its header has {length} bytes, but must have 1 to {limit}")
    header = parse_json(file.read(8, length), f"{broken}: its header is not JSON")
    if not isinstance(header, dict):
        raise NanoinferError(f"{broken}: its header is a {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise NanoinferError(f"{broken}: it has {len(header)} tensors; the limit is {MAX_TENSORS}")
    places: list[tuple[int, int]] = []
    tensors = dict(_entries(file, 8 + length, header, broken, places))
    end = 0
    for begin, stop in sorted(places):  # tensors must not overlap, so their sizes cannot exceed the file's
        if begin != end:
            raise NanoinferError(f"{broken}: a tensor begins at byte {begin}, but the previous one ends at {end}")
        end = stop
    if end != file.size - 8 - length:
        raise NanoinferError(f"{broken}: its tensors have {end} bytes, but the file has {file.size - 8 - length}")
    return tensors, metadata if isinstance(metadata, dict) else {}


def to_safetensors(tensors: Mapping[str, HostTensor]) -> bytes:
    """Return the content of a safetensors file with these tensors, in the order of the mapping.

    The package safetensors has no function for this that takes bfloat16 without PyTorch in all of its versions.
    """
    contents = {name: np.ascontiguousarray(tensor.values).tobytes() for name, tensor in tensors.items()}
    entries = {name: (_NAMES[t.dtype], t.shape, len(contents[name])) for name, t in tensors.items()}
    return make_header(entries, {"format": "pt"}) + b"".join(contents.values())  # transformers requires the format


def make_header(
    entries: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str], alignment: int = 8
) -> bytes:
    """Return the beginning of a safetensors file, up to the first value.

    Args:
        entries: name -> dtype as in the format, shape, and number of bytes, in the order of the values.
        metadata: content of __metadata__.
        alignment: the result is padded to a multiple of it, in bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, num_bytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def _entries(
    file: RegularFile, data: int, header: dict[str, Any], broken: str, places: list[tuple[int, int]]
) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            raise _wrong(broken, name, entry, ", not by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        lists = isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)
        if not lists or len(offsets) != 2 or not offsets[0] <= offsets[1]:
            raise _wrong(broken, name, entry, ": sizes and offsets must be integers in [0, 2**63), with begin <= end")
        places.append((offsets[0], offsets[1]))
        shape, dtype = tuple(shape), _DTYPES.get(dtype) or str(dtype)
        item_bytes = _ITEM_BYTES.get(dtype)
        if item_bytes is not None and math.prod(shape) * item_bytes != offsets[1] - offsets[0]:
            raise _wrong(broken, name, entry, ": its shape does not match its data_offsets")
        yield name, StoredTensor(file, data + offsets[0], dtype, shape, contiguous(shape))


def _wrong(broken: str, name: str, entry: Any, why: str) -> NanoinferError:
    return NanoinferError(f"{broken}: tensor {show(name)} is described by {show(entry)}{why}")


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 2**63 for n in value)
