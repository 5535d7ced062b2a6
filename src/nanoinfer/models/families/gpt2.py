"""GPT-2 and the families of its time: OPT, GPT-J, GPT-NeoX."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import BIASES, LayerKind, ModelConfig, Rotary
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import Fields, rope_fields, rotated
from nanoinfer.models.families.llama import INNER_ATTENTION, LLAMA

_PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
_HARMLESS = (
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
)  # fmt: skip

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "vocab_size": ("vocab_size", 50257), "n_positions": ("block_size", 1024), "n_embd": ("n_embd", 768),
        "n_layer": ("n_layer", 12), "n_head": ("n_head", 12), "n_inner": ("n_inner", None),
        "activation_function": ("activation", "gelu_new"), "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    {"lm_head": "lm_head"}
    | {name: f"transformer.{name}" for name in ("wte", "wpe", "ln_f")}
    | {name: name for name in _PARTS},
    {},
    biased=BIASES,
    only={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,), "pruned_heads": ({}, None),
    },
    harmless=_HARMLESS,
    read_layers=lambda f, config: {},
    write_layers=lambda config: {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_ctx": config.block_size},
    layer="transformer.h.{}.",
    transposed=frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)  # fmt: skip
"""GPT-2. Matrices are stored as (in, out)."""


def _read_opt(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.only("word_embed_proj_dim", config.n_embd, None)
    return {}


OPT = Family(
    "opt",
    "OPTForCausalLM",
    {
        "vocab_size": ("vocab_size", 50272), "max_position_embeddings": ("block_size", 2048),
        "hidden_size": ("n_embd", 768), "num_hidden_layers": ("n_layer", 12), "num_attention_heads": ("n_head", 12),
        "ffn_dim": ("n_inner", 3072), "activation_function": ("activation", "relu"),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    {
        "wte": "model.decoder.embed_tokens", "wpe": "model.decoder.embed_positions",
        "ln_f": "model.decoder.final_layer_norm", "lm_head": "lm_head", "ln_1": "self_attn_layer_norm",
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": "self_attn.out_proj", "ln_2": "final_layer_norm", "mlp.c_fc": "fc1", "mlp.c_proj": "fc2",
    },
    {},
    biased=("norm",),
    biases={"enable_bias": (("qkv", "proj", "mlp"), True)},
    only={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    harmless=("dropout", "activation_dropout", "layerdrop", "init_std"),
    read_layers=_read_opt,
    write_layers=lambda config: {"word_embed_proj_dim": config.n_embd},
    layer="model.decoder.layers.{}.",
    first_row={"wpe": 2},
)  # fmt: skip
"""OPT: GPT-2 with ReLU, whose table of positions begins at its third row."""


def _read_gptj(f: Fields, config: ModelConfig) -> dict[str, Any]:
    rotary = Rotary(f.integer("rotary_dim", 64))
    return {"layers": (LayerKind(None, rotary),) * config.n_layer}


def _write_gptj(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    return {"rotary_dim": rotary.dim}


GPTJ = GPT2.derive(
    "gptj",
    "GPTJForCausalLM",
    names={
        "attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.c_proj": "attn.out_proj",
        "mlp.c_fc": "mlp.fc_in", "mlp.c_proj": "mlp.fc_out",
    },
    fixed={"learned_positions": False, "norm_placement": "shared", "parallel_residual": True, "head_bias": True},
    defaults={
        "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "tie_word_embeddings": False,
    },
    without=("wpe", "ln_2"),
    biased=("norm", "mlp"),
    harmless=(*_HARMLESS, "rotary", "scale_attn_weights"),
    read_layers=_read_gptj,
    write_layers=_write_gptj,
    order=interleaved,
)  # fmt: skip
"""GPT-J: attention and MLP in parallel after one layer norm, adjacent dimensions rotated, a bias of the head."""


def _read_neo(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = {"global": None, "local": f.integer("window_size", 256)}
    match f.get("attention_types", [[[*windows], 12]]):
        case [[list(kinds), int(count)]] if len(kinds) * count == config.n_layer and {*map(str, kinds)} <= {*windows}:
            return {"layers": tuple(LayerKind(windows[kind]) for kind in kinds) * count}
    raise f.error("attention_types", f"is not [[kinds, repeats]] of {config.n_layer} layers that are global or local")


def _write_neo(config: ModelConfig) -> dict[str, Any]:
    kinds = ["global" if kind.window is None else "local" for kind in config.layers]
    return {"attention_types": [[kinds, 1]], "window_size": max(kind.window or 1 for kind in config.layers)}


GPT_NEO = OPT.derive(
    "gpt_neo",
    "GPTNeoForCausalLM",
    {
        "num_layers": ("n_layer", 24), "num_heads": ("n_head", 16), "intermediate_size": ("n_inner", None),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    },
    dict(GPT2.names) | INNER_ATTENTION,
    {"attention_scale": 1.0},
    defaults={"vocab_size": 50257, "hidden_size": 2048, "activation_function": "gelu_new"},
    without=("num_hidden_layers", "num_attention_heads", "ffn_dim"),
    biased=("norm", "proj", "mlp"),
    harmless=(*_HARMLESS, "attention_layers", "resid_dropout", "embed_dropout", "classifier_dropout"),
    read_layers=_read_neo,
    write_layers=_write_neo,
    layer=GPT2.layer,
)  # fmt: skip
"""GPT-Neo and TinyStories: GPT-2 whose every second layer has a window, with scores that are not scaled."""


def _write_neox(config: ModelConfig) -> dict[str, Any]:
    rotary, fields = config.layer(0).rotary, rope_fields(config)
    assert rotary is not None
    return {
        "rotary_emb_base": fields["rope_theta"],
        "rope_scaling": fields["rope_scaling"],
        "rotary_pct": rotary.dim / config.head_dim,
    }


def _order_neox(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    if part != "attn.c_attn":
        return None
    heads = np.arange(3 * config.attn_dim).reshape(config.n_head, 3, config.head_dim)
    rows: NDArray[np.intp] = heads.transpose(1, 0, 2).reshape(-1)
    return rows


GPT_NEOX = LLAMA.derive(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5), "use_parallel_residual": ("parallel_residual", True)},
    {
        "wte": "gpt_neox.embed_in", "ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
        "ln_1": "input_layernorm", "attn.c_attn": "attention.query_key_value", "attn.c_proj": "attention.dense",
        "ln_2": "post_attention_layernorm", "mlp.c_fc": "mlp.dense_h_to_4h", "mlp.c_proj": "mlp.dense_4h_to_h",
    },
    defaults={"hidden_act": "gelu"},
    without=("num_key_value_heads", "head_dim", "rms_norm_eps", "mlp.c_gate", "norm", "gated_mlp"),
    biased=("norm", "mlp"),
    biases={"attention_bias": (("qkv", "proj"), True)},
    harmless=("hidden_dropout", "classifier_dropout"),
    read_layers=partial(rotated, share=("rotary_pct", 0.25), theta_field="rotary_emb_base"),
    write_layers=_write_neox,
    layer="gpt_neox.layers.{}.",
    order=_order_neox,
)  # fmt: skip
"""GPT-NeoX and Pythia: rotary positions on a share of each head, attention and MLP in parallel.

Queries, keys and values of one head are adjacent rows of one matrix."""
