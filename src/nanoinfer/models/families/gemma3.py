"""Gemma 3, text only: norms on both sides, weights of norms added to 1, local and global layers, a scaled embedding.

Source: transformers, models/gemma3.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, rope_fields
from nanoinfer.models.families.qwen2 import window_fields

NAMES = llama.NAMES | {
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "post_1": "post_attention_layernorm",
    "ln_2": "pre_feedforward_layernorm",
    "post_2": "post_feedforward_layernorm",
}


def _read(f: Fields) -> ModelConfig:
    f.only("use_bidirectional_attention", False, None)
    n_layer, width = f.integer("num_hidden_layers"), llama.head_dim(f, 256)
    pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    windows = f.windows(n_layer, f.integer("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    everywhere = f.rotary(width, 1000000.0, kind="full_attention")
    nearby = f.rotary(width, 10000.0, kind="sliding_attention", theta_field="rope_local_base_freq", scaled=False)
    shape = llama.shape(f, tied=True)
    scale = f.number("query_pre_attn_scalar", 256.0)
    assert scale is not None
    return ModelConfig(
        family="gemma3_text",
        head_size=width,
        layers=tuple(LayerKind(w, everywhere if w is None else nearby) for w in windows),
        norm_weight="one_plus",
        norm_placement="both",
        qk_norm="head",
        attention_scale=scale**-0.5,
        attention_softcap=f.number("attn_logit_softcapping", None),
        logits_softcap=f.number("final_logit_softcapping", None),
        embedding_scale=shape["n_embd"] ** 0.5,
        **shape | {"activation": f.activation("hidden_activation", "gelu_pytorch_tanh")},
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [config.layer(i) for i in range(config.n_layer)]
    everywhere = next((k.rotary for k in kinds if k.window is None), None)
    nearby = next((k.rotary for k in kinds if k.window is not None), None)
    assert config.attention_scale is not None
    fields = llama.shape_fields(config) | window_fields(config)
    fields["hidden_activation"] = fields.pop("hidden_act")
    fields["query_pre_attn_scalar"] = round(config.attention_scale**-2)
    fields |= {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
    }
    if everywhere is not None:
        fields |= rope_fields(everywhere)
    return fields | ({} if nearby is None else {"rope_local_base_freq": nearby.base})


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", _read, _write, NAMES)
