"""Llama 2 and 3.x, SmolLM, SmolLM2, TinyLlama. Source: transformers, models/llama."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields

NAMES: dict[str, str | tuple[str, ...]] = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "lm_head": "lm_head",
    "ln_1": "input_layernorm",
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_gate": "mlp.gate_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def shape(f: Fields, *, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """Return what all families that descend from Llama share.

    Args:
        f: the fields of config.json.
        eps: default of rms_norm_eps.
        tied: default of tie_word_embeddings.
    """
    n_head = f.integer("num_attention_heads")
    return {
        "vocab_size": f.integer("vocab_size"),
        "block_size": f.integer("max_position_embeddings"),
        "n_layer": f.integer("num_hidden_layers"),
        "n_head": n_head,
        "num_kv_heads": f.integer("num_key_value_heads", n_head, nullable=True),
        "n_embd": f.integer("hidden_size"),
        "n_inner": f.integer("intermediate_size"),
        "activation": f.activation("hidden_act", "silu"),
        "norm": "rms",
        "norm_epsilon": f.number("rms_norm_eps", eps, 0.0, 1.0),
        "tie_word_embeddings": f.flag("tie_word_embeddings", tied),
        "gated_mlp": True,
        "learned_positions": False,
        "bias": biases(f),
    }


def biases(f: Fields) -> tuple[str, ...]:
    """Return where the fields `attention_bias` and `mlp_bias` ask for biases; both are false by default."""
    attention = ("qkv", "proj") if f.flag("attention_bias", False) else ()
    return (*attention, "mlp") if f.flag("mlp_bias", False) else attention


def head_dim(f: Fields, default: int | None = None) -> int:
    """Return the width of a head: the field, a default, or hidden_size / num_attention_heads."""
    width = f.integer("hidden_size") // f.integer("num_attention_heads")
    return f.integer("head_dim", width if default is None else default, nullable=True)


def shape_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json that `shape` reads."""
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_dim,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu_new" else config.activation,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": "proj" in config.biases,
        "mlp_bias": "mlp" in config.biases,
    }


def _read(f: Fields) -> ModelConfig:
    f.only("pretraining_tp", 1, None)
    width, n_layer = head_dim(f), f.integer("num_hidden_layers")
    return ModelConfig(family="llama", head_size=width, layers=kinds([None] * n_layer, f.rotary(width)), **shape(f))


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    return shape_fields(config) | rope_fields(rotary)


FAMILY = Family("llama", "LlamaForCausalLM", _read, _write, NAMES)
