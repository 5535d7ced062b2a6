"""Granite 3 (dense): Llama with factors of embedding, scores, residuals and logits.

Source: transformers, models/granite.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rope_fields, rotated

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs != "head_dim"}


def read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers, and the factor of the final hidden states."""
    return rotated(f, config) | {"final_scale": 1.0 / f.number("logits_scaling", 1.0)}


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_layers` reads."""
    return rope_fields(config) | {"logits_scaling": round(1.0 / (config.final_scale or 1.0), 9)}


FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    _FIELDS
    | {
        "attention_multiplier": ("attention_scale", 1.0),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
    },
    llama.NAMES,
    llama.FIXED,
    biases=llama.BIASES,
    read_layers=read_layers,
    write_layers=write_layers,
)
