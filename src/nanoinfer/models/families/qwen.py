"""Qwen2, Qwen3, and those with experts."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, rope_fields, rotated, window_fields
from nanoinfer.models.families.llama import ATTENTION_BIAS, LLAMA, QK_NORM


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers: with use_sliding_window, those from max_window_layers on have a window."""
    used, first = f.flag("use_sliding_window", False), f.integer("max_window_layers", 28, 0)
    width = f.window("sliding_window", 4096)
    return rotated(f, config, f.windows(config.n_layer, width if used else None, lambda i: used and i >= first))


QWEN2 = LLAMA.derive(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults={"num_key_value_heads": 32},
    biased=("qkv",),
    read_layers=_read_layers,
    write_layers=window_fields,
)
"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

QWEN3 = QWEN2.derive(
    "qwen3",
    "Qwen3ForCausalLM",
    names=QK_NORM,
    fixed={"qk_norm": "head"},
    defaults={"head_dim": 128},
    biases=ATTENTION_BIAS,
    only={"use_qk_norm": (True,)},
)
"""Qwen3 (dense): Llama with a norm of each head's queries and keys."""


def _read_qwen2_moe(f: Fields, config: ModelConfig) -> dict[str, Any]:
    used, last, width = f.flag("use_sliding_window", False), f.integer("max_window_layers", 28, 0), None
    f.get("sliding_window")  # 0 where no layer has a window
    if used:
        width = f.window("sliding_window", 4096)
    windows = f.windows(config.n_layer, width, lambda i: used and i % 2 == 0 and i < last)
    mixture = experts.beside_shared(f, 60, 4, 1408, 5632, normalize=f.flag("norm_topk_prob", False))
    return experts.with_experts(rotated(f, config, windows), mixture, experts.sparse_layers(f))


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    shared = {"shared_expert_intermediate_size": config.experts.shared_width}
    return window_fields(config) | experts.sparse_fields(config) | shared


QWEN2_MOE = LLAMA.derive(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    names=experts.NAMES | experts.shared("mlp.shared_expert") | {"mlp.shared_gate": "mlp.shared_expert_gate"},
    defaults={"num_key_value_heads": 16},
    biases={"qkv_bias": (("qkv",), True)},
    harmless=experts.HARMLESS,
    read_layers=_read_qwen2_moe,
    write_layers=_write_qwen2_moe,
    fused=experts.STACKED,
)
"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts and a gated shared expert."""


def _read_qwen3_moe(f: Fields, config: ModelConfig) -> dict[str, Any]:
    width = f.get("sliding_window", 4096)
    windows = [f.window("sliding_window", width) if f.flag("use_sliding_window", False) else None] * config.n_layer
    of_expert, chosen = f.get("moe_intermediate_size", 768), f.get("num_experts_per_tok", 8)
    mixture = Experts(experts.num_experts(f, 128), chosen, of_expert, f.flag("norm_topk_prob", False))
    return experts.with_experts(rotated(f, config, windows), mixture, experts.sparse_layers(f))


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    window = config.layer(0).window
    fields = {"use_sliding_window": window is not None, "sliding_window": window}
    return rope_fields(config) | fields | experts.sparse_fields(config)


QWEN3_MOE = LLAMA.derive(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    names=QK_NORM | experts.NAMES,
    fixed={"qk_norm": "head"},
    defaults={"num_key_value_heads": 4},
    biases=ATTENTION_BIAS,
    only={"use_qk_norm": (True,)},
    harmless=experts.HARMLESS,
    read_layers=_read_qwen3_moe,
    write_layers=_write_qwen3_moe,
    fused=experts.STACKED,
)
"""Qwen3-MoE: Qwen3 with experts in some layers or all."""
