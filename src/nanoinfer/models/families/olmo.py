"""OLMo in its versions, and EXAONE 4, whose norms are where OLMo 2 has them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, rope_fields, rotated, window_fields
from nanoinfer.models.families.llama import ATTENTION_BIAS, LLAMA, QK_NORM

OLMO = LLAMA.derive(
    "olmo",
    "OlmoForCausalLM",
    fixed={"norm": "layer", "norm_weight": "none"},
    without=("head_dim", "rms_norm_eps"),
    biases=ATTENTION_BIAS,
    only={"clip_qkv": (None,)},
)
"""OLMo: Llama with layer norms that have no weights."""

OLMO2 = LLAMA.derive(
    "olmo2",
    "Olmo2ForCausalLM",
    names=QK_NORM | {"post_1": "post_attention_layernorm", "post_2": "post_feedforward_layernorm"},
    fixed={"norm_placement": "after", "qk_norm": "whole"},
    defaults={"rms_norm_eps": 1e-5},
    without=("ln_1", "ln_2"),
    biases=ATTENTION_BIAS,
)
"""OLMo 2: norms after attention and MLP, and a norm of all heads' queries and keys."""


def _read_olmo3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = f.windows(config.n_layer, f.window("sliding_window", 4096), lambda i: (i + 1) % 4 != 0)
    everywhere = f.rotary(config, 500000.0, kind="full_attention")
    nearby = f.rotary(config, 500000.0, kind="sliding_attention", scaled=False)
    return {"layers": tuple(LayerKind(w, everywhere if w is None else nearby) for w in windows)}


def _write_olmo3(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config)
    old = {"rope_type": "default"} if fields["rope_scaling"] is None else fields["rope_scaling"]
    nearby = next((kind.rotary for kind in config.layers if kind.window is not None), None)
    base = fields["rope_theta"] if nearby is None else nearby.base
    return fields | {
        "rope_parameters": {
            "full_attention": old | {"rope_theta": fields["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        }
    }


OLMO3 = replace(
    OLMO2, model_type="olmo3", architecture="Olmo3ForCausalLM", read_layers=_read_olmo3, write_layers=_write_olmo3
)
"""OLMo 3: OLMo 2 whose layers are local but for every fourth, which alone has scaled rotary positions."""


def _read_olmoe(f: Fields, config: ModelConfig) -> dict[str, Any]:
    return experts.everywhere(f, rotated(f, config), 64, 8, normalize=f.flag("norm_topk_prob", False))


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    fields = experts.width_fields(config, count="num_experts", width="intermediate_size")
    return rope_fields(config) | fields | {"norm_topk_prob": config.experts is not None and config.experts.normalize}


OLMOE = LLAMA.derive(
    "olmoe",
    "OlmoeForCausalLM",
    names=QK_NORM | experts.NAMES,
    fixed={"qk_norm": "whole"},
    defaults={"rms_norm_eps": 1e-5},
    without=("intermediate_size",),
    biases=ATTENTION_BIAS,
    only={"clip_qkv": (None,)},
    harmless=experts.HARMLESS,
    read_layers=_read_olmoe,
    write_layers=_write_olmoe,
    fused=experts.STACKED,
)
"""OLMoE: Llama with experts, and a norm of all heads' queries and keys."""


def _read_exaone4(f: Fields, config: ModelConfig) -> dict[str, Any]:
    window, pattern = f.window("sliding_window", 4096), f.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and re.fullmatch("L{0,99}G", pattern):  # "LLLG" is 4
        pattern = len(pattern)
    if window is not None and (type(pattern) is not int or pattern < 1):
        raise f.error("sliding_window_pattern", 'is neither a positive integer nor of the form "LLLG"')
    windows = f.windows(config.n_layer, window, lambda i: window is not None and (i + 1) % pattern != 0)
    rotary = f.rotary(config)
    return {"layers": tuple(LayerKind(w, rotary if window is None or w is not None else None) for w in windows)}


EXAONE4 = OLMO2.derive(
    "exaone4",
    "Exaone4ForCausalLM",
    defaults={"num_key_value_heads": 32},
    fixed={"qk_norm": "head"},
    read_layers=_read_exaone4,
    write_layers=window_fields,
)
"""EXAONE 4: norms after attention and MLP and of each head; with windows, global layers have no positions."""
