"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts and a gated shared expert. Source: transformers, models/qwen2_moe."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts, llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rotated, window_fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    used, last, width = f.flag("use_sliding_window", False), f.integer("max_window_layers", 28, 0), None
    f.get("sliding_window")  # 0 where no layer has a window
    if used:
        width = f.window("sliding_window", 4096)
    windows = f.windows(config.n_layer, width, lambda i: used and i % 2 == 0 and i < last)
    mixture = Experts(
        experts.num_experts(f, 60),
        f.get("num_experts_per_tok", 4),
        f.get("moe_intermediate_size", 1408),
        f.flag("norm_topk_prob", False),
        shared_width=f.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return experts.with_experts(rotated(f, config, windows), mixture, experts.sparse_layers(f))


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    shared = {"shared_expert_intermediate_size": config.experts.shared_width}
    return window_fields(config) | experts.sparse_fields(config) | shared


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    llama.FIELDS | {"num_key_value_heads": ("num_kv_heads", 16)},
    llama.NAMES
    | experts.NAMES
    | {
        "mlp.shared.c_gate": "mlp.shared_expert.gate_proj",
        "mlp.shared.c_fc": "mlp.shared_expert.up_proj",
        "mlp.shared.c_proj": "mlp.shared_expert.down_proj",
        "mlp.shared_gate": "mlp.shared_expert_gate",
    },
    llama.FIXED,
    biases={"qkv_bias": (("qkv",), True)},
    harmless=experts.HARMLESS,
    read_layers=_read_layers,
    write_layers=_write_layers,
    read_fused=experts.STACKED,
)
