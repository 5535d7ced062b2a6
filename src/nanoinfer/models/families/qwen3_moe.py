"""Qwen3-MoE: Qwen3 with experts in some layers or all. Source: transformers, models/qwen3_moe."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts, llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rope_fields, rotated


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    width = f.get("sliding_window", 4096)
    windows = [f.window("sliding_window", width) if f.flag("use_sliding_window", False) else None] * config.n_layer
    of_expert, chosen = f.get("moe_intermediate_size", 768), f.get("num_experts_per_tok", 8)
    mixture = Experts(experts.num_experts(f, 128), chosen, of_expert, f.flag("norm_topk_prob", False))
    return experts.with_experts(rotated(f, config, windows), mixture, experts.sparse_layers(f))


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    window = config.layer(0).window
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    return rope_fields(config) | fields | experts.sparse_fields(config)


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 4)},
    llama.NAMES | llama.QK_NORM | experts.NAMES,
    llama.FIXED | {"qk_norm": "head"},
    biases=llama.ATTENTION_BIAS,
    only={"use_qk_norm": (True,)},
    harmless=experts.HARMLESS,
    read_layers=_read_layers,
    write_layers=_write_layers,
    read_fused=experts.STACKED,
)
