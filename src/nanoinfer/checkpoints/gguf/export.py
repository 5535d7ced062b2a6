"""Write a model as a GGUF file: the inverse of model.py, whose tables give names of tensors, orders of rows and norms.

The header is written first, and model.py reads it back: a model that a GGUF file cannot describe is an error before any
tensor is quantized. Tensors are read, quantized and written one at a time, in chunks of rows. The quantizer is that of
`pack`: a folder packed from a file in Q4_K_M has the bytes of one packed in int4 from the model.

llama.cpp's quantizer makes other formats of the files.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.gguf.architectures import ARCHITECTURES, FREQUENCIES, describe, rotary_divisors
from nanoinfer.checkpoints.gguf.file import MAGIC, Value
from nanoinfer.checkpoints.gguf.formats import BY_NAME, FORMATS
from nanoinfer.checkpoints.gguf.tokenizer import TOOL_TEMPLATE, write_no_tokenizer, write_tokenizer
from nanoinfer.checkpoints.weights import Weights, int4_formats
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, escaped, reason, show
from nanoinfer.models.families.base import Family
from nanoinfer.models.parameters import shapes
from nanoinfer.utils import environment
from nanoinfer.utils.arrays import BlockFormats, HostTensor
from nanoinfer.utils.checks import require_choice
from nanoinfer.utils.files import replacing

if TYPE_CHECKING:
    from nanoinfer.checkpoints.load import LoadedModel

log = logging.getLogger("nanoinfer")

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_K_M": 15}
"""Formats of whole files -> general.file_type, by which llama.cpp names them."""
QUANTIZED = ("Q8_0", "Q4_K_M")
"""Those that the extension makes. Q4_K_M is a mix of Q4_K, Q6_K, Q5_0 and Q8_0 (weights.int4_formats)."""
WRITTEN = (
    "gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "smollm3", "phi",
    "granite", "stablelm", "cohere", "cohere2", "exaone4", "ernie4_5", "seed_oss", "arcee", "starcoder2", "ministral3",
    "nemotron", "jais2",
)  # fmt: skip
"""Families that are written, beside those that are one of these with a window."""
_NUMBERS = {format.name: number for number, format in FORMATS.items()}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ALIGNMENT = 32
_CHUNK = 1 << 22  # values that are converted at a time
_LARGEST = 65504  # of float16
_GELU = ("gelu", "gelu_new")


def check_target(path: Path, format: str, force: bool = False) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        NanoinferError: the format is unknown or needs the extension, or the file exists and `force` is false.
    """
    require_choice("format", format, tuple(FILE_TYPES))
    if format in QUANTIZED:
        _extension(format)
    if path.exists() and not force:
        raise NanoinferError(f"{escaped(path)} exists: choose another name, or replace it with --force")


def _extension(format: str) -> Any:
    return packed.extension(f"format={format} needs", "choose F16")


def describe_text(loaded: LoadedModel, with_tokenizer: bool = True) -> dict[str, Value]:
    """Return the metadata of a model's tokenizer and chat template.

    Raises:
        NanoinferError: a GGUF file cannot have the tokenizer.
    """
    metadata = write_no_tokenizer(loaded.config)
    if with_tokenizer and loaded.tokenizer is not None:
        metadata = write_tokenizer(loaded.tokenizer, loaded.config, loaded.special_tokens)
    templates = {"tokenizer.chat_template": loaded.chat_template, TOOL_TEMPLATE: loaded.tool_template}
    return metadata | {key: template for key, template in templates.items() if template is not None}


