"""OLMo: Llama with layer norms that have no weights. Source: transformers, models/olmo."""

from __future__ import annotations

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs not in ("head_dim", "rms_norm_eps")}

FAMILY = Family(
    "olmo",
    "OlmoForCausalLM",
    _FIELDS,
    llama.NAMES,
    llama.FIXED | {"norm": "layer", "norm_weight": "none"},
    biases=llama.ATTENTION_BIAS,
    only={"clip_qkv": (None,)},
)
