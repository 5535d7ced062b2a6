"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts that are chosen by a softmax, in groups or not.

Source: transformers, models/deepseek_v2.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import experts, latent
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
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


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    method = "group_limited_greedy" if config.experts.groups > 1 else "greedy"
    return latent.write_layers(config) | {"topk_method": method, "scoring_func": "softmax"}


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    latent.FIELDS,
    latent.NAMES,
    latent.FIXED,
    only=latent.ONLY | {"mlp_bias": (False,), "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    harmless=latent.HARMLESS,
    read_layers=_read_layers,
    write_layers=_write_layers,
    order=latent.order,
    read_fused=experts.STACKED,
    from_stored=latent.from_stored,
    to_stored=latent.to_stored,
)
