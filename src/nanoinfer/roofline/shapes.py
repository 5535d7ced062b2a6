"""Find the config of a model by name without reading its weights.

A preset (gpt2-xl) and random:<preset> need no file. A built-in model and a folder need their config.json, and
wide:<model>:<preset> needs the config of its model. A nanoGPT checkpoint and a GGUF file are opened, because they
contain the config; tensors are not read. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from nanoinfer.checkpoints import huggingface, nanogpt, packages, packed
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.load import BUILTIN, builtin_names, is_gguf, split_wide
from nanoinfer.checkpoints.transforms import widened
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.formats import WeightFormat, mixed
from nanoinfer.utils.checks import show


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
        if (checkpoint := nanogpt.find_nanochat(path)) is not None:
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
    return packages.find(name) if name in packages.PACKAGES else None
