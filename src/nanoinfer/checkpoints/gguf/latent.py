"""llama.cpp's architecture deepseek2: its metadata as fields of config.json and back, and the names of its tensors.

A file with `key_length_mla` has one matrix of keys and one of values for each head, as ours are; files before April
2025 have both in one matrix of all heads. Source: llama.cpp, convert_hf_to_gguf.py and src/models/deepseek2.cpp.
"""

from __future__ import annotations

import logging
from typing import Any

from nanoinfer.checkpoints.gguf.file import Value
from nanoinfer.checkpoints.gguf.metadata import Metadata
from nanoinfer.config import ModelConfig
from nanoinfer.models.families import FAMILIES

log = logging.getLogger("nanoinfer")

_LITE = 27  # layers of V2-Lite, by which llama.cpp knows it

NAMES: dict[str, str | tuple[str, ...]] = {
    "attn.c_attn": ("attn_q", "attn_q_a", "attn_kv_a_mqa"),
    "attn.q_norm": "attn_q_a_norm",
    "attn.q_b": "attn_q_b",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.k_b": "attn_k_b",
    "attn.v_b": "attn_v_b",
    "mlp.correction": "exp_probs_b",
}
OF_HEADS = ("attn_k_b.weight", "attn_v_b.weight")
"""Endings of tensors with three dimensions, the heads first."""
JOINED_HEADS = "attn_kv_b"
"""Keys and values of all heads in one matrix, in files before April 2025."""


def read(m: Metadata) -> dict[str, Any]:
    """Return the fields of config.json that other families lack; DeepSeek-V3's if experts are chosen by sigmoids."""
    m.only(m.key("expert_gating_func"), 1, 2)
    normalized = m.flag(m.key("expert_weights_norm"), False)
    # Files of GLM-4.7-Flash name no function; those of DeepSeek-V2 that name none do not normalize.
    corrected = m.get(m.key("expert_gating_func"), 2 if normalized else 1) == 2
    groups = m.int_("expert_group_count", 1)
    turned = m.int_("rope.dimension_count")
    whole, values = (m.int_(f"attention.{name}_length") for name in ("key", "value"))
    if "attention.key_length_mla" in m:  # the others are then those of the latent
        whole, values = (m.int_(f"attention.{name}_length_mla") for name in ("key", "value"))
    sizes = {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": whole - turned,
        "v_head_dim": values,
        "kv_lora_rank": m.int_("attention.kv_lora_rank"),
        "q_lora_rank": m.int_("attention.q_lora_rank") if "attention.q_lora_rank" in m else None,
    }
    mixture = {
        "n_routed_experts": m.int_("expert_count"),
        "num_experts_per_tok": m.int_("expert_used_count"),
        "moe_intermediate_size": m.int_("expert_feed_forward_length"),
        "n_shared_experts": m.int_("expert_shared_count"),
        "routed_scaling_factor": m.float_("expert_weights_scale", 1.0),
        "norm_topk_prob": normalized,
        "first_k_dense_replace": m.integer(m.key("leading_dense_block_count"), 0, 0),
        "n_group": groups,
        "topk_group": m.int_("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if corrected else "group_limited_greedy" if groups > 1 else "greedy",
    }
    kind = {"model_type": "deepseek_v3" if corrected else "deepseek_v2"}
    return sizes | mixture | kind


def describe(config: ModelConfig) -> dict[str, Value]:
    """Return the keys of latent attention and its experts. The fields of config.json have the numbers."""
    fields, latent, mixture = FAMILIES[config.family].write(config), config.latent, config.experts
    assert latent is not None
    assert mixture is not None
    found: dict[str, Value] = {
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.query_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
        "leading_dense_block_count": fields["first_k_dense_replace"],
        "expert_shared_count": fields["n_shared_experts"],
        "expert_weights_scale": float(mixture.scale),
        "expert_weights_norm": mixture.normalize,
        "expert_gating_func": 2 if mixture.scoring == "sigmoid" else 1,
    }
    if latent.query_rank:
        found["attention.q_lora_rank"] = latent.query_rank
    elif config.n_layer != _LITE:
        log.warning("llama.cpp loads models without a latent of queries only if they have %d layers", _LITE)
    if mixture.groups > 1:
        found |= {"expert_group_count": mixture.groups, "expert_group_used_count": mixture.groups_per_token}
        if mixture.group_top == 1:
            log.warning("llama.cpp scores groups of experts by their best two, the model by their best one")
    if (scaling := fields["rope_scaling"]) is not None:
        found |= {
            "rope.scaling.type": scaling["rope_type"],
            "rope.scaling.factor": float(scaling["factor"]),
            "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings", config.block_size),
            "rope.scaling.yarn_beta_fast": float(scaling.get("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": float(scaling.get("beta_slow", 1.0)),
            "rope.scaling.yarn_log_multiplier": 0.1 * float(scaling.get("mscale_all_dim", 0.0)),
        }
    return found
