"""Helium: Llama that rotates adjacent dimensions. Source: transformers, models/helium."""

from __future__ import annotations

from functools import partial

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import rotated

FAMILY = Family(
    "helium",
    "HeliumForCausalLM",
    llama.FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 20),
        "head_dim": ("head_size", 128),
        "rms_norm_eps": ("norm_epsilon", 1e-8),
    },
    llama.NAMES,
    llama.FIXED,
    biases={"attention_bias": (("qkv",), False), "mlp_bias": (("mlp",), False)},
    read_layers=partial(rotated, theta=100000.0),
    order=interleaved,
)
