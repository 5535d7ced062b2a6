"""Command R7B: Command R whose every fourth layer is global and has no positions.

Source: transformers, models/cohere2.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import cohere, llama
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import Fields, window_fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    pattern = f.integer("sliding_window_pattern", 4)
    windows = f.windows(config.n_layer, f.integer("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    rotary = f.rotary(config)
    return {"layers": tuple(LayerKind(w, None if w is None else rotary) for w in windows)}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config)
    if fields["sliding_window"] is None:  # null is not a window to transformers
        del fields["sliding_window"]
    return fields


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    cohere.FIELDS | {"head_dim": ("head_size", None)},
    cohere.NAMES,
    cohere.FIXED,
    biases=llama.ATTENTION_BIAS,
    only={
        "use_qk_norm": (False,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        "rotary_pct": (1.0,),
    },
    harmless=("use_parallel_embedding",),
    read_layers=_read_layers,
    write_layers=_write_layers,
    order=interleaved,
)
