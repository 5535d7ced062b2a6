"""Mistral and its descendants: one window for all layers, or one for some."""

from __future__ import annotations

from functools import partial
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, rope_fields, rotated, window_fields
from nanoinfer.models.families.llama import LLAMA


def _read_layers(f: Fields, config: ModelConfig, default: int | None = 4096, **options: Any) -> dict[str, Any]:
    """Return the layers: all have the window `sliding_window`, or none if that is null."""
    return rotated(f, config, [f.window("sliding_window", default)] * config.n_layer, **options)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    return rope_fields(config) | {"sliding_window": config.layer(0).window}


MISTRAL = LLAMA.derive(
    "mistral",
    "MistralForCausalLM",
    defaults={"num_key_value_heads": 8},
    read_layers=_read_layers,
    write_layers=_write_layers,
)
"""Mistral 7B and models of its shape: Llama with a window."""


def _read_ministral(f: Fields, config: ModelConfig) -> dict[str, Any]:
    window = f.window("sliding_window", 4096)
    return rotated(f, config, f.windows(config.n_layer, window, lambda i: window is not None))


MINISTRAL = MISTRAL.derive("ministral", "MinistralForCausalLM", read_layers=_read_ministral, write_layers=window_fields)
"""Ministral 8B: Mistral whose layers may differ in their windows."""

_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _read_ministral3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.get("rope_parameters") is None and f.get("rope_scaling") is None:
        f.raw = {**f.raw, "rope_parameters": _YARN}
    return _read_layers(f, config, default=None)


MINISTRAL3 = MISTRAL.derive(
    "ministral3",
    "Ministral3ForCausalLM",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    read_layers=_read_ministral3,
)
"""Ministral 3: Mistral with positions scaled by yarn, and queries that grow with the position."""

_PARTS = experts.parts("block_sparse_moe.experts", "w1", "w3", "w2")


def _read_mixtral(f: Fields, config: ModelConfig) -> dict[str, Any]:
    return experts.everywhere(f, _read_layers(f, config, default=None, theta=1e6), 8, 2, normalize=True)


MIXTRAL = MISTRAL.derive(
    "mixtral",
    "MixtralForCausalLM",
    names=experts.names("block_sparse_moe.gate", _PARTS),
    defaults={"rms_norm_eps": 1e-5},
    without=("intermediate_size",),
    harmless=experts.HARMLESS,
    read_layers=_read_mixtral,
    write_layers=lambda config: _write_layers(config) | experts.width_fields(config),
    fused={"mlp.gate": ("block_sparse_moe.gate",)} | experts.stacked(_PARTS),
)
"""Mixtral: Mistral with experts."""

STARCODER2 = MISTRAL.derive(
    "starcoder2",
    "Starcoder2ForCausalLM",
    {"norm_epsilon": ("norm_epsilon", 1e-5)},
    {"mlp.c_fc": "mlp.c_fc", "mlp.c_proj": "mlp.c_proj"},
    defaults={"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    without=("head_dim", "rms_norm_eps", "mlp.c_gate", "norm", "gated_mlp"),
    biased=("norm",),
    biases={"use_bias": (("qkv", "proj", "mlp"), True)},
    harmless=("residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon"),
    read_layers=partial(_read_layers, default=None),
)
"""StarCoder2: layer norms, biases, rotary positions, an MLP without gate."""
