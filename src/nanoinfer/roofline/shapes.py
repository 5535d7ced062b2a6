"""Find the config of a model by name without reading its weights.

A preset (gpt2-xl) and random:<preset> need no file. A built-in model and a folder need their config.json, and
wide:<model>:<preset> needs the config of its model. A nanoGPT checkpoint is opened, because it contains the config;
tensors are not read. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import hf_config, nanogpt
from nanoinfer.models.checkpoints.load import BUILTIN, builtin_names, split_wide
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.widen import widened


def find_shape(name: str) -> ModelConfig:
    """Return the config of a model.

    Args:
        name: a built-in model, a preset, random:<preset>, wide:<model>:<preset>, a folder with a config.json, or a
            ckpt.pt.

    Raises:
        NanoinferError: the model does not exist, or its config is malformed.
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
        f"model {name!r} is unknown: use one of {', '.join([*PRESETS, *builtin_names()])}, or an existing folder or"
        " ckpt.pt (for a model on the Hub, a folder with its config.json is enough)"
    )
