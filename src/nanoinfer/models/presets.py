"""Shapes of published models: `random:<preset>` gives them random weights, and `roofline` and `bench` need no file.

Each preset is the content of the model's config.json on the Hugging Face Hub, without fields that have their defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.fields import Fields


def _gpt2(n_layer: int, n_head: int, n_embd: int) -> dict[str, Any]:
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return {"model_type": "gpt2", **shape, "bos_token_id": 50256, "eos_token_id": 50256}


def _shape(
    layers: int, heads: tuple[int, int], hidden: int, intermediate: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    """Return the fields that most families have. `heads`: of queries, and of keys and values."""
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab,
        "max_position_embeddings": context, **more,
    }  # fmt: skip


def _smollm2(layers: int, heads: tuple[int, int], hidden: int, intermediate: int) -> dict[str, Any]:
    return _shape(
        layers, heads, hidden, intermediate, 49152, 8192, model_type="llama", rope_theta=100000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


_LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("openai-community/gpt2", _gpt2(12, 12, 768)),
    "gpt2-medium": ("openai-community/gpt2-medium", _gpt2(24, 16, 1024)),
    "gpt2-large": ("openai-community/gpt2-large", _gpt2(36, 20, 1280)),
    "gpt2-xl": ("openai-community/gpt2-xl", _gpt2(48, 25, 1600)),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", _smollm2(30, (9, 3), 576, 1536)),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", _smollm2(32, (15, 5), 960, 2560)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _shape(
        28, (16, 8), 1024, 3072, 151936, 40960, model_type="qwen3", head_dim=128, rope_theta=1000000.0,
        tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
    )),
    "qwen3-4b": ("Qwen/Qwen3-4B", _shape(
        36, (32, 8), 2560, 9728, 151936, 40960, model_type="qwen3", head_dim=128, rope_theta=1000000.0,
        tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
    )),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", _shape(
        16, (32, 8), 2048, 8192, 128256, 131072, model_type="llama", head_dim=64, rope_theta=500000.0,
        rope_scaling=_LLAMA3, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=128000, eos_token_id=128001,
    )),
    "gemma3-270m": ("google/gemma-3-270m", _shape(
        18, (4, 1), 640, 2048, 262144, 32768, model_type="gemma3_text", head_dim=256, sliding_window=512,
        _sliding_window_pattern=6, rope_theta=1000000.0, rope_local_base_freq=10000.0, query_pre_attn_scalar=256,
        bos_token_id=2, eos_token_id=1,
    )),
    "pythia-160m": ("EleutherAI/pythia-160m", _shape(
        12, (12, 12), 768, 3072, 50304, 2048, model_type="gpt_neox", rotary_pct=0.25, bos_token_id=0,
        eos_token_id=0,
    )),
    "olmo2-1b": ("allenai/OLMo-2-0425-1B", _shape(
        16, (16, 16), 2048, 8192, 100352, 4096, model_type="olmo2", rope_theta=500000.0, rms_norm_eps=1e-6,
        eos_token_id=100257,
    )),
    "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B", _shape(
        24, (8, 2), 1024, 3584, 248320, 262144, model_type="qwen3_5_text", rope_theta=1e7, tie_word_embeddings=True,
        linear_num_value_heads=16, eos_token_id=248044,
    )),
    "lfm2-1.2b": ("LiquidAI/LFM2-1.2B", _shape(
        16, (32, 8), 2048, 12288, 65536, 128000, model_type="lfm2", full_attn_idxs=[2, 5, 8, 10, 12, 14],
        bos_token_id=1, eos_token_id=7,
    )),
    "granite-4-h-350m": ("ibm-granite/granite-4.0-h-350m", _shape(
        32, (12, 4), 768, 2048, 100352, 32768, model_type="granitemoehybrid", shared_intermediate_size=2048,
        layer_types=["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        mamba_n_heads=48, mamba_d_head=32, mamba_d_state=128, num_local_experts=0, position_embedding_type="nope",
        embedding_multiplier=12, attention_multiplier=0.015625, residual_multiplier=0.246, logits_scaling=3,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=100257, eos_token_id=100257,
    )),
}  # fmt: skip


def _read(raw: dict[str, Any]) -> ModelConfig:
    config = FAMILIES[raw["model_type"]].read(Fields(raw))
    return replace(config, bos_token_id=raw.get("bos_token_id"), eos_token_ids=(raw["eos_token_id"],))


PRESETS: dict[str, ModelConfig] = {name: _read(raw) for name, (_, raw) in _PRESETS.items()}
"""The shape of each model by its short name."""
REPOSITORIES: dict[str, str] = {name: repository for name, (repository, _) in _PRESETS.items()}
"""The model's repository on the Hub, where its config.json is."""
