"""Read the container of a GGUF file: metadata, and the places of tensors.

Files are untrusted. Counts, lengths, shapes and offsets are compared with the file's size before anything is allocated,
and the file is read, not mapped. A tensor's bytes are read on demand.

The format: magic, version, number of tensors and of metadata entries; the entries (key, type, value); the names,
dimensions, types and offsets of the tensors; padding; the values of the tensors. All numbers are little-endian.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.formats import BY_NAME, FORMATS, UNSUPPORTED, Format
from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.models.stored import ChangedTensor, StoredTensor, contiguous
from nanoinfer.utils.arrays import BlockMatrix, FileBlocks, HostTensor
from nanoinfer.utils.files import RegularFile

Value = int | float | bool | str | list[str] | NDArray[np.generic]
"""A value of the metadata. Arrays of strings are lists, arrays of numbers are NumPy arrays."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 << 20  # that of a vocabulary of 262,144 tokens has 15 MB
MAX_ENTRIES = 1 << 14  # of the metadata; models have 20 to 60
MAX_TENSORS = 1 << 16  # models have some hundreds to some thousands
MAX_STRINGS = 1 << 21  # in all arrays; Gemma's tokens and merges are 777,000, the most known
MAX_KEY_BYTES = 65535  # of a key or a tensor's name, as the format limits keys
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_PARTS = 512  # of a model; the largest have some tens
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
"""The end of the name of one of several parts."""
_CHUNK = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LENGTH = struct.Struct("<Q")
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True)
class BlockTensor(StoredTensor):
    """A tensor whose rows are stored as blocks of quantized values. Its dtype is that of the values that are read."""

    format: Format
    step: int = 1
    """How many of the file's rows follow each other from one row of a matrix to the next."""
    factors: StoredTensor | None = None
    """Numbers that the values of equal parts, one after the other, are multiplied by; only in rounded formats."""

    def read_blocks(self) -> NDArray[np.uint8]:
        """Return the stored blocks, (num_blocks, bytes of a block). A row has consecutive blocks."""
        count, per_row = math.prod(self.shape) // self.format.block_size, self.shape[-1] // self.format.block_size
        if self.step > 1:  # and the rows between, but for those after the last
            count = (count // per_row - 1) * self.step * per_row + per_row
        blocks = np.empty((count, self.format.block_bytes), np.uint8)
        self.file.read_into(self.start, blocks.reshape(-1).data)
        if self.step > 1:
            blocks = np.concatenate([blocks[i : i + per_row] for i in range(0, count, self.step * per_row)])
        return blocks

    def alternate(self, count: int) -> list[StoredTensor]:
        """As `StoredTensor.alternate`, for a matrix."""
        shape, row_bytes = (self.shape[0] // count, self.shape[1]), self._stored_bytes(self.shape[-1:])
        part = replace(self, shape=shape, strides=contiguous(shape), step=self.step * count)
        return [replace(part, start=self.start + i * self.step * row_bytes) for i in range(count)]

    def _stored_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.format.block_size * self.format.block_bytes

    def unfolded(self, count: int) -> StoredTensor:
        """Return `StoredTensor.unfolded`; dense values if the new rows are no whole blocks."""
        shape = (self.shape[0] * count, self.shape[1] // count)
        if shape[1] % self.format.block_size == 0:
            return super().unfolded(count)
        return ChangedTensor.of(self, shape, lambda values: values.reshape(shape))

    @property
    def block_format(self) -> str | None:
        """The format to compute in: what is not read as rows of blocks is rounded to Q8_0."""
        rows = len(self.shape) == 2 and self.strides == contiguous(self.shape)
        return self._own[0].lower() if rows and not self.format.rounded else "q8_0"

    @property
    def _own(self) -> tuple[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]:
        """Name of the format of a matrix that is read, and what makes its blocks of the stored ones."""
        return self.format.converted or (self.format.name, lambda blocks: blocks)

    def read(self) -> HostTensor:
        """Return a matrix, whose rows of blocks are read later; read a tensor in float32. Raises as `StoredTensor`."""
        own, convert = self._own
        if self.block_format == own.lower():
            rows, columns = self.shape
            if own != self.format.name:
                blocks = convert(self.read_blocks()).reshape(rows, -1)
                return BlockMatrix(blocks, own.lower(), columns, BY_NAME[own].dequantize)
            row_bytes = columns // self.format.block_size * self.format.block_bytes
            places = np.full((rows, 2), self.file.fileno())
            places[:, 1] = self.start + row_bytes * self.step * np.arange(rows)
            files = frozenset((self.file,))
            return FileBlocks(places, self.block_format, columns, self.format.dequantize, row_bytes, files)
        values = self.format.dequantize(self.read_blocks())
        if self.factors is not None:
            factors = self.factors.read().float32().reshape(-1, 1)
            values = (values.reshape(len(factors), -1) * factors).reshape(-1)
        strides = [n * values.itemsize for n in self.strides]
        return HostTensor(np.lib.stride_tricks.as_strided(values, self.shape, strides), "float32")


@dataclass(frozen=True)
class GGUFFile:
    """The content of a GGUF file, which stays open as long as one of the tensors exists."""

    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Return the metadata and the tensors of a GGUF file, of all its parts if it is one of several.

    The parts are those of llama-gguf-split: NAME-00001-of-00003.gguf and so on, the metadata in the first of them.

    Raises:
        NanoinferError: a file is missing, is not a valid GGUF file of version 2 or 3, or has tensors of an unsupported
            format; or the parts are not those of one model.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if isinstance(count, int) and count in (0, 1):  # not an array, which is compared value by value
        return first
    if type(count) is not int or not 1 < count <= MAX_PARTS:
        raise NanoinferError(f"{escaped(path)}: split.count={show(count)} is not a number from 2 to {MAX_PARTS}")
    name = PART.search(path.name)
    if name is None or int(name[2]) != count:
        raise NanoinferError(
            f"{escaped(path)} is one of {count} parts, which are found by their names: name them as they were"
            f" downloaded, NAME-00001-of-{count:05d}.gguf"
        )
    stem, suffix = path.name[: name.start()], path.name[-5:]
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}{suffix}") for i in range(1, count + 1)]
    parts = [_read_file(path) for path in paths]
    tensors: dict[str, StoredTensor] = {}
    for i, (file, part) in enumerate(zip(paths, parts, strict=True)):
        for key, expected in (("split.no", i), ("split.count", count)):
            if type(value := part.metadata.get(key)) is not int or value != expected:
                raise NanoinferError(f"{escaped(file)}: {key}={show(value)}, but by its name it is {expected}")
        if twice := tensors.keys() & part.tensors.keys():
            raise NanoinferError(f"{escaped(file)}: tensor {show(min(twice))} is in another part too")
        tensors |= part.tensors
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if type(total) is not int or total != len(tensors):
        where = escaped(paths[0])
        raise NanoinferError(f"{where}: split.tensors.count={show(total)}, but its parts have {len(tensors)}")
    return GGUFFile(parts[0].metadata, tensors)


def _read_file(path: Path) -> GGUFFile:
    """Return the metadata and the tensors of one file."""
    file = RegularFile(path, "GGUF")
    header = _Header(file)
    _check_version(header)
    num_tensors = header.count("tensors", 24, MAX_TENSORS)
    num_entries = header.count("metadata entries", 13, MAX_ENTRIES)
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = header.name("a metadata key")
        if key in metadata:
            raise header.error(f"the key {show(key)} is duplicated")
        metadata[key] = _value(header, key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise header.error(f"general.alignment={show(alignment)} is not a power of two in [1, {MAX_ALIGNMENT}]")
    entries = dict(_tensor_entries(header, num_tensors))
    data = -(-header.position // alignment) * alignment
    places: list[tuple[int, int, str]] = []
    tensors = {}
    for name, (shape, kind, offset) in entries.items():
        tensors[name], num_bytes = _tensor(header, name, shape, kind, data + offset)
        if offset % alignment:
            raise header.error(f"tensor {show(name)} has offset {offset}, which is not a multiple of {alignment}")
        places.append((data + offset, data + offset + num_bytes, name))
    end, before = data, "the header"
    for start, stop, name in sorted(places):
        if start < end:
            raise header.error(f"tensor {show(name)} overlaps {show(before)}")
        end, before = stop, name
    return GGUFFile(metadata, tensors)


class _Header:
    """The beginning of a file, read in order and in chunks, up to MAX_HEADER_BYTES."""

    def __init__(self, file: RegularFile) -> None:
        self.file, self.position = file, 0
        self._buffer, self._start = b"", 0  # bytes of the file from _start on
        self._end = min(file.size, MAX_HEADER_BYTES)
        self._num_strings = 0  # in arrays

    @property
    def remaining(self) -> int:
        """Number of bytes that have not been read."""
        return self._end - self.position

    def error(self, what: str) -> NanoinferError:
        """Return an error about this file."""
        return NanoinferError(f"{escaped(self.file.path)} is not a valid GGUF file: {what}")

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes."""
        if num_bytes > self.remaining:
            if self._end < self.file.size:
                raise self.error(f"{what} is beyond the first {MAX_HEADER_BYTES} bytes, the limit of the header")
            raise self.error(f"{what} at byte {self.position} has {num_bytes} bytes, but the file has {self.file.size}")
        at = self.position - self._start
        if at + num_bytes > len(self._buffer):
            self._start, at = self.position, 0
            self._buffer = self.file.read(self.position, min(self.remaining, max(num_bytes, _CHUNK)))
        self.position += num_bytes
        return self._buffer[at : at + num_bytes]

    def integer(self, num_bytes: int, what: str) -> int:
        """Return the next unsigned integer."""
        return int.from_bytes(self.take(num_bytes, what), "little")

    def count(self, what: str, min_bytes: int, limit: int = MAX_HEADER_BYTES) -> int:
        """Return a number of things of at least `min_bytes` bytes each, which must fit into the rest of the file."""
        number = self.integer(8, f"the number of {what}")
        if number > limit:
            raise self.error(f"it claims to have {number} {what}; the limit is {limit}")
        if number > self.remaining // min_bytes:
            raise self.error(f"it claims to have {number} {what}, which do not fit into its {self.file.size} bytes")
        return number

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        """Return the next string: its length, and UTF-8."""
        length = self.integer(8, f"the length of {what}")
        if length > limit:
            raise self.error(f"{what} has {length} bytes; the limit is {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as e:
            raise self.error(f"{what} is not UTF-8 (byte {e.start}: {e.reason})") from None

    def strings(self, count: int, key: str) -> list[str]:
        """Return the strings of an array, after comparing the number of strings in all arrays with MAX_STRINGS."""
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            total = f"{self._num_strings} in total; the limit is {MAX_STRINGS}"
            raise self.error(f"it claims to have {count} strings in {show(key)}, {total}")
        texts: list[str] = []
        while len(texts) < count:
            texts.append(self.string(f"the value of {show(key)}"))  # and the chunk of the file that follows
            buffer, at = self._buffer, self.position - self._start
            while len(texts) < count and (start := at + 8) <= len(buffer):
                end = start + _LENGTH.unpack_from(buffer, at)[0]
                try:
                    if end > len(buffer):
                        break
                    texts.append(buffer[start:end].decode())
                except UnicodeDecodeError:  # `string` raises the error
                    break
                at = end
            self.position = self._start + at
        return texts

    def name(self, what: str) -> str:
        """Return the next string if it is short enough to be a name."""
        return self.string(what, MAX_KEY_BYTES)


def _check_version(header: _Header) -> None:
    if header.take(4, "the magic number") != MAGIC:
        raise header.error("it does not begin with GGUF")
    version = header.integer(4, "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise header.error(f"it is big-endian (version {swapped}): convert it to little-endian")
        raise header.error(f"its version is {version}, but only 2 and 3 are supported: convert the model again")


def _value(header: _Header, key: str) -> Value:
    """Return the value of a metadata key."""
    what = f"the value of {show(key)}"
    kind = header.integer(4, f"the type of {show(key)}")
    if kind == _STRING:
        return header.string(what)
    if kind != _ARRAY:
        scalar = _numbers(header, kind, 1, what)[0]
        plain: int | float | bool = scalar.item()
        return float(str(scalar)) if scalar.dtype == np.float32 else plain  # 1e-05, not 9.999999747378752e-06
    kind = header.integer(4, f"the type of {show(key)}")
    if kind == _ARRAY:
        raise header.error(f"{what} is an array of arrays, which is not supported")
    if kind == _STRING:
        return header.strings(header.count(f"strings in {show(key)}", 8), key)
    if kind not in _NUMBERS:
        raise header.error(f"{what} has the unknown type {kind}")
    return _numbers(header, kind, header.count(f"numbers in {show(key)}", np.dtype(_NUMBERS[kind]).itemsize), what)


def _numbers(header: _Header, kind: int, count: int, what: str) -> NDArray[np.generic]:
    if kind not in _NUMBERS:
        raise header.error(f"{what} has the unknown type {kind}")
    dtype = np.dtype(_NUMBERS[kind])
    values = np.frombuffer(header.take(count * dtype.itemsize, what), dtype)
    if kind != _BOOL:
        return values
    if (values > 1).any():
        raise header.error(f"{what} is a bool, but is neither 0 nor 1")
    return values.astype(bool)


def _tensor_entries(header: _Header, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
    """Yield the name, and the shape, type and offset of each tensor."""
    names: set[str] = set()
    for _ in range(count):
        name = header.name("a tensor's name")
        if name in names:
            raise header.error(f"the tensor {show(name)} is duplicated")
        names.add(name)
        dimensions = header.integer(4, f"the dimensions of {show(name)}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise header.error(f"tensor {show(name)} has {dimensions} dimensions, but must have 1 to {MAX_DIMENSIONS}")
        sizes = [header.integer(8, f"the shape of {show(name)}") for _ in range(dimensions)]
        kind, offset = header.integer(4, f"the type of {show(name)}"), header.integer(8, f"the offset of {show(name)}")
        yield name, (tuple(reversed(sizes)), kind, offset)  # the file has the innermost dimension first


def _tensor(header: _Header, name: str, shape: tuple[int, ...], kind: int, start: int) -> tuple[StoredTensor, int]:
    """Return a tensor and its number of bytes, after comparing its place with the file's size."""
    if (format := FORMATS.get(kind)) is None:
        supported = ", ".join(BY_NAME)
        raise NanoinferError(
            f"{escaped(header.file.path)}: tensor {show(name)} has the format {UNSUPPORTED.get(kind, kind)}, which is"
            f" not supported: use one of {supported}"
        )
    if not all(0 < n < 2**63 for n in shape) or shape[-1] % format.block_size:
        raise header.error(
            f"tensor {show(name)} is {list(shape)}, but its sizes must be positive, and the last one a multiple of"
            f" {format.block_size} ({format.name})"
        )
    num_bytes = math.prod(shape) // format.block_size * format.block_bytes
    if start + num_bytes > header.file.size:
        raise header.error(
            f"tensor {show(name)} ends at byte {start + num_bytes}, but the file has {header.file.size} bytes: download"
            " it again"
        )
    if dtype := _DTYPES.get(format.name):
        return StoredTensor(header.file, start, dtype, shape, contiguous(shape)), num_bytes
    return BlockTensor(header.file, start, "float32", shape, contiguous(shape), format), num_bytes
