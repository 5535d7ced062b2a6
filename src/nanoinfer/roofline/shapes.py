"""From a model's name to its shape, without its weights where that can be.

A preset (gpt2-xl) and random:<preset> need no file at all; a built-in model and a folder need their config.json,
wide:<model>:<preset> what its model needs. A nanoGPT checkpoint keeps its shape inside, beside the weights, so it is
loaded whole. Nothing is fetched from a network.
"""

from __future__ import annotations

from pathlib import Path

from nanoinfer.config import PRESETS, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import hf_config, nanogpt
from nanoinfer.models.checkpoints.load import BUILTIN, builtin_names, split_wide
from nanoinfer.models.widen import widened


def find_shape(name: str) -> ModelConfig:
    """Return the config of a model.

    Args:
        name: a built-in model, a preset, random:<preset>, wide:<model>:<preset>, a folder with a config.json, or a
            ckpt.pt.

    Raises:
        NanoinferError: no such model, or its config is broken.
    """
    if name.startswith("wide:"):
        source, preset_shape = split_wide(name)
        try:
            return widened(find_shape(source), n_embd=preset_shape.n_embd, n_layer=preset_shape.n_layer)
        except NanoinferError as e:
            raise NanoinferError(f"model {name!r}: {e}") from None
    if name in builtin_names():
        return hf_config.read(BUILTIN / name / "config.json")
    preset = name.removeprefix("random:")
    if preset in PRESETS:
        return PRESETS[preset]
    if preset == name:
        path = Path(name).expanduser()
        if path.is_file():
            return nanogpt.open_checkpoint(path)[0].config
        if path.is_dir():
            return hf_config.read(path / "config.json")
    raise NanoinferError(
        f"model {name!r} is unknown: use one of {', '.join([*PRESETS, *builtin_names()])}, or a folder or ckpt.pt"
        " that exists (for a model on the Hub, a folder with its config.json will do)"
    )
