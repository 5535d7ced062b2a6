"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: transformers, models/qwen2."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rotated, window_fields


def read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers: with use_sliding_window, those from max_window_layers on have a window."""
    used, first = f.flag("use_sliding_window", False), f.integer("max_window_layers", 28, 0)
    width = f.window("sliding_window", 4096)
    return rotated(f, config, f.windows(config.n_layer, width if used else None, lambda i: used and i >= first))


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 32)},
    llama.NAMES,
    llama.FIXED,
    biased=("qkv",),
    read_layers=read_layers,
    write_layers=window_fields,
)
