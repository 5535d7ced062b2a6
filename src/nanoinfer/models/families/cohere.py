"""Command R: attention and MLP in parallel after one layer norm, a factor of the logits, adjacent dimensions rotated.

Source: transformers, models/cohere.
"""

from __future__ import annotations

from functools import partial

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, interleaved
from nanoinfer.models.families.fields import rotated

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs not in ("head_dim", "rms_norm_eps")}
FIELDS = _FIELDS | {
    "layer_norm_eps": ("norm_epsilon", 1e-5),
    "logit_scale": ("final_scale", 0.0625),
    "tie_word_embeddings": ("tie_word_embeddings", True),
}
NAMES = {ours: theirs for ours, theirs in llama.NAMES.items() if ours != "ln_2"}
FIXED = llama.FIXED | {"norm": "layer", "norm_placement": "shared", "parallel_residual": True}

FAMILY = Family(
    "cohere",
    "CohereForCausalLM",
    FIELDS,
    NAMES,
    FIXED,
    biases=llama.ATTENTION_BIAS,
    only={"use_qk_norm": (False,)},
    read_layers=partial(rotated, theta=500000.0),
    order=interleaved,
)
