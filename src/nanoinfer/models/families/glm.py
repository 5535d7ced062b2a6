"""GLM-4 of 2024 and of 2025."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from nanoinfer.models.families.base import interleaved
from nanoinfer.models.families.fields import partial_fields, rotated
from nanoinfer.models.families.llama import LLAMA
from nanoinfer.models.families.phi import GATE_UP

GLM = LLAMA.derive(
    "glm",
    "GlmForCausalLM",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625},
    biases={"attention_bias": (("qkv",), True)},
    read_layers=partial(rotated, share=("partial_rotary_factor", 0.5)),
    write_layers=partial_fields,
    order=interleaved,
    fused=GATE_UP,
    written=False,
)
"""GLM-4 of 2024 and GLM-Edge: Llama with half of each head rotated, adjacent dimensions in pairs."""

GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={**GLM.names, "post_1": "post_self_attn_layernorm", "post_2": "post_mlp_layernorm"},
    fixed={**GLM.fixed, "norm_placement": "both"},
)
"""GLM-4 of 2025 (0414): norms on both sides, half of each head rotated, adjacent dimensions in pairs."""
