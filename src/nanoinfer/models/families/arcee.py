"""Arcee (AFM): Llama whose MLP has squared ReLU and no gate. Source: transformers, models/arcee."""

from __future__ import annotations

from nanoinfer.models.families import llama
from nanoinfer.models.families.base import Family

FAMILY = Family(
    "arcee",
    "ArceeForCausalLM",
    llama.FIELDS | {"hidden_act": ("activation", "relu2"), "rms_norm_eps": ("norm_epsilon", 1e-5)},
    {ours: theirs for ours, theirs in llama.NAMES.items() if ours != "mlp.c_gate"},
    llama.FIXED | {"gated_mlp": False},
    biases=llama.BIASES,
)
