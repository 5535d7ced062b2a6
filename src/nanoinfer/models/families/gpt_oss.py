"""gpt-oss."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, rotated, window_fields
from nanoinfer.models.families.llama import LLAMA

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.get("rope_parameters") is None and f.get("rope_scaling") is None:
        f.raw = {**f.raw, "rope_scaling": _YARN}
    windows = f.windows(config.n_layer, f.window("sliding_window", 128), lambda i: i % 2 == 0)
    width, chosen = f.get("intermediate_size", 2880), f.get("num_experts_per_tok", 4)
    mixture = Experts(experts.num_experts(f, 128), chosen, width, normalize=True, bias=True)
    return experts.with_experts(rotated(f, config, windows, theta=150000.0), mixture)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config) | experts.width_fields(config)
    del fields["use_sliding_window"]
    return fields | {"rope_scaling": fields["rope_scaling"] or {"rope_type": "default"}}


GPT_OSS = LLAMA.derive(
    "gpt_oss",
    "GptOssForCausalLM",
    names=experts.NAMES | {"attn.sinks": "self_attn.sinks", "mlp.router": "mlp.router"},
    fixed={"activation": "clamped_silu", "sinks": True},
    defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
    without=("intermediate_size", "hidden_act"),
    biases={"attention_bias": (("qkv", "proj"), True)},
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    harmless=(*experts.HARMLESS, "experts_per_token", "initial_context_length"),
    read_layers=_read_layers,
    write_layers=_write_layers,
    transposed=frozenset(experts.STACKED),
    fused=experts.STACKED,
    written=False,
    alternating=True,
)
"""gpt-oss: experts with biases and a clamped gate, sinks in attention, windows in every other layer.

Source, too: the model card (arXiv 2508.10925)."""
