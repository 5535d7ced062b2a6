"""SmolLM3: Llama whose every fourth layer has no positions. Source: transformers, models/smollm3."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, rope_fields
from nanoinfer.models.families.qwen2 import window_fields


def _read(f: Fields) -> ModelConfig:
    n_layer, width = f.integer("num_hidden_layers"), llama.head_dim(f)
    interval = f.integer("no_rope_layer_interval", 4)
    rotated = f.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(n_layer)]
    if not isinstance(rotated, list) or len(rotated) < n_layer or any(r not in (0, 1) for r in rotated):
        raise f.error("no_rope_layers", f"is not a list of 0 and 1 for {n_layer} layers")
    used, window = f.flag("use_sliding_window", False), f.get("sliding_window")
    width_of_window = f.integer("sliding_window") if used and window is not None else None
    windows = f.windows(n_layer, width_of_window, lambda i: width_of_window is not None and not rotated[i])
    rotary = f.rotary(width, 2000000.0)
    return ModelConfig(
        family="smollm3",
        head_size=width,
        layers=tuple(
            LayerKind(window, rotary if turns else None) for window, turns in zip(windows, rotated, strict=False)
        ),
        **llama.shape(f, tied=True),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    rotaries = [config.layer(i).rotary for i in range(config.n_layer)]
    rotary = next((r for r in rotaries if r is not None), None)
    fields = llama.shape_fields(config) | window_fields(config)
    fields["no_rope_layers"] = [int(r is not None) for r in rotaries]
    return fields if rotary is None else fields | rope_fields(rotary)


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, llama.NAMES)
