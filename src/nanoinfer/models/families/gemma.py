"""Gemma: weights of norms added to 1, a scaled embedding, a gated MLP with GELU. Source: transformers, models/gemma."""

from __future__ import annotations

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import rotated

FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    llama.FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 16),
        "head_dim": ("head_size", 256),
        "hidden_act": ("activation", "gelu_pytorch_tanh"),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    llama.NAMES,
    llama.FIXED | {"norm_weight": "one_plus"},
    biases=llama.ATTENTION_BIAS,
    only={"use_bidirectional_attention": (False, None), "hidden_activation": (None, "gelu_pytorch_tanh")},
    read_layers=lambda f, config: rotated(f, config) | {"embedding_scale": config.n_embd**0.5},
)
