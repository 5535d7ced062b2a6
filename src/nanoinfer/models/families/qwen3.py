"""Qwen3 (dense): Llama with a norm of each head's queries and keys. Source: transformers, models/qwen3."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields
from nanoinfer.models.families.qwen2 import window_fields, windows

NAMES = llama.NAMES | {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}


def _read(f: Fields) -> ModelConfig:
    width = llama.head_dim(f, 128)
    return ModelConfig(
        family="qwen3",
        head_size=width,
        layers=kinds(windows(f), f.rotary(width)),
        qk_norm="head",
        **llama.shape(f),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    return llama.shape_fields(config) | rope_fields(rotary) | window_fields(config)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _read, _write, NAMES)
