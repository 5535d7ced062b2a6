"""Folders of packed weights, which engine `native` maps into memory and uses in place.

`write_folder` writes config.json, tokenizer.json and packed.safetensors, and packed.mtp.safetensors for a block that
predicts a further token; docs/packed.md describes the format. Panels (kernels/cpu/kernels/format.h) do not depend on
the instruction set. Processes that map the same file share its pages.

A mapped file must not be truncated while it is in use: access to a missing page ends the process with SIGBUS. Replacing
it by another file of the same name (rename) is safe, because the mapping keeps the old file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.weights import POSITIONS, Weights, has_format, mtp_config, part_name, parts
from nanoinfer.config import DTYPES, EngineConfig, ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped, reason, show
from nanoinfer.models.parameters import LAYER, SHARED, shapes
from nanoinfer.models.stored import StoredTensor, make_header, read_with_metadata
from nanoinfer.utils.arrays import BlockFormats, BlockMatrix
from nanoinfer.utils.files import parse_json, replacing, write_atomically

FILE, MTP_FILE = "packed.safetensors", "packed.mtp.safetensors"
FORMAT, VERSION, BYTE_ORDER = "nanoinfer-packed", "1", "little"
BLOCKS_VERSION = "2"
"""The version of a file with matrices in formats of GGUF files, which are in its metadata."""
QUANTIZATIONS = ("int8", "int4")
FORMATS = (*DTYPES, *QUANTIZATIONS)
"""Formats of all matrices, or of those without a format of GGUF files."""
MAX_PARTS = 3  # of a matrix: queries, keys and values
_PAGE = 4096  # the data begins at a multiple of it
_ALIGNMENT = 64  # of panels, for the kernels


class Piece(NamedTuple):
    """An array of the file."""

    dtype: str
    """uint8: panels of a matrix; float32: scales of an int8 matrix, or a vector."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * (1 if self.dtype == "uint8" else 4)


