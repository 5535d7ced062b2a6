"""StarCoder2: layer norms, biases, rotary positions, an MLP without gate. Source: transformers, models/starcoder2."""

from __future__ import annotations

from functools import partial

from nanoinfer.models.families import llama, mistral
from nanoinfer.models.families.base import Family

_FIELDS = {theirs: ours for theirs, ours in llama.FIELDS.items() if theirs not in ("head_dim", "rms_norm_eps")}
_NAMES = {ours: theirs for ours, theirs in llama.NAMES.items() if not ours.startswith("mlp.")}

FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _FIELDS
    | {
        "num_key_value_heads": ("num_kv_heads", 2),
        "hidden_act": ("activation", "gelu_pytorch_tanh"),
        "norm_epsilon": ("norm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    _NAMES | {"mlp.c_fc": "mlp.c_fc", "mlp.c_proj": "mlp.c_proj"},
    {"learned_positions": False},
    biased=("norm",),
    biases={"use_bias": (("qkv", "proj", "mlp"), True)},
    harmless=("residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon"),
    read_layers=partial(mistral.read_layers, default=None),
    write_layers=mistral.write_layers,
)
