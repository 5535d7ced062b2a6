"""Seed-OSS: Llama with biases on queries, keys and values. Source: transformers, models/seed_oss."""

from __future__ import annotations

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family

FAMILY = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 8), "head_dim": ("head_size", 128)},
    llama.NAMES,
    llama.FIXED,
    biases={
        "attention_bias": (("qkv",), True),
        "attention_out_bias": (("proj",), False),
        "mlp_bias": (("mlp",), False),
    },
    only={"pretraining_tp": (1, None)},
    harmless=("residual_dropout",),
)
