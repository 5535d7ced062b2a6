"""Mistral 7B and models of its shape: Llama with a window. Source: transformers, models/mistral."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rope_fields, rotated


def read_layers(f: Fields, config: ModelConfig, default: int | None = 4096) -> dict[str, Any]:
    """Return the layers: all have the window `sliding_window`, or none if that is null."""
    return rotated(f, config, [f.window("sliding_window", default)] * config.n_layer)


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_layers` reads."""
    return rope_fields(config) | {"sliding_window": config.layer(0).window}


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 8)},
    llama.NAMES,
    llama.FIXED,
    read_layers=read_layers,
    write_layers=write_layers,
)
