"""Gemma 4, text only: per-layer embeddings, shared keys and values, other heads in global layers, experts beside MLPs.

Source: transformers, models/gemma4, whose last layer is global whatever the config says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import beside, gemma3
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, head_fields, typed_rope_fields, window_fields

_ROPES: dict[str, dict[str, Any]] = {  # transformers' default
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_NAMES = {
    "after.scale": "layer_scalar", "after.c_gate": "per_layer_input_gate", "after.c_proj": "per_layer_projection",
    "after.post": "post_per_layer_input_norm", "per_layer.wte": "model.embed_tokens_per_layer",
    "per_layer.c_in": "model.per_layer_model_projection", "per_layer.norm": "model.per_layer_projection_norm",
}  # fmt: skip


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.integer("vocab_size_per_layer_input", 262144) != config.vocab_size and config.per_layer_dim:
        raise f.error("vocab_size_per_layer_input", f"is not vocab_size={config.vocab_size}: this is not supported")
    f.raw = {**f.raw, "rope_parameters": f.get("rope_parameters") or _ROPES}
    windows = [*f.windows(config.n_layer, f.integer("sliding_window", 512), lambda i: (i + 1) % 6 != 0)[:-1], None]
    k_is_v, wide = f.flag("attention_k_eq_v", False), f.flag("use_double_wide_mlp", False)
    first = config.n_layer - f.integer("num_kv_shared_layers", 0, low=0)
    far: dict[str, Any] = {"head_dim": f.get("global_head_dim", 512)}
    far |= {"num_key_value_heads": n} if (n := f.get("num_global_key_value_heads")) is not None and k_is_v else {}
    kinds = []
    for i, own in enumerate(f.heads(config, {str(i): far for i, window in enumerate(windows) if window is None})):
        name = "full_attention" if windows[i] is None else "sliding_attention"
        rotary = f.rotary(replace(config, **own), _ROPES[name]["rope_theta"], kind=name)
        kind = LayerKind(windows[i], rotary, **own, scaled=True)
        if i < first:
            kinds.append(replace(kind, keys_as_values=k_is_v and windows[i] is None, value_norm=True))
            continue
        if (of := next((j for j in range(first - 1, -1, -1) if windows[j] == windows[i]), None)) is None:
            raise f.error("num_kv_shared_layers", f"leaves no keys and values for layer {i}")
        kinds.append(replace(kind, kv_layer=of, n_inner=2 * config.mlp_dim if wide else None))
    return beside.read(f, {"layers": tuple(kinds), "embedding_scale": config.n_embd**0.5})


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config)
    return head_fields(config) | typed_rope_fields(config) | beside.write(config) | {
        "layer_types": fields["layer_types"], "sliding_window": fields["sliding_window"] or 512,
        "attention_k_eq_v": any(kind.keys_as_values for kind in config.layers),
        "num_kv_shared_layers": sum(kind.kv_layer is not None for kind in config.layers),
        "use_double_wide_mlp": any(kind.n_inner is not None for kind in config.layers),
        "vocab_size_per_layer_input": config.vocab_size,
    }  # fmt: skip


FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    {theirs: ours for theirs, ours in gemma3.FAMILY.fields.items() if theirs != "attn_logit_softcapping"}
    | {"num_hidden_layers": ("n_layer", 30), "vocab_size": ("vocab_size", 262144)}
    | {"hidden_size_per_layer_input": ("per_layer_dim", 256)},
    {**gemma3.FAMILY.names, **_NAMES, **beside.NAMES},
    {**gemma3.FAMILY.fixed, "norm_weight": "plain", "attention_scale": 1.0},
    biases=gemma3.FAMILY.biases,
    only={"use_bidirectional_attention": (None, "vision")},
    read_layers=_read_layers,
    write_layers=_write_layers,
    folded=frozenset({"per_layer.wte"}),
    fused=beside.FUSED,
    bare=True,
)
