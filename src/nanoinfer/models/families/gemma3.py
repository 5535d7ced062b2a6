"""Gemma 3, text only: norms on both sides, weights of norms added to 1, local and global layers, a scaled embedding.

Source: transformers, models/gemma3.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, window_fields

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs != "hidden_act"}
_SIZES = {  # the configs of models of texts and images leave out the defaults
    "vocab_size": ("vocab_size", 262208), "max_position_embeddings": ("block_size", 131072),
    "num_hidden_layers": ("n_layer", 26), "num_attention_heads": ("n_head", 8),
    "hidden_size": ("n_embd", 2304), "intermediate_size": ("n_inner", 9216),
}  # fmt: skip


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    windows = f.windows(config.n_layer, f.integer("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    everywhere = f.rotary(config, 1000000.0, kind="full_attention")
    nearby = f.rotary(config, 10000.0, kind="sliding_attention", theta_field="rope_local_base_freq", scaled=False)
    return {
        "layers": tuple(LayerKind(w, everywhere if w is None else nearby) for w in windows),
        "attention_scale": f.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_scale": config.n_embd**0.5,
    }


def scalar_field(config: ModelConfig) -> dict[str, Any]:
    """Return query_pre_attn_scalar, from which the factor of the scores follows."""
    scalar = round((config.attention_scale or 1.0) ** -2, 9)
    return {"query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config) | scalar_field(config)
    nearby = next((kind.rotary for kind in config.layers if kind.window is not None), None)
    if nearby is None:  # null is not a window to transformers
        del fields["sliding_window"]
        return fields
    return fields | {"rope_local_base_freq": nearby.base}


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _FIELDS
    | _SIZES
    | {
        "num_key_value_heads": ("num_kv_heads", 4),
        "head_dim": ("head_size", 256),
        "hidden_activation": ("activation", "gelu_pytorch_tanh"),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "attn_logit_softcapping": ("attention_softcap", None),
        "final_logit_softcapping": ("logits_softcap", None),
    },
    llama.NAMES
    | llama.QK_NORM
    | {
        "post_1": "post_attention_layernorm",
        "ln_2": "pre_feedforward_layernorm",
        "post_2": "post_feedforward_layernorm",
    },
    llama.FIXED | {"norm_weight": "one_plus", "norm_placement": "both", "qk_norm": "head"},
    biases=llama.ATTENTION_BIAS,
    only={"use_bidirectional_attention": (False, None)},
    read_layers=_read_layers,
    write_layers=_write_layers,
)
