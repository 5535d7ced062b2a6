"""Llama 2 and 3.x, SmolLM, SmolLM2, TinyLlama. Source: transformers, models/llama.

Most other families are this one with changes, and take its tables.
"""

from __future__ import annotations

from nanoinfer.models.families.base import Biases, Family, Table

FIELDS: Table = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": ("num_kv_heads", None),
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "head_dim": ("head_size", None),
    "hidden_act": ("activation", "silu"),
    "rms_norm_eps": ("norm_epsilon", 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
FIXED = {"norm": "rms", "gated_mlp": True, "learned_positions": False}
ATTENTION_BIAS: Biases = {"attention_bias": (("qkv", "proj"), False)}
BIASES: Biases = {**ATTENTION_BIAS, "mlp_bias": (("mlp",), False)}
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
QK_NORM = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}

FAMILY = Family("llama", "LlamaForCausalLM", FIELDS, NAMES, FIXED, biases=BIASES, only={"pretraining_tp": (1, None)})
