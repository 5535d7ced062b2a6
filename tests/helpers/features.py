"""Which cases of families.py have, together, every feature that a ModelConfig describes: windows, sinks, experts, ...

A fault of an engine depends on a feature, not on a family's name. So `make test-all` runs an engine with `FEATURES`,
and `make test-nightly` with all cases. `native` and the reference model run all cases in both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from helpers.families import CASES, make_config
from nanoinfer.checkpoints import huggingface
from nanoinfer.config import ModelConfig

SIZES = {
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner", "head_size", "num_kv_heads", "norm_epsilon",
    "bos_token_id", "eos_token_ids", "family", "layers",
}  # fmt: skip
"""Fields of ModelConfig whose value is no feature, or that `features_of` describes in another way."""


def config_of(case: str, folder: Path) -> ModelConfig:
    """Return the config of a case, without making its weights."""
    make_config(case).save_pretrained(folder)
    return huggingface.read_config(folder / "config.json")


def describe(name: str, value: Any, default: Any) -> set[str]:
    """Return the features of a field. A choice is a feature; a number is one if it is not the default.

    ("norm", "rms", ...) -> {"norm=rms"}; ("attention_scale", 0.3, None) -> {"attention_scale"}
    """
    if is_dataclass(value):
        parts = (describe(field.name, getattr(value, field.name), field.default) for field in fields(value))
        return {name} | {f"{name}.{part}" for part in set().union(*parts)}
    if isinstance(value, bool | str):
        return {f"{name}={value}"}
    return {name} if value != default else set()


def features_of(config: ModelConfig) -> frozenset[str]:
    """Return what a model has that another may lack, as names."""
    heads = {1: "one", config.n_head: "all"}.get(config.n_kv_head, "grouped")
    features = {f"heads={heads}", f"windows={len(config.windows)}", *(f"bias={part}" for part in config.biases)}
    for field in fields(config):
        if field.name not in SIZES | {"bias"}:
            features |= describe(field.name, getattr(config, field.name), field.default)
    for kind in config.layers:
        for field in fields(kind):
            features |= describe(f"layer.{field.name}", getattr(kind, field.name), field.default)
        rotated = 0 if kind.rotary is None else kind.rotary.dim
        features.add(f"rotated={'none' if not rotated else 'all' if rotated == config.head_dim else 'part'}")
    return frozenset(features)


def cover(features: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Return cases that have all features together: the first one has most, each further one most of the rest."""
    missing = set().union(*features.values())
    chosen: list[str] = []
    while missing:
        chosen.append(max(features, key=lambda case: len(features[case] & missing)))
        missing -= features[chosen[-1]]
    return tuple(chosen)


def _features_of_cases() -> dict[str, frozenset[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return {case: features_of(config_of(case, Path(folder))) for case in CASES}


FEATURES = cover(_features_of_cases())
"""A case of each feature, about 20."""
