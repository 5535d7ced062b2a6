"""SmolLM3: Llama whose every fourth layer has no positions. Source: transformers, models/smollm3."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, window_fields


def read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers: those with a 0 in no_rope_layers have no positions, and a window if there is one."""
    n_layer, interval = config.n_layer, f.integer("no_rope_layer_interval", 4)
    turns = f.get("no_rope_layers")
    if turns is None:
        turns = [int((i + 1) % interval != 0) for i in range(n_layer)]
    if not isinstance(turns, list) or len(turns) != n_layer or any(r not in (0, 1) for r in turns):
        raise f.error("no_rope_layers", f"is not a list of 0 and 1 for {n_layer} layers")
    used, window = f.flag("use_sliding_window", False), f.window("sliding_window", None)
    window = window if used else None
    windows = f.windows(n_layer, window, lambda i: window is not None and not turns[i])
    rotary = f.rotary(config, 2000000.0)
    return {"layers": tuple(LayerKind(w, rotary if turn else None) for w, turn in zip(windows, turns, strict=True))}


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_layers` reads."""
    return window_fields(config) | {"no_rope_layers": [int(kind.rotary is not None) for kind in config.layers]}


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 4), "tie_word_embeddings": ("tie_word_embeddings", True)},
    llama.NAMES,
    llama.FIXED,
    biases=llama.BIASES,
    read_layers=read_layers,
    write_layers=write_layers,
)
