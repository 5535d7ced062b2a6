"""Phi 1 to 4."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import BIASES, ModelConfig
from nanoinfer.models.families.fields import Fields, partial_fields, rotated
from nanoinfer.models.families.llama import LLAMA


def _read_phi(f: Fields, config: ModelConfig) -> dict[str, Any]:
    layers = rotated(f, config, share=("partial_rotary_factor", 0.5))
    return layers | {"qk_norm": "head" if f.flag("qk_layernorm", False) else "none"}


PHI = LLAMA.derive(
    "phi",
    "PhiForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5)},
    {
        "ln_f": "model.final_layernorm",
        "attn.c_proj": "self_attn.dense",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    },
    {"norm_placement": "shared", "parallel_residual": True, "head_bias": True},
    defaults={"hidden_act": "gelu_new"},
    without=("head_dim", "rms_norm_eps", "ln_2", "mlp.c_gate", "norm", "gated_mlp"),
    biased=BIASES,
    harmless=("resid_pdrop", "embd_pdrop", "rotary_dim"),
    read_layers=_read_phi,
    write_layers=lambda config: partial_fields(config) | {"qk_layernorm": config.qk_norm == "head"},
)
"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, biases everywhere, the head included.
"""

GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_CONTEXT = "original_max_position_embeddings"


def _read_phi3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = [f.window("sliding_window", None)] * config.n_layer
    return rotated(f, config, windows, share=("partial_rotary_factor", 1.0), original=4096)


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    scaled = rotary is not None and rotary.scaling != "none"
    context = {_CONTEXT: rotary.original_context} if rotary is not None and scaled else {}
    return partial_fields(config) | context | {"sliding_window": config.layer(0).window}


PHI3 = LLAMA.derive(
    "phi3",
    "Phi3ForCausalLM",
    names={"attn.c_attn": "self_attn.qkv_proj"},
    defaults={"rms_norm_eps": 1e-5},
    without=("head_dim",),
    only={"attention_bias": (False,)},
    harmless=("resid_pdrop", "embd_pdrop"),
    read_layers=_read_phi3,
    write_layers=_write_phi3,
    fused=GATE_UP,
    written=False,
)
"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with joined matrices, and divisors of the frequencies for long contexts."""
