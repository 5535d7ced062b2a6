"""EXAONE 4: norms after attention and MLP and of each head; with windows, global layers have no positions.

Source: transformers, models/exaone4.
"""

from __future__ import annotations

import re
from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import llama, olmo2
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, window_fields

_FIELDS = {theirs: ours for theirs, ours in olmo2.FAMILY.fields.items() if theirs != "head_dim"}


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    window, pattern = f.window("sliding_window", 4096), f.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and re.fullmatch("L{0,99}G", pattern):  # "LLLG" is 4
        pattern = len(pattern)
    if window is not None and (type(pattern) is not int or pattern < 1):
        raise f.error("sliding_window_pattern", 'is neither a positive integer nor of the form "LLLG"')
    windows = f.windows(config.n_layer, window, lambda i: window is not None and (i + 1) % pattern != 0)
    rotary = f.rotary(config)
    return {"layers": tuple(LayerKind(w, rotary if window is None or w is not None else None) for w in windows)}


FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    _FIELDS | {"num_key_value_heads": ("num_kv_heads", 32), "head_dim": ("head_size", None)},
    olmo2.FAMILY.names,
    llama.FIXED | {"norm_placement": "after", "qk_norm": "head"},
    read_layers=_read_layers,
    write_layers=window_fields,
)