@dataclass(frozen=True)
class PackedWeights(Weights):
    """Weights in a format of engine `native`, in a mapped file. `read` raises an error: the values are not stored."""

    format: str
    """One of FORMATS."""
    folder: str
    """For error messages."""
    arrays: Mapping[str, NDArray[Any]]
    """The pieces of the file by name, read-only. Each of them keeps the file mapped."""

    @property
    def quantization(self) -> str | None:
        """The format if it is a quantization, else None."""
        return self.format if self.format in QUANTIZATIONS else None

    def formats(self, quantization: str | None) -> Mapping[str, BlockFormats]:
        """Return the formats of the file."""
        return self.block_formats

    def shortened(self, max_model_len: int | None) -> PackedWeights:
        """Return the same weights with a shorter context length; see `Weights.shortened`."""
        weights = super().shortened(max_model_len)
        assert isinstance(weights, PackedWeights)
        arrays = dict(self.arrays)
        if POSITIONS in arrays:
            arrays[POSITIONS] = arrays[POSITIONS][: weights.config.block_size]
        return replace(weights, arrays=arrays)

    def matrices(self) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.float32]]]:
        """Yield the name, panels and scales of each matrix of `config`, or of each of its parts."""
        for name in pieces(self.config, self.format, self.block_formats):
            if (panels := self.arrays[name]).dtype == np.uint8:
                yield name, panels, self.arrays.get(_scales_of(name), np.empty(0, np.float32))

    def vectors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the name and values of each bias, each parameter of a layer norm, and the position embeddings."""
        for name in pieces(self.config, self.format, self.block_formats):
            if (values := self.arrays[name]).dtype == np.float32 and not name.endswith(".scales"):
                yield name, values


def pieces(config: ModelConfig, format: str, block_formats: Mapping[str, BlockFormats]) -> dict[str, Piece]:
    """Return the pieces of a file: panels first, which are aligned because their sizes are multiples of 64 bytes.

    Args:
        config: the model's shape; a block that predicts a further token has no tensors of SHARED.
        format: of the matrices that `block_formats` does not have.
        block_formats: as `Weights.block_formats`.

    Raises:
        NanoinferError: the native extension is missing, or a matrix is too large for it.
    """
    packed_size = extension().packed_size
    panels, rest = {}, {}
    for name, shape in shapes(replace(config, bias=True)).items():
        if config.mtp and name in SHARED:
            continue
        if not has_format(name, shape):
            rest[name] = Piece("float32", shape)
            continue
        for i, (part_format, rows) in enumerate(block_formats.get(name, ((format, shape[0]),))):
            try:
                num_bytes, num_scales = packed_size(format=part_format, rows=rows, columns=shape[1])
            except (ValueError, TypeError) as e:
                raise NanoinferError(f"tensor {name}: {reason(e)}") from None
            panels[part_name(name, i)] = Piece("uint8", (num_bytes,))
            if num_scales:
                rest[_scales_of(name)] = Piece("float32", (num_scales,))
    return panels | rest


def _dtype(format: str) -> str:
    """Return the dtype of the model: float32 if the weights are quantized."""
    return format if format in DTYPES else "float32"


def _scales_of(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scales"


def extension(needs: str = "packed weights need", remedy: str = "give the original model") -> Any:
    """Return the compiled module. Raises NanoinferError if nanoinfer was built without it, or for other machines."""
    if sys.byteorder != BYTE_ORDER:
        raise NanoinferError(f"{needs} a {BYTE_ORDER}-endian machine, and this one is {sys.byteorder}-endian")
    try:
        from nanoinfer import _native
    except ImportError:
        raise NanoinferError(
            f"{needs} engine native, but nanoinfer was built without it: install a C++ compiler and reinstall"
            f" nanoinfer, or {remedy}"
        ) from None
    return _native


# Read ------------------------------------------------------------------------------------------------------


def is_packed(folder: Path) -> bool:
    """Return whether a folder contains packed weights."""
    return os.path.isfile(folder / FILE)


def folder_of(path: Path) -> Path:
    """Return the folder of a packed.safetensors; any other path is returned unchanged."""
    return path.parent if path.name == FILE else path


def open_folder(folder: Path) -> PackedWeights:
    """Map the packed weights in a folder.

    Raises:
        NanoinferError: a file is missing or malformed, is of another version, or differs from the config.
    """
    config = huggingface.read_config(folder / "config.json")
    weights, block = _open_file(folder / FILE, config), folder / MTP_FILE
    return replace(weights, mtp=(lambda _: _open_file(block, mtp_config(config))) if block.is_file() else None)


def _open_file(path: Path, config: ModelConfig) -> PackedWeights:
    (stored, metadata), where, folder = _read_header(path), escaped(path), path.parent
    format = metadata["weights"]
    layers = {int(m[1]) for name in stored if (m := LAYER.match(name))}
    if len(layers) != config.n_layer:  # before anything of the config's size is made
        raise NanoinferError(f"{where}: n_layer={config.n_layer}, but the file has {len(layers)} layers")
    if (size := metadata.get("vocab_size")) != str(config.vocab_size):  # panels are padded to multiples of 32 outputs
        raise NanoinferError(f"{where}: vocab_size={config.vocab_size}, but the file has {show(size)}")
    block_formats = _read_formats(metadata, config, where)
    with about(where):
        expected = pieces(config, format, block_formats)
    for name, piece in expected.items():
        if (tensor := stored.get(name)) is None:
            raise NanoinferError(f"{where}: {name} is missing")
        if (tensor.dtype, tensor.shape) != piece:
            have = f"{escaped(tensor.dtype, 40)} {list(tensor.shape)}"
            raise NanoinferError(
                f"{where}: {name} is {have}, but the config requires {piece.dtype} {list(piece.shape)}"
            )
        if tensor.start % (_ALIGNMENT if piece.dtype == "uint8" else 4):
            raise NanoinferError(f"{where}: {name} is at byte {tensor.start}, not at a multiple of {_ALIGNMENT}")
    if extra := sorted(stored.keys() - expected.keys()):
        raise NanoinferError(f"{where}: {len(extra)} pieces are not part of the model: {show(extra[0])}")
    content = next(iter(stored.values())).file.map()
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a hint: large pages where the file system has them. docs/packed.md has the effect
            content.madvise(mmap.MADV_HUGEPAGE)
    arrays = {
        name: np.frombuffer(content, piece.dtype, math.prod(piece.shape), stored[name].start).reshape(piece.shape)
        for name, piece in expected.items()
    }

    def refuse() -> Iterator[Any]:
        raise NanoinferError(
            f"{escaped(folder)} is packed as {format} for engine native and has no other form of its weights: give the"
            " original model"
        )

    return PackedWeights(config, _dtype(format), refuse, format, escaped(folder), arrays, block_formats=block_formats)


def _read_formats(metadata: dict[str, str], config: ModelConfig, where: str) -> dict[str, BlockFormats]:
    """Return the formats of matrices in blocks, {} in a file of version 1."""
    listed: Any = {}
    if metadata["version"] != VERSION:
        listed = parse_json(str(metadata.get("formats", "")), f"{where}: formats cannot be read")
    sizes = {name: shape[0] for name, shape in shapes(config).items() if has_format(name, shape)}
    formats: dict[str, BlockFormats] = {}
    for name, value in listed.items() if isinstance(listed, dict) else [("formats", listed)]:
        entries: list[Any] = value if isinstance(value, list) and 1 <= len(value) <= MAX_PARTS else [None]
        if name not in sizes or not all(map(_is_part, entries)) or sum(rows for _, rows in entries) != sizes[name]:
            raise NanoinferError(
                f"{where}: formats of {show(name)} are {show(value)}: they must be formats of GGUF files and numbers of"
                " rows, those of a matrix: pack the original model again"
            )
        formats[name] = tuple((format, rows) for format, rows in entries)
    if metadata["weights"] == "int4" and (missing := sorted(sizes.keys() - formats.keys())):
        raise NanoinferError(f"{where}: {missing[0]} is in int4 without blocks: pack the original model again")
    return formats


def _is_part(entry: Any) -> bool:
    """Return whether an entry of the formats is a format and a number of rows."""
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    from nanoinfer.checkpoints.gguf.formats import FORMATS

    native = (format.name.lower() for format in FORMATS.values() if format.native)
    return isinstance(entry[0], str) and entry[0] in native and type(entry[1]) is int and entry[1] > 0


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the pieces of a file and its checked metadata."""
    (stored, metadata), where = read_with_metadata(path), escaped(path)
    if metadata.get("format") != FORMAT:
        raise NanoinferError(f"{where} is not a file of packed weights: its format is {show(metadata.get('format'))}")
    for name, known in (("version", (VERSION, BLOCKS_VERSION)), ("byte_order", (BYTE_ORDER,)), ("weights", FORMATS)):
        if (value := metadata.get(name)) not in known:
            raise NanoinferError(
                f"{where}: {name}={show(value)} is not supported: this version of nanoinfer reads"
                f" {' or '.join(known)}: pack the original model again"
            )
    return stored, metadata


