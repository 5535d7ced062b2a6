"""GPT-NeoX and Pythia: rotary positions on a share of each head, attention and MLP in parallel.

Queries, keys and values of one head are adjacent rows of one matrix. Source: transformers, models/gpt_neox.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import rope_fields, rotated

_FIELDS = {
    theirs: ours
    for theirs, ours in llama.FIELDS.items()
    if theirs not in ("num_key_value_heads", "head_dim", "rms_norm_eps")
}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    rotary, fields = config.layer(0).rotary, rope_fields(config)
    assert rotary is not None
    return {
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
    _FIELDS
    | {
        "hidden_act": ("activation", "gelu"),
        "layer_norm_eps": ("norm_epsilon", 1e-5),
        "use_parallel_residual": ("parallel_residual", True),
    },
    {
        "wte": "gpt_neox.embed_in",
        "ln_f": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "ln_1": "input_layernorm",
        "attn.c_attn": "attention.query_key_value",
        "attn.c_proj": "attention.dense",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    },
    {"learned_positions": False},
    biased=("norm", "mlp"),
    biases={"attention_bias": (("qkv", "proj"), True)},
    harmless=("hidden_dropout", "classifier_dropout"),
    read_layers=partial(rotated, share=("rotary_pct", 0.25), theta_field="rotary_emb_base"),
    write_layers=_write_layers,
    layer="gpt_neox.layers.{}.",
    order=_order,
)
