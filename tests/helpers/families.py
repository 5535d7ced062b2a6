"""A small random model of every family, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

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
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
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
    "olmo2": ("Olmo2Config", {}),
    "olmo2-one-head": ("Olmo2Config", {"num_key_value_heads": 1}),
    "smollm3": ("SmolLM3Config", {"head_dim": 8}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "starcoder2": ("Starcoder2Config", {}),
    "starcoder2-window": ("Starcoder2Config", {"sliding_window": 6, "use_bias": False, "num_key_value_heads": 1}),
    "nanochat": ("NanoChatConfig", {}),
    "nanochat-all-heads": ("NanoChatConfig", {"num_key_value_heads": 4, "final_logit_softcapping": None}),
}

GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-7-layers": (
        "Gemma3TextConfig",
        {
            "head_dim": 10, "query_pre_attn_scalar": 10, "num_hidden_layers": 7, "sliding_window": 6,
            "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN},
        },
    ),
    "llama3-8192": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}, "head_dim": 16},
    ),
}  # fmt: skip
"""Further cases for models in GGUF files."""


def make_folder(case: str, folder: Path) -> Any:
    """Save a random model of a case into a folder; return the model of transformers."""
    name, fields = CASES[case]
    given = {k: v for k, v in (SMALL | fields).items() if v is not None or k not in SMALL}
    config = getattr(transformers, name)(**given)
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # the initial values are so small that positions hardly matter
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.dim() == 1 and name.endswith("weight") else 0.0))
    model.save_pretrained(folder)
    return model
