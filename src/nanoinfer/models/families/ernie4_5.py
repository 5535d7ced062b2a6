"""ERNIE 4.5 (dense): Llama that rotates adjacent dimensions. Source: transformers, models/ernie4_5."""

from __future__ import annotations

from functools import partial

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import rotated

FAMILY = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    llama.FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 2),
        "head_dim": ("head_size", 128),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    llama.NAMES,
    llama.FIXED,
    biases={"use_bias": (("qkv", "proj", "mlp"), False)},
    read_layers=partial(rotated, theta=500000.0),
    order=interleaved,
)
