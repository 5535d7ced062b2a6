"""What families with mixtures of experts share: fields of config.json, and names of tensors.

Sources: transformers, models/mixtral and models/qwen2_moe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.fields import Fields

FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs != "intermediate_size"}
"""Of families whose intermediate_size is the width of an expert."""
HARMLESS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # of training
NAMES = {
    "mlp.router": "mlp.gate",
    "mlp.experts.c_gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.c_fc": "mlp.experts.{}.up_proj",
    "mlp.experts.c_proj": "mlp.experts.{}.down_proj",
}
STACKED = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
}
"""The parameters of transformers 5, which save_pretrained writes with `save_original_format=False`."""


def num_experts(f: Fields, default: int) -> int:
    """Return the number of experts. Each of transformers 4 and 5 writes some families' under the other name."""
    names = [name for name in ("num_experts", "num_local_experts") if f.get(name) is not None]
    if len({f.raw[name] if isinstance(f.raw[name], int) else name for name in names}) > 1:
        raise f.error("num_experts", "differs from num_local_experts: remove one of them")
    return f.integer(names[0] if names else "num_experts", default)


def with_experts(
    found: dict[str, Any], experts: Experts, sparse: Callable[[int], bool] = lambda i: True
) -> dict[str, Any]:
    """Return the fields of a model with experts in the layers `i` of which `sparse(i)` is true."""
    layers = tuple(replace(kind, experts=sparse(i)) for i, kind in enumerate(found["layers"]))
    return found | {"layers": layers, "experts": experts}


def sparse_layers(f: Fields) -> Callable[[int], bool]:
    """Return whether a layer has experts, by the fields of Qwen2-MoE and Qwen3-MoE."""
    step, without = f.integer("decoder_sparse_step", 1), f.get("mlp_only_layers")
    if without is not None and not (isinstance(without, list) and all(type(i) is int for i in without)):
        raise f.error("mlp_only_layers", "is not a list of layers")
    dense = set(without or ())
    return lambda i: i not in dense and (i + 1) % step == 0


def width_fields(config: ModelConfig, *, count: str, width: str) -> dict[str, Any]:
    """Return the fields with the number and the width of the experts, under these names."""
    assert config.experts is not None
    return {count: config.experts.count, "num_experts_per_tok": config.experts.per_token, width: config.experts.width}


def sparse_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `sparse_layers` reads, and the experts' of Qwen2-MoE and Qwen3-MoE."""
    assert config.experts is not None
    return width_fields(config, count="num_experts", width="moe_intermediate_size") | {
        "norm_topk_prob": config.experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.n_layer) if not config.layer(i).experts],
    }
