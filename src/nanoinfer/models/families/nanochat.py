"""nanochat: norms without weights, squared ReLU, a soft cap of the logits. Source: transformers, models/nanochat.

nanochat rotates in the other direction: (a, b) becomes (a cos + b sin, b cos - a sin). Swapping the halves of each head
of queries and keys makes that the usual rotation, and does not change the scores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, within_heads

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs != "head_dim"}
_NAMES = {ours: theirs for ours, theirs in llama.NAMES.items() if not ours.startswith("mlp.")}


def _order(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    if part != "attn.c_attn":
        return None
    return within_heads(config, np.roll(np.arange(config.head_dim), config.head_dim // 2))


FAMILY = Family(
    "nanochat",
    "NanoChatForCausalLM",
    _FIELDS | {"hidden_act": ("activation", "relu2"), "final_logit_softcapping": ("logits_softcap", 15.0)},
    _NAMES | {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
    llama.FIXED | {"gated_mlp": False, "norm_weight": "none", "embedding_norm": True, "qk_norm": "head"},
    biases=llama.ATTENTION_BIAS,
    harmless=("head_dim",),
    order=_order,
)
