"""StableLM: layer norms, a gated MLP, rotary positions on a share of each head.

Source: transformers, models/stablelm.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, partial_fields, rotated

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs not in ("head_dim", "rms_norm_eps")}


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    layers = rotated(f, config, share=("partial_rotary_factor", 0.25))
    return layers | ({"norm_placement": "shared"} if config.parallel_residual else {})


FAMILY = Family(
    "stablelm",
    "StableLmForCausalLM",
    _FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 32),
        "layer_norm_eps": ("norm_epsilon", 1e-5),
        "use_parallel_residual": ("parallel_residual", False),
    },
    llama.NAMES,
    {"gated_mlp": True, "learned_positions": False},
    biased=("norm",),
    biases={"use_qkv_bias": (("qkv",), False)},
    only={"qk_layernorm": (False,)},
    harmless=("hidden_dropout",),
    read_layers=_read_layers,
    write_layers=partial_fields,
)
