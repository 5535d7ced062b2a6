"""OLMo 2: norms after attention and MLP, and a norm of all heads' queries and keys.

Source: transformers, models/olmo2.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields

NAMES = {name: theirs for name, theirs in llama.NAMES.items() if name not in ("ln_1", "ln_2")} | {
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "post_1": "post_attention_layernorm",
    "post_2": "post_feedforward_layernorm",
}


def _read(f: Fields) -> ModelConfig:
    width, n_layer = llama.head_dim(f), f.integer("num_hidden_layers")
    return ModelConfig(
        family="olmo2",
        head_size=width,
        layers=kinds([None] * n_layer, f.rotary(width)),
        norm_placement="after",
        qk_norm="whole",
        **llama.shape(f, eps=1e-5),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    return llama.shape_fields(config) | rope_fields(rotary)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", _read, _write, NAMES)
