"""Ministral 3: Mistral with positions scaled by yarn, and queries that grow with the position.

Source: transformers, models/ministral3.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama, mistral
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields

_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.get("rope_parameters") is None and f.get("rope_scaling") is None:
        f.raw = {**f.raw, "rope_parameters": _YARN}
    return mistral.read_layers(f, config, default=None)


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    llama.FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 8),
        "head_dim": ("head_size", 128),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
    },
    llama.NAMES,
    llama.FIXED,
    read_layers=_read_layers,
    write_layers=mistral.write_layers,
)
