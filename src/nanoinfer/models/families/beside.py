"""Experts beside an MLP (models/beside.py): fields of config.json, and names of tensors. Source: transformers,
models/gemma4."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields

FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_PARTS = {"c_gate": "gate_proj", "c_fc": "up_proj", "c_proj": "down_proj"}
NAMES = {
    "mlp.router": "router.proj",
    "mlp.router_scale": "router.scale",
    "mlp.expert_scale": "router.per_expert_scale",
    "mlp.ln_1": "pre_feedforward_layernorm",
    "mlp.post_1": "post_feedforward_layernorm_1",
    "mlp.ln_2": "pre_feedforward_layernorm_2",
    "mlp.post_2": "post_feedforward_layernorm_2",
    **{f"mlp.shared.{ours}": f"mlp.{theirs}" for ours, theirs in _PARTS.items()},
    **{f"mlp.experts.{ours}": f"experts.{{}}.{theirs}" for ours, theirs in _PARTS.items()},
}
FUSED = {
    "experts.gate_up_proj": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "experts.down_proj": ("experts.{}.down_proj",),
}


def read(f: Fields, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, with experts beside all its MLPs if the config has them."""
    mixed = f.flag("enable_moe_block", False)
    count, chosen, width = ((f.required if mixed else f.get)(name) for name in FIELDS)
    if not mixed:
        return found
    return experts.with_experts(found, Experts(count, chosen, width, normalize=True, beside=True))


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read` reads."""
    if (mixture := config.experts) is None:
        return {"enable_moe_block": False}
    sizes = mixture.count, mixture.per_token, mixture.width
    return {"enable_moe_block": True, **dict(zip(FIELDS, sizes, strict=True))}
