"""GPT-J: attention and MLP in parallel after one layer norm, adjacent dimensions rotated, a bias of the head.

Source: transformers, models/gptj.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import Fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    rotary = Rotary(f.integer("rotary_dim", 64))
    return {"layers": (LayerKind(None, rotary),) * config.n_layer}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    return {"rotary_dim": rotary.dim}


FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    {
        "vocab_size": ("vocab_size", 50400),
        "n_positions": ("block_size", 2048),
        "n_embd": ("n_embd", 4096),
        "n_layer": ("n_layer", 28),
        "n_head": ("n_head", 16),
        "n_inner": ("n_inner", None),
        "activation_function": ("activation", "gelu_new"),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    },
    {
        "wte": "transformer.wte",
        "ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
        "ln_1": "ln_1",
        "attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attn.c_proj": "attn.out_proj",
        "mlp.c_fc": "mlp.fc_in",
        "mlp.c_proj": "mlp.fc_out",
    },
    {"learned_positions": False, "norm_placement": "shared", "parallel_residual": True, "head_bias": True},
    biased=("norm", "mlp"),
    harmless=(
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "rotary", "scale_attn_weights", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    ),
    read_layers=_read_layers,
    write_layers=_write_layers,
    layer="transformer.h.{}.",
    order=interleaved,
)  # fmt: skip
