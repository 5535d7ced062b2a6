"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Source: transformers, models/qwen2."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields


def windows(f: Fields) -> list[int | None]:
    """Return the window of each layer: with use_sliding_window, those from max_window_layers on have one."""
    width = f.integer("sliding_window", 4096, nullable=True)
    used, first = f.flag("use_sliding_window", False), f.integer("max_window_layers", 28, 0)
    return f.windows(f.integer("num_hidden_layers"), width if used else None, lambda i: used and i >= first)


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that `windows` reads."""
    used = [w for w in (config.layer(i).window for i in range(config.n_layer)) if w is not None]
    types = ["full_attention" if config.layer(i).window is None else "sliding_attention" for i in range(config.n_layer)]
    return {"use_sliding_window": bool(used), "sliding_window": used[0] if used else None, "layer_types": types}


def _read(f: Fields) -> ModelConfig:
    width = llama.head_dim(f)
    shape = llama.shape(f) | {"bias": ("qkv",)}
    return ModelConfig(family="qwen2", head_size=width, layers=kinds(windows(f), f.rotary(width)), **shape)


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    return llama.shape_fields(config) | rope_fields(rotary) | window_fields(config)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _read, _write, llama.NAMES)
