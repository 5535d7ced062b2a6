"""GPT-2. Matrices are stored as (in, out). Source: transformers, models/gpt2."""

from __future__ import annotations

from nanoinfer.config import BIASES
from nanoinfer.models.families.base import Family

_PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "vocab_size": ("vocab_size", 50257),
        "n_positions": ("block_size", 1024),
        "n_embd": ("n_embd", 768),
        "n_layer": ("n_layer", 12),
        "n_head": ("n_head", 12),
        "n_inner": ("n_inner", None),
        "activation_function": ("activation", "gelu_new"),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    {"lm_head": "lm_head"}
    | {name: f"transformer.{name}" for name in ("wte", "wpe", "ln_f")}
    | {name: name for name in _PARTS},
    {},
    biased=BIASES,
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({}, None),
    },
    harmless=(
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj",
    ),
    read_layers=lambda f, config: {},
    write_layers=lambda config: {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_ctx": config.block_size},
    layer="transformer.h.{}.",
    transposed=frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)  # fmt: skip
