"""DeepSeek-V2 and V3: latent attention (latent.py) and experts, some of which are shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import experts, latent
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.families.llama import LLAMA


def _read_v2(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.only("topk_method", "greedy", "group_limited_greedy")
    groups = {"groups": f.get("n_group"), "groups_per_token": f.get("topk_group")}
    mixture = latent.mixture_of(
        f,
        count=64,
        chosen=6,  # of V2 and V2-Lite; transformers has no default
        width=1407,
        shared=2,
        normalize=False,
        scale=f.number("routed_scaling_factor", 1.0),
        **(groups if f.get("topk_method") == "group_limited_greedy" else {}),
    )
    return latent.read_layers(f, config, mixture, f.integer("first_k_dense_replace", 0, 0))


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    method = "group_limited_greedy" if config.experts.groups > 1 else "greedy"
    return latent.write_layers(config) | {"topk_method": method, "scoring_func": "softmax"}


DEEPSEEK_V2 = LLAMA.derive(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    names=latent.NAMES,
    fixed={"head_size": 1},  # until `read_layers` knows it
    without=("num_key_value_heads", "head_dim"),
    only=latent.ONLY | {"mlp_bias": (False,), "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    harmless=latent.HARMLESS,
    read_layers=_read_v2,
    write_layers=_write_v2,
    order=latent.order,
    read_fused=experts.STACKED,
    from_stored=latent.from_stored,
    to_stored=latent.to_stored,
)
"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts that are chosen by a softmax, in groups or not.

Source: transformers, models/deepseek_v2."""


def _read_v3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    mixture = latent.mixture_of(
        f,
        count=256,
        chosen=8,
        width=2048,
        shared=1,
        normalize=f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", 2.5),
        scoring="sigmoid",
        correction=True,
        groups=f.integer("n_group", 8),
        groups_per_token=f.integer("topk_group", 4),
        group_top=2,
    )
    first = f.integer("first_k_dense_replace", 3, 0)
    if (types := f.get("mlp_layer_types")) is not None:  # of glm4_moe_lite
        first = types.count("dense") if isinstance(types, list) else -1
        if types != ["dense"] * first + ["sparse"] * (config.n_layer - first):
            raise f.error("mlp_layer_types", f"is not dense layers before sparse ones, {config.n_layer} in all")
    return latent.read_layers(f, config, mixture, first, further=1)


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    return latent.write_layers(config) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    only=latent.ONLY | {"rope_interleave": (True,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    read_layers=_read_v3,
    write_layers=_write_v3,
)
"""DeepSeek-V3, R1, Moonlight and GLM-4.7-Flash: DeepSeek-V2 with experts that are chosen by sigmoids plus a correction.

Source: transformers, models/deepseek_v3."""
