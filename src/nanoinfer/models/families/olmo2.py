"""OLMo 2: norms after attention and MLP, and a norm of all heads' queries and keys.

Source: transformers, models/olmo2.
"""

from __future__ import annotations

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family

_NAMES = {ours: theirs for ours, theirs in llama.NAMES.items() if ours not in ("ln_1", "ln_2")}

FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    llama.FIELDS | {"rms_norm_eps": ("norm_epsilon", 1e-5)},
    {
        **_NAMES,
        **llama.QK_NORM,
        "post_1": "post_attention_layernorm",
        "post_2": "post_feedforward_layernorm",
    },
    llama.FIXED | {"norm_placement": "after", "qk_norm": "whole"},
    biases=llama.ATTENTION_BIAS,
)