def fit_engine(folder: Path, options: EngineConfig) -> EngineConfig:
    """Return the options of the engine for a packed folder, which determines the engine, the format and the device.

    Raises:
        NanoinferError: an option requests something else.
    """
    metadata = _read_header(folder / FILE)[1]
    format, blocks = metadata["weights"], metadata["version"] == BLOCKS_VERSION
    quantized = format in QUANTIZATIONS
    fixed = {"engine": "native", "device": "cpu", "quantization": format if quantized else None}
    if not quantized:
        fixed["dtype"] = "auto" if blocks else format
    what = "blocks of a GGUF file" if blocks and not quantized else format
    for name, value in fixed.items():
        if (asked := getattr(options, name)) not in (value, "auto", None):
            raise NanoinferError(
                f"{escaped(folder)} is packed as {what} for engine native:"
                f" {name}={show(asked)} needs the original model"
            )
    return replace(options, **fixed)  # type: ignore[arg-type]  # fields of EngineConfig


# Write -----------------------------------------------------------------------------------------------------


def write_folder(
    weights: Weights, folder: Path, format: str, tokenizer_json: str | None, threads: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:  # fmt: skip
    """Pack weights and write them, the config and the tokenizer to a folder, which is then a model for engine native.

    If it fails or is interrupted, nothing is left of it.

    Args:
        weights: in any dtype; tensors are packed one at a time. Matrices with `block_formats` keep them.
        folder: created if it does not exist; must be empty.
        format: one of FORMATS, of the other matrices.
        tokenizer_json: content of tokenizer.json, if there is one.
        threads: that pack.
        progress: called with the bytes that are written, and their total.

    Returns:
        The size of packed.safetensors in bytes, with that of a block's file.

    Raises:
        NanoinferError: the folder contains files or cannot be written.
    """
    if weights.config.backbone is not None:
        raise NanoinferError("an assistant cannot be packed: use its folder as draft")
    if format in QUANTIZATIONS:
        weights = replace(weights, block_formats=Weights.formats(weights, format))
    files = [(FILE, weights, pieces(weights.config, format, weights.block_formats), format)]
    if weights.mtp is not None:
        block, of_block = weights.mtp(True), format if format in QUANTIZATIONS else "int8"
        if format in QUANTIZATIONS or not block.block_formats:
            block = replace(block, block_formats=Weights.formats(block, of_block))
        files.append((MTP_FILE, block, pieces(block.config, of_block, block.block_formats), of_block))
    config = json.dumps(huggingface.config_to_dict(weights.config, _dtype(format)), indent=2)
    small = {"config.json": config.encode() + b"\n"}
    if tokenizer_json is not None:
        small["tokenizer.json"] = tokenizer_json.encode()
    try:
        if folder.exists() and next(folder.iterdir(), None) is not None:
            raise NanoinferError(f"{escaped(folder)} contains files: choose an empty or a new folder")
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                num_bytes = 0
                for name, packed, layout, of_file in files:
                    file = stack.enter_context(replacing(folder / name))
                    _write_pieces(file, packed, layout, of_file, threads, progress)
                    num_bytes += file.seek(0, os.SEEK_END)
                for name, content in small.items():
                    write_atomically(folder / name, content)
        except BaseException:  # Ctrl-C too
            with suppress(OSError):
                for name in small:
                    (folder / name).unlink(missing_ok=True)
                for path in created:
                    path.rmdir()
            raise
    except OSError as e:
        raise NanoinferError(f"{escaped(folder)} cannot be written: {reason(e)}: choose another folder") from None
    return num_bytes


def _header(layout: dict[str, Piece], format: str, weights: Weights) -> tuple[bytes, dict[str, int]]:
    """Return the header, padded so that the data begins at a page, and the offset of each piece in the file."""
    metadata = {"format": FORMAT, "version": VERSION, "byte_order": BYTE_ORDER, "weights": format}
    metadata["vocab_size"] = str(weights.config.vocab_size)
    if weights.block_formats:
        metadata |= {"version": BLOCKS_VERSION, "formats": json.dumps(dict(weights.block_formats))}
    kinds = {"uint8": "U8", "float32": "F32"}
    entries = {name: (kinds[piece.dtype], piece.shape, piece.num_bytes) for name, piece in layout.items()}
    header = make_header(entries, metadata, _PAGE)
    ends = accumulate((piece.num_bytes for piece in layout.values()), initial=len(header))
    return header, dict(zip(layout, ends, strict=False))


def _write_pieces(
    file: BinaryIO, weights: Weights, layout: dict[str, Piece], format: str, threads: int,
    progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    native = extension()
    header, starts = _header(layout, format, weights)
    total = sum(piece.num_bytes for piece in layout.values())
    file.write(header)
    done, missing = 0, set(layout)

    def put(name: str, array: NDArray[Any]) -> None:
        nonlocal done
        file.seek(starts[name])
        file.write(np.ascontiguousarray(array).data)
        missing.remove(name)
        done += array.nbytes
        progress(done, total)

    for name, tensor in weights.read():
        if layout[name].dtype == "float32":
            put(name, tensor.float32())
            continue
        formats = weights.block_formats.get(name)
        for i, (place, part) in enumerate(parts(name, tensor, formats)):
            wanted_format = formats[i][0] if formats else format
            if isinstance(part, BlockMatrix):
                panels, scales = native.pack_blocks(blocks=part.blocks(), format=wanted_format, threads=threads)
            else:
                panels, scales = native.pack(
                    values=part.values, dtype=part.dtype, format=wanted_format, threads=threads
                )
            put(place, panels)
            if scales.size:
                put(_scales_of(name), scales)
    for name in sorted(missing):  # biases of a model without biases
        put(name, np.zeros(layout[name].shape, np.float32))
