"""Command R, Command R+ and Command R7B."""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families.base import FOLDED_HEADS, interleaved
from nanoinfer.models.families.fields import Fields, rope_fields, rotated, window_fields
from nanoinfer.models.families.llama import ATTENTION_BIAS, LLAMA, QK_NORM

COHERE = LLAMA.derive(
    "cohere",
    "CohereForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5), "logit_scale": ("final_scale", 0.0625)},
    QK_NORM,
    defaults={"tie_word_embeddings": True},
    fixed={"norm": "layer", "norm_placement": "shared", "parallel_residual": True},
    without=("head_dim", "rms_norm_eps", "ln_2"),
    biases=ATTENTION_BIAS,
    read_layers=lambda f, config: (
        rotated(f, config, theta=500000.0) | {"qk_norm": "heads" if f.flag("use_qk_norm", False) else "none"}
    ),
    write_layers=lambda config: rope_fields(config) | {"use_qk_norm": config.qk_norm == "heads"},
    order=interleaved,
    folded=FOLDED_HEADS,
)
"""Command R: attention and MLP in parallel after one layer norm, a factor of the logits, adjacent dimensions rotated;
Command R+: also a layer norm of each head of queries and keys, with weights of its own."""


def _read_cohere2(f: Fields, config: ModelConfig) -> dict[str, Any]:
    pattern = f.integer("sliding_window_pattern", 4)
    windows = f.windows(config.n_layer, f.integer("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    rotary = f.rotary(config)
    return {"layers": tuple(LayerKind(w, None if w is None else rotary) for w in windows)}


def _write_cohere2(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config)
    if fields["sliding_window"] is None:  # null is not a window to transformers
        del fields["sliding_window"]
    return fields


COHERE2 = COHERE.derive(
    "cohere2",
    "Cohere2ForCausalLM",
    {"head_dim": ("head_size", None)},
    biases=ATTENTION_BIAS,
    only={
        "use_qk_norm": (False,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        "rotary_pct": (1.0,),
    },
    harmless=("use_parallel_embedding",),
    read_layers=_read_cohere2,
    write_layers=_write_cohere2,
    order=interleaved,
)
"""Command R7B: Command R whose every fourth layer is global and has no positions."""
