"""OPT: GPT-2 with ReLU, whose table of positions begins at its third row. Source: transformers, models/opt."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.only("word_embed_proj_dim", config.n_embd, None)
    return {}


FAMILY = Family(
    "opt",
    "OPTForCausalLM",
    {
        "vocab_size": ("vocab_size", 50272),
        "max_position_embeddings": ("block_size", 2048),
        "hidden_size": ("n_embd", 768),
        "num_hidden_layers": ("n_layer", 12),
        "num_attention_heads": ("n_head", 12),
        "ffn_dim": ("n_inner", 3072),
        "activation_function": ("activation", "relu"),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    {
        "wte": "model.decoder.embed_tokens",
        "wpe": "model.decoder.embed_positions",
        "ln_f": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
        "ln_1": "self_attn_layer_norm",
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": "self_attn.out_proj",
        "ln_2": "final_layer_norm",
        "mlp.c_fc": "fc1",
        "mlp.c_proj": "fc2",
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
    read_layers=_read_layers,
    write_layers=lambda config: {"word_embed_proj_dim": config.n_embd},
    layer="model.decoder.layers.{}.",
    first_row={"wpe": 2},
)
