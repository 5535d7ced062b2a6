"""Mistral 7B and models of its shape. Source: transformers, models/mistral."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields


def _read(f: Fields) -> ModelConfig:
    window = None if f.get("sliding_window", 4096) is None else f.integer("sliding_window", 4096)
    width, n_layer = llama.head_dim(f), f.integer("num_hidden_layers")
    return ModelConfig(
        family="mistral", head_size=width, layers=kinds([window] * n_layer, f.rotary(width)), **llama.shape(f)
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    kind = config.layer(0)
    assert kind.rotary is not None
    return llama.shape_fields(config) | rope_fields(kind.rotary) | {"sliding_window": kind.window}


FAMILY = Family("mistral", "MistralForCausalLM", _read, _write, llama.NAMES)
