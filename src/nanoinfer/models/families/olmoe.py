"""OLMoE: Llama with experts, and a norm of all heads' queries and keys. Source: transformers, models/olmoe."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts, llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, rope_fields, rotated


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    width, chosen = f.required("intermediate_size"), f.get("num_experts_per_tok", 8)
    mixture = Experts(experts.num_experts(f, 64), chosen, width, f.flag("norm_topk_prob", False))
    return experts.with_experts(rotated(f, config), mixture)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = experts.width_fields(config, count="num_experts", width="intermediate_size")
    return rope_fields(config) | fields | {"norm_topk_prob": config.experts is not None and config.experts.normalize}


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    experts.FIELDS | {"rms_norm_eps": ("norm_epsilon", 1e-5)},
    llama.NAMES | llama.QK_NORM | experts.NAMES,
    llama.FIXED | {"qk_norm": "whole"},
    biases=llama.ATTENTION_BIAS,
    only={"clip_qkv": (None,)},
    harmless=experts.HARMLESS,
    read_layers=_read_layers,
    write_layers=_write_layers,
    read_fused=experts.STACKED,
)
