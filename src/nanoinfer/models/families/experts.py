"""What families with mixtures of experts share: fields of config.json, and names of tensors.

Sources: transformers, models/mixtral and models/qwen2_moe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families.fields import Fields

HARMLESS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # of training


def parts(prefix: str, gate: str, up: str, down: str) -> tuple[str, ...]:
    """Return the names of an expert's three matrices."""
    return tuple(f"{prefix}.{{}}.{name}" for name in (gate, up, down))


def names(router: str, parts: tuple[str, ...]) -> dict[str, str]:
    """Return the names of a layer's router and experts."""
    ours = ("mlp.router", "mlp.experts.c_gate", "mlp.experts.c_fc", "mlp.experts.c_proj")
    return dict(zip(ours, (router, *parts), strict=True))


def shared(prefix: str) -> dict[str, str]:
    """Return the names of the expert that all tokens have."""
    matrices = {"c_gate": "gate_proj", "c_fc": "up_proj", "c_proj": "down_proj"}
    return {f"mlp.shared.{ours}": f"{prefix}.{theirs}" for ours, theirs in matrices.items()}


def stacked(parts: tuple[str, ...], prefix: str = "mlp.experts") -> dict[str, tuple[str, ...]]:
    """Return the two tensors of all experts of a layer -> their parts, as transformers 5 has them."""
    return {f"{prefix}.gate_up_proj": parts[:2], f"{prefix}.down_proj": parts[2:]}


PARTS = parts("mlp.experts", "gate_proj", "up_proj", "down_proj")
NAMES = names("mlp.gate", PARTS)
STACKED = stacked(PARTS)
"""The parameters of transformers 5, which save_pretrained writes with `save_original_format=False`."""


def num_experts(f: Fields, default: int) -> int:
    """Return the number of experts. Each of transformers 4 and 5 writes some families' under the other name."""
    names = [name for name in ("num_experts", "num_local_experts") if f.get(name) is not None]
    if len({f.raw[name] if isinstance(f.raw[name], int) else name for name in names}) > 1:
        raise f.error("num_experts", "differs from num_local_experts: remove one of them")
    return f.integer(names[0] if names else "num_experts", default)


def with_experts(
    fields: dict[str, Any], experts: Experts, sparse: Callable[[int], bool] = lambda i: True
) -> dict[str, Any]:
    """Return the fields of a model with experts in the layers `i` of which `sparse(i)` is true."""
    layers = tuple(replace(kind, experts=sparse(i)) for i, kind in enumerate(fields["layers"]))
    return fields | {"layers": layers, "experts": experts}


def everywhere(f: Fields, fields: dict[str, Any], count: int, chosen: int, **options: Any) -> dict[str, Any]:
    """Return the fields of a model with experts of `intermediate_size` in all layers.

    Args:
        f, fields: of the config, and of the model so far.
        count, chosen: numbers of experts, and of those of a token, where the config has none.
        options: further fields of `Experts`.
    """
    width, chosen = f.required("intermediate_size"), f.get("num_experts_per_tok", chosen)
    return with_experts(fields, Experts(num_experts(f, count), chosen, width, **options))


def beside_shared(
    f: Fields, count: int, chosen: int, width: int = 512, shared_width: int = 512, *, normalize: bool
) -> Experts:
    """Return the experts of a model in which a gate weighs a shared one, as in Qwen2-MoE; the numbers are defaults."""
    shared_width = f.integer("shared_expert_intermediate_size", shared_width)
    count, chosen = num_experts(f, count), f.get("num_experts_per_tok", chosen)
    width = f.get("moe_intermediate_size", width)
    return Experts(count, chosen, width, normalize, shared_width=shared_width, shared_gate=True)


def sparse_layers(f: Fields) -> Callable[[int], bool]:
    """Return whether a layer has experts, by the fields of Qwen2-MoE and Qwen3-MoE."""
    step, without = f.integer("decoder_sparse_step", 1), f.get("mlp_only_layers")
    if without is not None and not (isinstance(without, list) and all(type(i) is int for i in without)):
        raise f.error("mlp_only_layers", "is not a list of layers")
    dense = set(without or ())
    return lambda i: i not in dense and (i + 1) % step == 0


def width_fields(
    config: ModelConfig, *, count: str = "num_local_experts", width: str = "intermediate_size"
) -> dict[str, Any]:
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
