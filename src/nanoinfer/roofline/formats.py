"""Weight formats: bytes of a matrix, of a vector, and of a value in the KV cache (docs/inference-math.md, part 3).

int8 is a format of engine `native`, which computes with those of GGUF files as they are. int4 is the format of
`triton`, and of matrices with odd widths in `native`, whose int4 is otherwise a mix (`int4`). They include the output
head; a GGUF file has a format for each matrix (`mixed`). Biases and layer norms, a thousandth of the model, are then
stored in float32. The KV cache has 1 byte per value and a 32-bit scale per token, head, and key or value with
int8 and int4, and 2 bytes per value with the formats of GGUF files.

`find_model` finds the shape and the format of a model without reading its weights. A preset (gpt2-xl) and
random:<preset> need no file. A built-in model and a folder need their config.json, and wide:<model>:<preset> needs the
config of its model. A nanoGPT checkpoint and a GGUF file are opened, because they contain the config. Nothing is
downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nanoinfer.checkpoints import hub, huggingface, nanogpt, packed
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.gguf.formats import FORMATS as GGUF_FORMATS
from nanoinfer.checkpoints.gguf.formats import Format
from nanoinfer.checkpoints.load import BUILTIN, builtin_names, find_nanochat, is_gguf, split_wide
from nanoinfer.checkpoints.transforms import widened
from nanoinfer.checkpoints.weights import Weights, int4_formats
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, show
from nanoinfer.models.parameters import shapes
from nanoinfer.models.presets import PRESETS
from nanoinfer.utils.arrays import BlockFormats, format_names


@dataclass(frozen=True)
class WeightFormat:
    """A storage format of weights."""

    name: str
    bits: int
    """Bits of one weight in a matrix, without its scale."""
    vector_bytes: int
    """Bytes of a value that is not a matrix weight: bias, layer norm, activation."""
    group_size: int | None = None
    """Weights of a row that share a scale; 0: the whole row; None: no scales."""
    group_bytes: int = 0
    """Bytes of a group's scale and, if it has one, its zero point."""
    cache_bytes: int | None = None
    """Bytes of a value in the KV cache; None: vector_bytes."""
    cache_scale_bytes: int = 0
    """Bytes of the scale of one head's key, or value, of one token."""
    parts: tuple[tuple[WeightFormat, int], ...] = ()
    """The formats of a matrix whose rows are stored in several, and the number of rows in each."""
    matrices: Mapping[str, WeightFormat] = field(default_factory=dict, hash=False)
    """Formats of the matrices that have another one, by the names of `parameters.shapes`."""

    def of(self, name: str) -> WeightFormat:
        """Return the format of a matrix."""
        return self.matrices.get(name, self)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight matrix, (rows, columns) = (outputs, inputs), scales included.

        FORMATS["int4"].matrix_bytes(1, 128)  ->  70   (64 bytes of weights, 2 groups of 3 bytes)
        """
        if self.parts:
            return sum(part.matrix_bytes(count, columns) for part, count in self.parts)
        data = rows * -(-columns * self.bits // 8)
        if self.group_size is None:
            return data
        groups = -(-columns // (self.group_size or columns))
        return data + rows * groups * self.group_bytes

    @property
    def is_float(self) -> bool:
        """Whether the weights are stored in a floating-point dtype, without scales."""
        return self.group_size is None


def _quantized(name: str, bits: int, group_size: int, group_bytes: int) -> WeightFormat:
    """Return a quantization of engine `native`, whose KV cache is then int8."""
    return WeightFormat(name, bits, 4, group_size, group_bytes, cache_bytes=1, cache_scale_bytes=4)


def _blocks(format: Format) -> WeightFormat:
    """Return a format of GGUF files, with a KV cache in bfloat16.

    The first digit of its name is the number of bits: Q4_K, IQ4_NL, MXFP4.
    """
    bits = int(next(c for c in format.name if c.isdigit()))
    group_bytes = format.block_bytes - format.block_size * bits // 8
    return WeightFormat(format.name, bits, 4, format.block_size, group_bytes, cache_bytes=2)


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("float32", 32, 4),
        WeightFormat("bfloat16", 16, 2),
        WeightFormat("float16", 16, 2),
        _quantized("int8", 8, 0, 4),
        _quantized("int4", 4, 64, 3),
        *(_blocks(f) for f in GGUF_FORMATS.values() if f.compute is not None),
    )
}


def mixed(config: ModelConfig, block_formats: Mapping[str, BlockFormats], dtype: str) -> WeightFormat | None:
    """Return the formats of a model whose matrices in blocks engine `native` takes as they are; None without any.

    Args:
        config: the model's shape.
        block_formats: matrices in blocks -> their formats (`Weights.block_formats`).
        dtype: format of the other matrices; with int4, also of the KV cache.
    """
    if not block_formats:
        return None
    names = [name for name, shape in shapes(config).items() if len(shape) == 2]
    matrices = {name: _joined(block_formats[name]) if name in block_formats else FORMATS[dtype] for name in names}
    if not FORMATS[dtype].is_float:  # int4, whose KV cache remains
        return replace(FORMATS[dtype], matrices=matrices)
    kinds = [name.upper() for name in format_names(block_formats)]
    return replace(FORMATS[kinds[0]], name=" + ".join(kinds), matrices=matrices)


def int4(config: ModelConfig) -> WeightFormat:
    """Return the formats of a model with quantization="int4" on engine `native`."""
    return mixed(config, int4_formats(config), "int4") or FORMATS["int4"]


def _joined(formats: BlockFormats) -> WeightFormat:
    """Return the format of a matrix."""
    parts = tuple((FORMATS[name.upper()], rows) for name, rows in formats)
    first = parts[0][0]
    return first if len(parts) == 1 else replace(first, name=" + ".join(f.name for f, _ in parts), parts=parts)


def find_shape(name: str) -> ModelConfig:
    """Return the config of a model. Args and Raises: as `find_model`."""
    return find_model(name)[0]


def find_model(name: str) -> tuple[ModelConfig, WeightFormat | None]:
    """Return the config of a model, and its format in engine `native` if it has matrices in blocks.

    Those are GGUF files and quantized folders.

    Args:
        name: a built-in model, a preset, random:<preset>, wide:<model>:<preset>, a folder with a config.json, a
            ckpt.pt, or a GGUF file.

    Raises:
        NanoinferError: the model does not exist, or its config is malformed.
    """
    if name.startswith("wide:"):
        source, preset_shape = split_wide(name)
        try:
            return widened(find_shape(source), n_embd=preset_shape.n_embd, n_layer=preset_shape.n_layer), None
        except NanoinferError as e:
            raise NanoinferError(f"model {name!r}: {e}") from None
    if name in builtin_names():
        return huggingface.read_config(BUILTIN / name / "config.json"), None
    preset = name.removeprefix("random:")
    if preset in PRESETS:
        return PRESETS[preset], None
    if preset == name and (path := _path(name)) is not None:
        if is_gguf(path):
            return _stored(gguf.open_file(path)[0])
        if (checkpoint := find_nanochat(path)) is not None:
            return nanogpt.open_nanochat(checkpoint).config, None
        if path.is_file():
            return nanogpt.open_checkpoint(path)[0].config, None
        quantized = path.is_dir() and not packed.is_packed(path)  # packed weights are in a format of engine native
        if quantized and huggingface.quantization_of(path / "config.json") is not None:
            return _stored(huggingface.open_folder(path))
        if path.is_dir():
            return huggingface.read_config(path / "config.json"), None
    raise NanoinferError(
        f"model {show(name)} is unknown: use one of {', '.join([*PRESETS, *builtin_names()])}, or an existing folder,"
        " ckpt.pt or GGUF file (for a model on the Hub, a folder with its config.json is enough)"
    )


def _stored(weights: Weights) -> tuple[ModelConfig, WeightFormat | None]:
    return weights.config, mixed(weights.config, weights.block_formats, weights.stored_dtype)


def _path(name: str) -> Path | None:
    """Return the path for a name; None if it does not exist or cannot be one."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        path = Path(name).expanduser()
        if path.exists():
            return path
    return hub.find_packaged(name) if name in hub.PACKAGES else None