def write_file(
    weights: Weights, path: Path, format: str, text: Mapping[str, Value], name: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:  # fmt: skip
    """Write weights as a GGUF file, in the place of one of this name. If it fails or is interrupted, nothing is left.

    Args:
        weights: in any dtype.
        path: the file; its folder must exist.
        format: one of FILE_TYPES.
        text: the metadata that `describe_text` returns.
        name: of the model, for people.
        progress: called with the bytes of tensors that are written, and their total.

    Returns:
        The size of the file in bytes.

    Raises:
        NanoinferError: GGUF cannot express the model, or the file cannot be written.
    """
    arch = architecture(weights.config)
    layout, config = ARCHITECTURES[arch], _completed(weights.config, arch)
    family = gguf.stored_family(config, layout)
    tensors: dict[str, tuple[int, ...]] = {}
    formats: dict[str, str] = {}
    mix = int4_formats(config) if format == "Q4_K_M" else {}
    for ours, shape in shapes(config).items():
        recipe = family.recipe(config, ours, shape[0])
        rest = shape[1:] if recipe.folded == 1 else (math.prod(shape[1:]) * recipe.folded,)
        tensors |= {part: (rows, *rest) for part, rows in recipe.parts}
        wanted = _of_rows(mix.get(ours, ()), recipe.parts) if format == "Q4_K_M" else dict.fromkeys(tensors, format)
        formats |= {part: format_of(part, tensors[part], wanted[part]) for part, _ in recipe.parts}
    divisors = rotary_divisors(config)
    if divisors is not None:
        tensors, formats[FREQUENCIES] = {FREQUENCIES: divisors.shape} | tensors, "F32"
    metadata: dict[str, Value] = {"general.architecture": arch, "general.name": name}
    metadata |= {"general.file_type": FILE_TYPES[format], "general.quantization_version": 2}
    metadata |= {f"{arch}.{key}": value for key, value in describe(config, arch).items()}
    header, starts, size = _header(metadata | dict(text), tensors, formats)
    try:
        with replacing(path) as file:
            file.write(header)
            if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not at the end; macOS has no such call
                os.posix_fallocate(file.fileno(), 0, size)
            if divisors is not None:
                _write(file, starts[FREQUENCIES], HostTensor(divisors, "float32"), "F32")
            file.flush()
            _check_readable(Path(file.name), path, config, arch)
            done, total = 0, size - len(header)
            for part, tensor in _stored(weights, config, layout.added_to_norms, family):
                try:
                    _write(file, starts[part], tensor, formats[part])
                except ValueError as e:
                    raise NanoinferError(f"tensor {part} {e}: choose another format than {format}") from None
                done += file.tell() - starts[part]
                progress(done, total)
    except OSError as e:
        raise NanoinferError(f"{escaped(path)} cannot be written: {reason(e)}: choose another place") from None
    return size


def architecture(config: ModelConfig) -> str:
    """Return llama.cpp's name of the architecture."""
    shared = {"mistral": "llama", "olmo3": "olmo2"}  # known by a window
    family = shared.get(config.family, config.family)
    written = {arch: layout.family for arch, layout in ARCHITECTURES.items() if layout.family in WRITTEN}
    archs = [arch for arch, name in written.items() if name == family]
    if not archs:
        known = ", ".join(WRITTEN)
        raise NanoinferError(
            f"models of the family {config.family} cannot be written as GGUF: only {known}, {', '.join(shared)}"
        )
    return archs[0]


def _completed(config: ModelConfig, arch: str) -> ModelConfig:
    """Return the config of a model with all tensors that llama.cpp requires: biases and a head of its own."""
    if arch in ("gpt2", "gptneox"):
        config = dataclasses.replace(config, bias=True)
    return dataclasses.replace(config, tie_word_embeddings=False) if arch in ("gptneox", "olmo2") else config


def _of_rows(formats: BlockFormats, parts: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return the format of each part of a matrix, that of its last row; F16 if the matrix has none."""
    ends = [*accumulate(rows for _, rows in formats)]
    last = [*accumulate(rows for _, rows in parts)]
    return {
        part: formats[bisect_left(ends, end)][0].upper() if formats else "F16"
        for (part, _), end in zip(parts, last, strict=True)
    }


def format_of(name: str, shape: tuple[int, ...], format: str) -> str:
    """Return the format of a tensor in a file: matrices have that of the file if their rows are whole blocks."""
    if len(shape) == 1 or name.endswith(("position_embd.weight", "_norm.weight")):
        return "F32"
    return format if shape[-1] % BY_NAME[format].block_size == 0 else "F16"


def _header(
    metadata: Mapping[str, Value], tensors: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the file up to the first tensor, where each tensor begins, and the size of the file."""
    out = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    out += [_string(key) + _typed(value) for key, value in metadata.items()]
    offsets, end = {}, 0
    for name, shape in tensors.items():
        format, offsets[name] = BY_NAME[formats[name]], end
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out.append(_string(name) + dims + struct.pack("<IQ", _NUMBERS[format.name], end))
        end += math.prod(shape) // format.block_size * format.block_bytes
        end += -end % _ALIGNMENT
    header = b"".join(out)
    header += bytes(-len(header) % _ALIGNMENT)
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + end


def _string(text: str) -> bytes:
    raw = text.encode(errors="replace")  # the name of a file need not be UTF-8
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> bytes:
    """Return a value of the metadata with its type: integers as uint32, or int32 in arrays, and floats as float32."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    if isinstance(value, np.ndarray):
        kind, dtype = {"f": (6, "<f4"), "b": (7, "?")}.get(value.dtype.kind, (5, "<i4"))
        return struct.pack("<IIQ", 9, kind, len(value)) + value.astype(dtype).tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _check_readable(written: Path, path: Path, config: ModelConfig, arch: str) -> None:
    """Read the new file's header and compare the config with the model's.

    Raises:
        NanoinferError: the config that is read differs.
    """
    try:
        written_fields, expected = (comparable(c) for c in (gguf.open_file(written)[0].config, config))
    except NanoinferError as e:
        why = str(e).removeprefix(f"{escaped(written)}: ")
        raise NanoinferError(
            f"{escaped(path)}: the architecture {arch} of GGUF cannot express the model: {why}"
        ) from None
    if wrong := [name for name in expected if written_fields[name] != expected[name]]:
        value = show(getattr(config, wrong[0]))
        raise NanoinferError(f"{escaped(path)}: the architecture {arch} of GGUF cannot express {wrong[0]}={value}")


def comparable(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config that change the logits, with defaults filled in, and numbers rounded to float32."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(v) for name, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [rounded(v) for v in value]
        return float(np.float32(value)) if isinstance(value, float) else value

    fields = dataclasses.asdict(config) | {
        "n_inner": config.mlp_dim, "head_size": config.head_dim, "num_kv_heads": config.n_kv_head,
        "layers": [dataclasses.asdict(config.layer(i)) for i in range(config.n_layer)],
        "activation": "gelu" if config.activation in _GELU else config.activation,
    }  # fmt: skip
    return {name: rounded(v) for name, v in fields.items() if name not in ("family", "bos_token_id", "eos_token_ids")}


def _stored(weights: Weights, config: ModelConfig, added: float, family: Family) -> Iterator[tuple[str, HostTensor]]:
    """Yield the tensors of the file: first those of the model."""
    missing = shapes(config)
    for name, tensor in weights.read():
        del missing[name]
        for part, stored in family.recipe(config, name, tensor.shape[0]).stored(tensor.dense()):
            if added and part.endswith("norm.weight"):
                stored = HostTensor(stored.float32() + np.float32(added), "float32")
            yield part, stored
    for name, shape in missing.items():  # biases that the model lacks; a tied head
        tied = name == "lm_head.weight"
        tensor = next(weights.read())[1].dense() if tied else HostTensor(np.zeros(shape, np.float32), "float32")
        yield from family.recipe(config, name, shape[0]).stored(tensor)


def _write(file: BinaryIO, start: int, tensor: HostTensor, format: str) -> None:
    """Write a tensor in a format, some rows at a time. Raises ValueError if values are too large for the format."""
    values = tensor.values.reshape(len(tensor.values), -1)
    file.seek(start)
    for at in range(0, len(values), step := max(1, _CHUNK // values.shape[1])):
        part = HostTensor(values[at : at + step], tensor.dtype)
        if format not in ("F32", "BF16") and not (np.abs(part.float32()) <= _LARGEST).all():
            raise ValueError("has values that float16 cannot represent (above 65,504 or not finite)")
        if format in _DTYPES:
            blocks = np.ascontiguousarray(part.to(_DTYPES[format]).values)
        else:
            blocks = _extension(format).quantize(
                values=part.values, dtype=part.dtype, format=format.lower(), threads=environment.num_cpus()
            )
        file.write(blocks.data)
