"""Ministral 8B: Mistral whose layers may differ in their windows. Source: transformers, models/ministral."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rotated, window_fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    window = f.window("sliding_window", 4096)
    return rotated(f, config, f.windows(config.n_layer, window, lambda i: window is not None))


FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 8)},
    llama.NAMES,
    llama.FIXED,
    read_layers=_read_layers,
    write_layers=window_fields,
)
