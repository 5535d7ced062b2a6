"""GPT-NeoX and Pythia: rotary positions on a share of each head, attention and MLP in parallel.

Queries, keys and values of one head are adjacent rows of one matrix. Source: transformers, models/gpt_neox.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields

NAMES: dict[str, str | tuple[str, ...]] = {
    "wte": "gpt_neox.embed_in",
    "ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}


def _read(f: Fields) -> ModelConfig:
    n_embd, n_head, n_layer = (f.integer(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    for name in ("hidden_dropout", "classifier_dropout"):
        f.get(name)
    share, base = f.number("rotary_pct", 0.25, 1e-6, 1.0), f.number("rotary_emb_base", 10000.0)
    assert share is not None
    assert base is not None
    attention = ("qkv", "proj") if f.flag("attention_bias", True) else ()
    return ModelConfig(
        vocab_size=f.integer("vocab_size"),
        block_size=f.integer("max_position_embeddings"),
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        n_inner=f.integer("intermediate_size"),
        bias=("norm", *attention, "mlp"),
        activation=f.activation("hidden_act", "gelu"),
        norm_epsilon=f.number("layer_norm_eps", 1e-5, 0.0, 1.0) or 0.0,
        tie_word_embeddings=f.flag("tie_word_embeddings", False),
        family="gpt_neox",
        learned_positions=False,
        layers=kinds([None] * n_layer, f.rotary(n_embd // n_head, base, partial=share)),
        parallel_residual=f.flag("use_parallel_residual", True),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    fields = rope_fields(rotary)
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_dim,
        "hidden_act": config.activation,
        "layer_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": "qkv" in config.biases,
        "use_parallel_residual": config.parallel_residual,
        "rotary_emb_base": fields["rope_theta"],
        "rope_scaling": fields["rope_scaling"],
        "rotary_pct": rotary.dim / config.head_dim,
    }


def _order(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    if part != "attn.c_attn":
        return None
    heads = np.arange(3 * config.attn_dim).reshape(config.n_head, 3, config.head_dim)
    rows: NDArray[np.intp] = heads.transpose(1, 0, 2).reshape(-1)
    return rows


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _read,
    _write,
    NAMES,
    layer="gpt_neox.layers.{}.",
    order=_order,
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
