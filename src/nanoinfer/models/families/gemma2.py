"""Gemma 2: Gemma with norms on both sides, soft caps of scores and logits, and every second layer local.

Source: transformers, models/gemma2.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import gemma3, llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rotated, window_fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = f.windows(config.n_layer, f.window("sliding_window", 4096), lambda i: i % 2 == 0)
    return rotated(f, config, windows) | {
        "attention_scale": f.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_scale": config.n_embd**0.5,
    }


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    gemma3.FAMILY.fields
    | {"attn_logit_softcapping": ("attention_softcap", 50.0), "final_logit_softcapping": ("logits_softcap", 30.0)},
    {ours: theirs for ours, theirs in gemma3.FAMILY.names.items() if ours not in llama.QK_NORM},
    llama.FIXED | {"norm_weight": "one_plus", "norm_placement": "both"},
    biases=llama.ATTENTION_BIAS,
    only={"use_bidirectional_attention": (False, None), "hidden_act": ("gelu_pytorch_tanh",)},
    harmless=("cache_implementation",),
    read_layers=_read_layers,
    write_layers=lambda config: window_fields(config) | gemma3.scalar_field(config),
)
