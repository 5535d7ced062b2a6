"""DeepSeek-V3, R1, Moonlight and GLM-4.7-Flash: DeepSeek-V2 with experts that are chosen by sigmoids plus a correction.

Source: transformers, models/deepseek_v3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import deepseek_v2, latent
from nanoinfer.models.families.fields import Fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
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


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    return latent.write_layers(config) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


FAMILY = replace(
    deepseek_v2.FAMILY,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    only=latent.ONLY | {"rope_interleave": (True,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    read_layers=_read_layers,
    write_layers=_write_layers,
)
