"""Qwen3 (dense): Llama with a norm of each head's queries and keys. Source: transformers, models/qwen3."""

from __future__ import annotations

from nanoinfer.models.families import llama, qwen2
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import window_fields

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    qwen2.FAMILY.fields | {"head_dim": ("head_size", 128)},
    llama.NAMES | llama.QK_NORM,
    llama.FIXED | {"qk_norm": "head"},
    biases=llama.ATTENTION_BIAS,
    only={"use_qk_norm": (True,)},
    read_layers=qwen2.read_layers,
    write_layers=window_fields,
)
