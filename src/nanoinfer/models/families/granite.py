"""Granite 3, dense and with experts; Granite 4 is in mamba.py."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, rope_fields, rotated
from nanoinfer.models.families.llama import ATTENTION_BIAS, BIASES, LLAMA


def read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers, and the factor of the final hidden states."""
    return rotated(f, config) | {"final_scale": 1.0 / f.number("logits_scaling", 1.0)}


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_layers` reads."""
    return rope_fields(config) | {"logits_scaling": round(1.0 / (config.final_scale or 1.0), 9)}


GRANITE = LLAMA.derive(
    "granite",
    "GraniteForCausalLM",
    {
        "attention_multiplier": ("attention_scale", 1.0),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
    },
    without=("head_dim",),
    biases=BIASES,
    read_layers=read_layers,
    write_layers=write_layers,
)
"""Granite 3 (dense): Llama with factors of embedding, scores, residuals and logits."""


def _read_minicpm(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers, and the factors of residuals and logits, which MiniCPM derives from its sizes."""
    residual = f.number("scale_depth", 1.0) / config.n_layer**0.5
    final = f.number("dim_model_base", 1.0) / config.n_embd
    return rotated(f, config) | {"residual_scale": residual, "final_scale": final}


def _write_minicpm(config: ModelConfig) -> dict[str, Any]:
    depth, base = (config.residual_scale or 1.0) * config.n_layer**0.5, (config.final_scale or 1.0) * config.n_embd
    return rope_fields(config) | {"scale_depth": round(depth, 9), "dim_model_base": round(base, 9)}


MINICPM = LLAMA.derive(
    "minicpm",
    "MiniCPMForCausalLM",
    {"scale_emb": ("embedding_scale", 1)},
    defaults={"tie_word_embeddings": True},
    without=("head_dim",),
    biases=ATTENTION_BIAS,
    only={"sparse_config": (None,), "num_experts": (0, None), "pretraining_tp": (1,)},
    harmless=("mup_denominator",),  # of its draft models
    read_layers=_read_minicpm,
    write_layers=_write_minicpm,
    written=False,
)
"""MiniCPM 1, 2 and 4 (dense): Granite's factors of embedding, residuals and logits, derived from the model's sizes.

The class is not in transformers, but beside the published weights."""

_PARTS = experts.parts("block_sparse_moe.experts", "gate", "up", "down")  # of these the stored tensors are made
_ROUTER = "block_sparse_moe.router.layer"

GRANITEMOE = GRANITE.derive(
    "granitemoe",
    "GraniteMoeForCausalLM",
    names=experts.names(_ROUTER, _PARTS),
    without=("intermediate_size",),
    biases=ATTENTION_BIAS,
    harmless=experts.HARMLESS,
    read_layers=lambda f, config: experts.everywhere(f, read_layers(f, config), 8, 2, normalize=True),
    write_layers=lambda config: write_layers(config) | experts.width_fields(config),
    fused={
        "block_sparse_moe.input_linear": _PARTS[:2],
        "block_sparse_moe.output_linear": _PARTS[2:],
        "block_sparse_moe.router": (_ROUTER,),
    }
    | experts.stacked(_PARTS, "block_sparse_moe.experts"),
    written=False,
)
"""Granite 3 with experts: Granite's factors; the experts of a layer are two tensors."""
