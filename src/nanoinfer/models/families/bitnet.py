"""BitNet b1.58: Llama with norms inside attention and MLP, squared ReLU, and inputs of 8 bits if the config quantizes.

What rounds the inputs is not of the family: `quantization_config` asks for it (hf_config.py). Source: transformers,
models/bitnet.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rotated

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs != "head_dim"}


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.only("head_dim", config.head_dim, None)
    return rotated(f, config, theta=500000.0)


FAMILY = Family(
    "bitnet",
    "BitNetForCausalLM",
    _FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 5),
        "hidden_act": ("activation", "relu2"),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
    },
    llama.NAMES | {"attn.sub_norm": "self_attn.attn_sub_norm", "mlp.sub_norm": "mlp.ffn_sub_norm"},
    llama.FIXED | {"sub_norms": True},
    biases=llama.ATTENTION_BIAS,
    read_layers=_read_layers,
)
