"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, biases everywhere, the head included.

Source: transformers, models/phi.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import BIASES, ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, partial_fields, rotated

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs not in ("head_dim", "rms_norm_eps")}


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    layers = rotated(f, config, share=("partial_rotary_factor", 0.5))
    return layers | {"qk_norm": "head" if f.flag("qk_layernorm", False) else "none"}


FAMILY = Family(
    "phi",
    "PhiForCausalLM",
    _FIELDS | {"hidden_act": ("activation", "gelu_new"), "layer_norm_eps": ("norm_epsilon", 1e-5)},
    {
        **{name: llama.NAMES[name] for name in ("wte", "lm_head", "ln_1", "attn.c_attn")},
        "ln_f": "model.final_layernorm",
        "attn.c_proj": "self_attn.dense",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    },
    {"learned_positions": False, "norm_placement": "shared", "parallel_residual": True, "head_bias": True},
    biased=BIASES,
    harmless=("resid_pdrop", "embd_pdrop", "rotary_dim"),
    read_layers=_read_layers,
    write_layers=lambda config: partial_fields(config) | {"qk_layernorm": config.qk_norm == "head"},
)
