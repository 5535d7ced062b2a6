"""The keys of a GGUF file that describe experts and rotary positions, from which gguf_architectures.py reads them."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf import gemma4 as gguf_gemma4
from nanoinfer.checkpoints.gguf.file import Value
from nanoinfer.config import ModelConfig, Rotary
from nanoinfer.models.rotary import frequencies

log = logging.getLogger("nanoinfer")


def describe_experts(config: ModelConfig, arch: str) -> dict[str, Value]:
    """Return the keys of a mixture of experts."""
    if (experts := config.experts) is None:
        return {}
    found: dict[str, Value] = {"expert_count": experts.count, "expert_used_count": experts.per_token}
    if arch.startswith(("qwen", "gpt-oss", "deepseek", "gemma4")):
        found["expert_feed_forward_length"] = experts.width
    if not arch.startswith(("qwen", "deepseek", "gemma4")):
        found["feed_forward_length"] = experts.width
    if experts.shared_width and config.latent is None:
        found["expert_shared_feed_forward_length"] = experts.shared_width
    return found


def describe_rotary(config: ModelConfig, arch: str) -> dict[str, Value]:
    """Return the keys of rotary positions, and of the heads that have them."""
    if (rotary := _rotary(config)) is None:
        return {}
    found: dict[str, Value] = {
        "attention.head_count_kv": config.n_kv_head,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": rotary.dim,
        "rope.freq_base": float(rotary.base),
    }
    if rotary.scaling == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rotary.factor)}
    if rotary.scaling == "yarn" and config.latent is None:  # gguf_latent.py writes that of DeepSeek
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rotary.factor),
            "rope.scaling.original_context_length": rotary.original_context,
            "rope.scaling.yarn_attn_factor": float(rotary.attention_factor),
            "rope.scaling.yarn_beta_fast": float(rotary.high_freq_factor),
            "rope.scaling.yarn_beta_slow": float(rotary.low_freq_factor),
        }
        if not rotary.truncate:
            log.warning("llama.cpp rounds the range of pairs that yarn blends: its logits differ slightly")
        if not math.isclose(rotary.attention_factor, 0.1 * math.log(rotary.factor) + 1.0, rel_tol=1e-4):
            log.warning("llama.cpp ignores attention_factor=%g: its logits differ", rotary.attention_factor)
        if rotary.query_growth:
            found["attention.temperature_scale"] = float(rotary.query_growth)
    return found


def _rotary(config: ModelConfig) -> Rotary | None:
    """Return the rotary embedding of the layers without a window, else of those with one."""
    kinds = sorted((k for k in config.layers if k.rotary is not None), key=lambda k: k.window is not None)
    return kinds[0].rotary if kinds else None


def rotary_divisors(config: ModelConfig) -> NDArray[np.float32] | None:
    """Return what Llama 3's scaling divides the frequencies by, or Gemma 4's; None for other models."""
    rotary = _rotary(config)
    if rotary is not None and config.family == "gemma4_text":
        turning = rotary.num_turning if rotary.scaling == "proportional" else rotary.dim // 2
        return np.where(np.arange(rotary.dim // 2) < turning, 1.0, gguf_gemma4.STILL).astype(np.float32)
    if rotary is None or rotary.scaling != "llama3":
        return None
    divisors: NDArray[np.float32] = frequencies(dataclasses.replace(rotary, scaling="none")) / frequencies(rotary)
    return divisors
