"""GLM-4 of 2025 (0414): norms on both sides, half of each head rotated, adjacent dimensions in pairs.

Source: transformers, models/glm4.
"""

from __future__ import annotations

from functools import partial

from nanoinfer.models.families import llama, phi3
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import partial_fields, rotated

FIELDS = llama.FIELDS | {
    "num_key_value_heads": ("num_kv_heads", 2),
    "head_dim": ("head_size", 128),
    "rms_norm_eps": ("norm_epsilon", 0.00000015625),
}

FAMILY = Family(
    "glm4",
    "Glm4ForCausalLM",
    FIELDS,
    llama.NAMES | {"post_1": "post_self_attn_layernorm", "post_2": "post_mlp_layernorm"},
    llama.FIXED | {"norm_placement": "both"},
    biases={"attention_bias": (("qkv",), True)},
    read_layers=partial(rotated, share=("partial_rotary_factor", 0.5)),
    write_layers=partial_fields,
    order=interleaved,
    fused=phi3.FUSED,
)
