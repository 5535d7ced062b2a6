"""Granite 3 with experts: Granite's factors; the experts of a layer are two tensors. Source: transformers,
models/granitemoe."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import Experts, ModelConfig
from nanoinfer.models.families import experts, granite, llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields

_GATE, _UP, _DOWN = (f"block_sparse_moe.experts.{{}}.{name}" for name in ("gate", "up", "down"))  # parts of these


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    width, chosen = f.required("intermediate_size"), f.get("num_experts_per_tok", 2)
    mixture = Experts(experts.num_experts(f, 8), chosen, width, normalize=True)
    return experts.with_experts(granite.read_layers(f, config), mixture)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = experts.width_fields(config, count="num_local_experts", width="intermediate_size")
    return granite.write_layers(config) | fields


FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {theirs: ours for theirs, ours in granite.FAMILY.fields.items() if theirs != "intermediate_size"},
    llama.NAMES
    | {
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.c_gate": _GATE,
        "mlp.experts.c_fc": _UP,
        "mlp.experts.c_proj": _DOWN,
    },
    llama.FIXED,
    biases=llama.ATTENTION_BIAS,
    harmless=experts.HARMLESS,
    read_layers=_read_layers,
    write_layers=_write_layers,
    fused={"block_sparse_moe.input_linear": (_GATE, _UP), "block_sparse_moe.output_linear": (_DOWN,)},
    read_fused={
        "block_sparse_moe.router": ("block_sparse_moe.router.layer",),
        "block_sparse_moe.experts.gate_up_proj": (_GATE, _UP),
        "block_sparse_moe.experts.down_proj": (_DOWN,),
    },
)
