"""Random LoRA adapters in the layout of peft, and their bases with the updates added to the weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.checkpoints.adapters import TARGETS, Adapter, read_adapter
from nanoinfer.config import ModelConfig
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.base import split_name
from nanoinfer.models.parameters import shapes
from nanoinfer.models.stored import to_safetensors
from nanoinfer.utils.arrays import HostTensor

if TYPE_CHECKING:
    from nanoinfer.models.transformer import Transformer

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}


def write_adapter(
    folder: Path, config: ModelConfig, seed: int = 0, targets: tuple[str, ...] = TARGETS, **fields: Any
) -> Path:
    """Write an adapter of some modules of a base, with factors that change its tokens; return the folder."""
    generator, raw = np.random.default_rng(seed), CONFIG | fields
    tensors = {}
    for name, (out, *rest) in shapes(config).items():
        _, part, suffix = split_name(name)
        if part not in targets or suffix != ".weight":
            continue
        for theirs, rows in FAMILIES[config.family].recipe(config, name, out).parts:
            for letter, shape in (("A", (raw["r"], *rest)), ("B", (rows, raw["r"]))):
                values = generator.normal(0, 0.4, shape).astype(np.float32)
                key = f"base_model.model.{theirs.removesuffix('.weight')}.lora_{letter}.weight"
                tensors[key] = HostTensor(values, "float32")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    (folder / "adapter_model.safetensors").write_bytes(to_safetensors(tensors))
    return folder


def make_adapter(folder: Path, config: ModelConfig, seed: int = 0, **options: Any) -> Adapter:
    return read_adapter(write_adapter(folder, config, seed, **options), config, 64)


def merged(gpt: Transformer, adapter: Adapter) -> Transformer:
    """Return the base with the updates added to its weights."""
    import torch

    gpt = copy.deepcopy(gpt)
    for name in adapter.updates:
        weight = gpt.get_submodule(name).weight
        a, b = adapter.joined(name, len(weight))
        with torch.no_grad():
            weight += torch.from_numpy(b @ a)  # type: ignore[operator]
    return gpt
