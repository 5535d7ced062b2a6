"""GPT-2. Matrices are stored as (in, out). Source: transformers, models/gpt2."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families.base import Family, Fields

PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
TOP = ("wte", "wpe", "ln_f")


def _read(f: Fields) -> ModelConfig:
    f.only("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        f.only(name, False)
    f.only("pruned_heads", {}, None)
    for name in _HARMLESS:
        f.get(name)
    epsilon = f.number("layer_norm_epsilon", 1e-5, 0.0, 1.0)
    assert epsilon is not None
    return ModelConfig(
        vocab_size=f.integer("vocab_size", 50257),
        block_size=f.integer("n_positions", 1024),
        n_layer=f.integer("n_layer", 12),
        n_head=f.integer("n_head", 12),
        n_embd=f.integer("n_embd", 768),
        n_inner=None if f.get("n_inner") is None else f.integer("n_inner"),
        activation=f.activation("activation_function", "gelu_new"),
        norm_epsilon=epsilon,
        tie_word_embeddings=f.flag("tie_word_embeddings", True),
    )


_HARMLESS = (
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
)  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": config.activation,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.n_inner,
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _read,
    _write,
    {name: f"transformer.{name}" for name in TOP} | {name: name for name in PARTS} | {"lm_head": "lm_head"},
    layer="transformer.h.{}.",
    transposed=frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
