"""nanochat: norms without weights, squared ReLU, a soft cap of the logits. Source: transformers, models/nanochat.

nanochat rotates in the other direction: (a, b) becomes (a cos + b sin, b cos - a sin). Swapping the halves of each head
of queries and keys makes that the usual rotation, and does not change the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family, Fields, kinds, rope_fields

NAMES = {name: theirs for name, theirs in llama.NAMES.items() if not name.startswith("mlp.")} | {
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def _read(f: Fields) -> ModelConfig:
    width, n_layer = f.integer("hidden_size") // f.integer("num_attention_heads"), f.integer("num_hidden_layers")
    shape = llama.shape(f) | {"activation": f.activation("hidden_act", "relu2"), "gated_mlp": False}
    return ModelConfig(
        family="nanochat",
        head_size=width,
        layers=kinds([None] * n_layer, f.rotary(width)),
        norm_weight="none",
        embedding_norm=True,
        qk_norm="head",
        logits_softcap=f.number("final_logit_softcapping", None if "final_logit_softcapping" in f.raw else 15.0),
        **shape,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    assert rotary is not None
    fields = llama.shape_fields(config) | rope_fields(rotary)
    del fields["head_dim"], fields["mlp_bias"]
    return fields | {"final_logit_softcapping": config.logits_softcap}


def _order(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    if part != "attn.c_attn":
        return None
    half = config.head_dim // 2
    rows = np.arange(config.attn_dim + 2 * config.kv_dim)
    turned = config.attn_dim + config.kv_dim
    heads = rows[:turned].reshape(-1, 2, half)
    return np.concatenate((heads[:, ::-1].reshape(-1), rows[turned:]))


FAMILY = Family("nanochat", "NanoChatForCausalLM", _read, _write, NAMES, order=_order)
