"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with joined matrices, and divisors of the frequencies for long contexts.

Source: transformers, models/phi3.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, partial_fields, rotated

FUSED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_CONTEXT = "original_max_position_embeddings"
_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs != "head_dim"}


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = [f.window("sliding_window", None)] * config.n_layer
    return rotated(f, config, windows, share=("partial_rotary_factor", 1.0), original=4096)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    scaled = rotary is not None and rotary.scaling != "none"
    context = {_CONTEXT: rotary.original_context} if rotary is not None and scaled else {}
    return partial_fields(config) | context | {"sliding_window": config.layer(0).window}


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _FIELDS | {"rms_norm_eps": ("norm_epsilon", 1e-5)},
    llama.NAMES | {"attn.c_attn": "self_attn.qkv_proj"},
    llama.FIXED,
    only={"attention_bias": (False,)},
    harmless=("resid_pdrop", "embd_pdrop"),
    read_layers=_read_layers,
    write_layers=_write_layers,
    fused=FUSED,
)
