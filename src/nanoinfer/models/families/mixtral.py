"""Mixtral: Mistral with experts. Source: transformers, models/mixtral."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts, llama, mistral
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rotated

_GATE, _UP, _DOWN = (f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = [f.window("sliding_window", None)] * config.n_layer
    width, chosen = f.required("intermediate_size"), f.get("num_experts_per_tok", 2)
    mixture = Experts(experts.num_experts(f, 8), chosen, width, normalize=True)
    return experts.with_experts(rotated(f, config, windows, theta=1e6), mixture)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = experts.width_fields(config, count="num_local_experts", width="intermediate_size")
    return mistral.write_layers(config) | fields


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    experts.FIELDS | {"num_key_value_heads": ("num_kv_heads", 8), "rms_norm_eps": ("norm_epsilon", 1e-5)},
    llama.NAMES
    | {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.c_gate": _GATE,
        "mlp.experts.c_fc": _UP,
        "mlp.experts.c_proj": _DOWN,
    },
    llama.FIXED,
    harmless=experts.HARMLESS,
    read_layers=_read_layers,
    write_layers=_write_layers,
    read_fused={
        "mlp.gate": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up_proj": (_GATE, _UP),
        "mlp.experts.down_proj": (_DOWN,),
    },
)
