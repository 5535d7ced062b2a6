"""A small random model of every family, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from helpers.gguf_files import ADDED  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0, "original_max_position_embeddings": 32,
    "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 4.0],
}  # fmt: skip
GEMMA4 = {
    "head_dim": 6, "global_head_dim": 10, "sliding_window": 6, "hidden_size_per_layer_input": 19,
    "vocab_size_per_layer_input": 61,
}  # fmt: skip
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
QWEN_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GRANITE4 = {
    "layer_types": ["attention"] * 4, "position_embedding_type": "rope", "num_local_experts": 0,
    "shared_intermediate_size": 40, "mamba_n_heads": 4,
}  # fmt: skip
MINICPM = {
    "tie_word_embeddings": True, "embedding_multiplier": 3.0, "attention_multiplier": 6**-0.5,
    "residual_multiplier": 0.7, "logits_scaling": 1.5,
}  # fmt: skip
OPT = {"num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 40}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10,
    "v_head_dim": 7, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "n_shared_experts": 2,
}  # fmt: skip
# Name -> (config class of transformers, fields beside SMALL's; None removes one)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "hidden_size": 32}),
    "gpt_neox-sequential": (
        "GPTNeoXConfig",
        {"num_key_value_heads": None, "use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "llama": ("LlamaConfig", {}),
    "llama-one-head": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}),
    "llama-all-heads": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 10, "sliding_window": 6, "num_key_value_heads": 1}),
    "gemma3-scaled": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN},
        },
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-shared": (
        "Gemma4TextConfig",
        GEMMA4
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
    ),
    "gemma4-keys-as-values": (
        "Gemma4TextConfig",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "attention_bias": True},
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        GEMMA4 | GEMMA4_MOE | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    ),
    "gemma4-experts-shared": (
        "Gemma4TextConfig",
        GEMMA4
        | GEMMA4_MOE
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "top_k_experts": 3}
        | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo2-one-head": ("Olmo2Config", {"num_key_value_heads": 1}),
    "smollm3": ("SmolLM3Config", {"head_dim": 8}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "starcoder2": ("Starcoder2Config", {}),
    "starcoder2-window": ("Starcoder2Config", {"sliding_window": 6, "use_bias": False, "num_key_value_heads": 1}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC, "head_dim": 16}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN | {"truncate": False}, "head_dim": 16}),
    "llama-mscale": (
        "LlamaConfig",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32.0}, "head_dim": 16},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 10}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 10, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 1.0},
    ),
    "phi": ("PhiConfig", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "hidden_size": 32}),
    "phi-norms": ("PhiConfig", {"hidden_size": 32, "qk_layernorm": True, "num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {}),
    "phi3-short": (
        "Phi3Config",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": 96,
            "sliding_window": 9,
        },
    ),
    "phi3-long": (
        "Phi3Config",
        {
            "rope_parameters": LONG | {"partial_rotary_factor": 0.75},
            "hidden_size": 32,
            "original_max_position_embeddings": 32,
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo": ("OlmoConfig", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 6}),
    "olmo3-yarn": (
        "Olmo3Config",
        {"sliding_window": 6, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    ),
    "ministral": ("MinistralConfig", {"sliding_window": 5, "head_dim": 6}),
    "ministral-layers": (
        "MinistralConfig",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2, "head_dim": 8},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 8,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 12, "factor": 8.0}
            | {"llama_4_scaling_beta": 0.5},
        },
    ),
    "stablelm": ("StableLmConfig", {"hidden_size": 32}),
    "stablelm-parallel": ("StableLmConfig", {"hidden_size": 32, "use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm-norms": ("StableLmConfig", {"hidden_size": 32, "qk_layernorm": True, "use_parallel_residual": True}),
    "glm": ("GlmConfig", {"head_dim": 8}),
    "glm4": ("Glm4Config", {"head_dim": 12}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5, "attention_bias": True}),
    "cohere-norms": ("CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {"sliding_window": 6, "logit_scale": 0.6}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        GRANITE4 | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 0.5},
    ),
    "exaone": ("LlamaConfig", {"head_dim": 10, "rope_parameters": LLAMA3}),
    "minicpm": ("GraniteConfig", MINICPM),
    "minicpm-long": (
        "GraniteConfig",
        MINICPM | {"rope_parameters": LONG, "original_max_position_embeddings": 32, "tie_word_embeddings": False},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 6}),
    "exaone4-no-window": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 10, "use_bias": True}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 8, "attention_out_bias": True}),
    "arcee": ("ArceeConfig", {}),
    "nemotron": ("NemotronConfig", {"hidden_size": 32}),
    "nemotron-bias": (
        "NemotronConfig",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}}
        | {"head_dim": 12},
    ),
    "jais2": ("Jais2Config", {}),
    "helium": ("HeliumConfig", {"head_dim": 6}),
    "gptj": (
        "GPTJConfig",
        {
            "hidden_size": None, "intermediate_size": None, "num_hidden_layers": None, "num_attention_heads": None,
            "num_key_value_heads": None, "max_position_embeddings": None, "n_embd": 40, "n_layer": 3, "n_head": 4,
            "n_positions": 96, "n_inner": 48, "rotary_dim": 6,
        },
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None, "num_layers": 4,
            "num_heads": 4, "window_size": 7, "attention_types": [[["global", "local"], 2]],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "intermediate_size": 20, "sliding_window": 7}),
    "mixtral-all": ("MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 8}),
    "qwen2_moe": ("Qwen2MoeConfig", QWEN_MOE | {"shared_expert_intermediate_size": 7, "norm_topk_prob": True}),
    "qwen2_moe-windows": (
        "Qwen2MoeConfig",
        QWEN_MOE
        | {"shared_expert_intermediate_size": 9, "qkv_bias": False, "decoder_sparse_step": 2}
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN_MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-mixed": (
        "Qwen3MoeConfig",
        QWEN_MOE
        | {"mlp_only_layers": [0, 2], "use_sliding_window": True, "sliding_window": 6, "num_experts_per_tok": 1},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 4, "intermediate_size": 12}),
    "olmoe-normalized": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12, "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 0.5,
        },
    ),
    "opt": ("OPTConfig", OPT),
    "opt-untied": (
        "OPTConfig", OPT | {"tie_word_embeddings": False, "enable_bias": False, "activation_function": "gelu"},
    ),
    "bitnet": ("BitNetConfig", {}),
    "bitnet-one-head": ("BitNetConfig", {"num_key_value_heads": 1, "attention_bias": True}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6,
            "intermediate_size": 20, "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gpt_oss-plain": (
        "GptOssConfig",
        {
            "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 9,
            "attention_bias": False, "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            "rope_parameters": PLAIN, "num_key_value_heads": 1, "intermediate_size": 12,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek_v2-groups": (
        "DeepseekV2Config",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_routed_experts": 6, "n_group": 3, "topk_group": 2}
        | {"routed_scaling_factor": 1.7, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
    "deepseek_v3-plain": (
        "DeepseekV3Config",
        LATENT
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 2}
        | {"v_head_dim": 12, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "nanochat": ("NanoChatConfig", {}),
    "nanochat-all-heads": ("NanoChatConfig", {"num_key_value_heads": 4, "final_logit_softcapping": None}),
}  # fmt: skip

EXPERTS = [case for case, (c, _) in CASES.items() if c.startswith(("Mixtral", "Deepseek")) or c.endswith("oeConfig")]
"""The cases with mixtures of experts that transformers stores in two forms."""

AS_PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "exaone": (
        {
            "architectures": ["ExaoneForCausalLM"], "num_layers": "num_hidden_layers",
            "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
        },
        {
            "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn.attention",
            "o_proj": "out_proj", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
        },
    ),
    "minicpm": (
        {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16}, {},
    ),
}  # fmt: skip
"""Families that transformers has no class of -> what differs from the class that computes the same: fields of
config.json, those of another name by it, and parts of the names of tensors."""

_HYBRID = {"num_hidden_layers": 5, "head_dim": 10}
_DELTA = _HYBRID | {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 3,
    "linear_num_value_heads": 6, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 6, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.4},
}  # fmt: skip
_STATE = {
    "num_hidden_layers": 5, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 3, "mamba_d_state": 7,
    "mamba_d_conv": 3, "mamba_chunk_size": 32,
}  # fmt: skip
_MAMBA = _STATE | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
    "logits_scaling": 0.5, "position_embedding_type": None,
}  # fmt: skip
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig", _DELTA | QWEN_MOE | {"shared_expert_intermediate_size": 20, "intermediate_size": None}
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        _DELTA | QWEN_MOE | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "granitemoehybrid-mamba": ("GraniteMoeHybridConfig", GRANITE4 | _MAMBA),
    "granitemoehybrid-mamba-experts": (
        "GraniteMoeHybridConfig",
        GRANITE4 | _MAMBA | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12,
        "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "mamba_d_conv": 4, "mamba_d_head": "auto", "residual_multiplier": 0.5},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": None, "hybrid_override_pattern": "M-MM*-*M-", "mamba_num_heads": 6,
            "mamba_head_dim": 7, "n_groups": 3, "ssm_state_size": 5, "conv_kernel": 3, "head_dim": 10, "use_bias": True,
            "chunk_size": 32,
        },
    ),
    "nemotron_h-experts": (
        "NemotronHConfig",
        {
            "num_hidden_layers": None, "hybrid_override_pattern": "ME*-M*EM-", "mamba_num_heads": 6,
            "mamba_head_dim": 7, "n_groups": 3, "ssm_state_size": 5, "conv_kernel": 3, "head_dim": 10,
            "chunk_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 2,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        _STATE | {
            "mamba_d_ssm": 42, "mamba_n_heads": 6, "mamba_d_head": 7, "num_hidden_layers": 3, "lm_head_multiplier": 0.4,
            "embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.4, "mlp_bias": True,
            "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 1.2, 0.8, 1.3, 0.9],
        },
    ),
    "falcon_h1-norm": (
        "FalconH1Config",
        _STATE | {"mamba_d_ssm": None, "num_hidden_layers": 3, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "lfm2": ("Lfm2Config", _HYBRID | {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _HYBRID | {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "num_experts": 6}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 1.3},
    ),
}  # fmt: skip
"""The cases with recurrent layers."""
CASES |= RECURRENT

GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2-10": ("Gemma2Config", {"head_dim": 10, "sliding_window": 6, "query_pre_attn_scalar": 10}),
    "gemma3-7-layers": (
        "Gemma3TextConfig",
        {
            "head_dim": 10, "query_pre_attn_scalar": 10, "num_hidden_layers": 7, "sliding_window": 6,
            "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN},
        },
    ),
    "gemma4-two-shared": (
        "Gemma4TextConfig",
        GEMMA4
        | GEMMA4_MOE
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
    ),
    "bitnet-silu": ("BitNetConfig", {"hidden_act": "silu", "tie_word_embeddings": True}),
    "qwen2_moe-plain": ("Qwen2MoeConfig", QWEN_MOE | {"shared_expert_intermediate_size": 7}),
    "llama3-8192": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}, "head_dim": 16},
    ),
}  # fmt: skip
"""Further cases for models in GGUF files."""


def make_config(case: str) -> Any:
    """Return the config of transformers of a case."""
    name, fields = CASES[case]
    return getattr(transformers, name)(**{k: v for k, v in (SMALL | fields).items() if v is not None or k not in SMALL})


def make_folder(case: str, folder: Path) -> Any:
    """Save a random model of a case into a folder; return the model of transformers."""
    model = random_model(make_config(case))
    model.save_pretrained(folder)
    if (family := case.partition("-")[0]) in AS_PUBLISHED:
        rename(folder, family)
    return model


def rename(folder: Path, family: str) -> None:
    """Give a folder the fields and the names of tensors of a family in AS_PUBLISHED."""
    fields, names = AS_PUBLISHED[family]
    old = json.loads((folder / "config.json").read_text())
    new = {name: old.pop(value) if str(value) in old else value for name, value in fields.items()}
    (folder / "config.json").write_text(json.dumps(old | new | {"model_type": family}))
    tensors = safetensors.load_file(folder / "model.safetensors")
    for part, theirs in names.items():
        tensors = {name.replace(part, theirs): tensor for name, tensor in tensors.items()}
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def random_model(config: Any) -> Any:
    """Return a random model of transformers, whose layers, norms and positions all change its logits."""
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    delta = config.model_type.startswith(("qwen3_5", "qwen3_next"))
    size = 0.15 if delta else 0.3  # states of many tokens multiply rounding errors
    with torch.no_grad():
        for name, p in model.named_parameters():  # the initial values are so small that positions hardly matter
            added = config.model_type in ADDED
            one = p.dim() == 1 and name.endswith(("weight", "router.scale", "per_expert_scale")) and not added
            p.copy_(torch.randn_like(p) * size + float(one))
        for name, p in model.named_buffers():
            if name.endswith("layer_scalar"):
                p.uniform_(0.6, 1.2)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                p.copy_(torch.randn_like(p) * 0.3)
    return model
