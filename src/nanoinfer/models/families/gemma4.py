"""Gemma 4, text only and dense: per-layer embeddings, shared keys and values, other heads in global layers.

Source: transformers, models/gemma4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import frequencies, gemma3
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, window_fields

_HEADS = {"head_dim": "head_size", "num_key_value_heads": "num_kv_heads"}


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.integer("vocab_size_per_layer_input", 262144) != config.vocab_size and config.per_layer_dim:
        raise f.error("vocab_size_per_layer_input", f"is not vocab_size={config.vocab_size}: this is not supported")
    windows = f.windows(config.n_layer, f.integer("sliding_window", 512), lambda i: (i + 1) % 6 != 0)
    windows[-1] = None  # transformers reads it so
    k_is_v, wide = f.flag("attention_k_eq_v", False), f.flag("use_double_wide_mlp", False)
    wide = 2 * config.mlp_dim if wide else None
    first = config.n_layer - f.integer("num_kv_shared_layers", 0, low=0)
    sizes = _sizes(f, config, windows, k_is_v)
    layers: list[LayerKind] = []
    for i, window in enumerate(windows):
        at = replace(config, **sizes[i])
        rotary = f.rotary(
            at, 1e6 if window is None else 1e4, kind=f"{'full' if window is None else 'sliding'}_attention"
        )
        kind = LayerKind(window, rotary, **sizes[i], scaled=True)
        if i < first:
            layers.append(replace(kind, keys_as_values=k_is_v and window is None, value_norm=True))
            continue
        of = next((j for j in reversed(range(max(first, 0))) if windows[j] == window), None)
        if of is None:
            raise f.error("num_kv_shared_layers", f"leaves no keys and values for layer {i}")
        layers.append(replace(kind, kv_layer=of, n_inner=wide))
    return {"layers": tuple(layers), "embedding_scale": config.n_embd**0.5}


def _sizes(f: Fields, config: ModelConfig, windows: list[int | None], k_is_v: bool) -> list[dict[str, Any]]:
    """Return the heads of each layer where they are not the model's, as fields of ModelConfig."""
    globally = {"head_dim": f.get("global_head_dim", 512)}
    if (heads := f.get("num_global_key_value_heads")) is not None and k_is_v:
        globally["num_key_value_heads"] = heads
    given = f.get("per_layer_config", {str(i): globally for i, w in enumerate(windows) if w is None})
    if not isinstance(given, dict) or given.keys() - {str(i) for i in range(config.n_layer)}:
        raise f.error("per_layer_config", f"is not an object of {config.n_layer} layers")
    found = []
    for i in range(config.n_layer):
        own = given.get(str(i), {})
        if not isinstance(own, dict) or own.keys() - _HEADS.keys():
            raise f.error("per_layer_config", f"is not supported: only {' and '.join(_HEADS)} may differ")
        sizes = {_HEADS[theirs]: value for theirs, value in own.items()}
        found.append({ours: value for ours, value in sizes.items() if value != getattr(config, ours)})
    return found


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields, kinds = window_fields(config), [config.layer(i) for i in range(config.n_layer)]
    ropes = {}
    for kind in kinds:
        assert kind.rotary is not None
        plain = {"rope_type": "default", "rope_theta": kind.rotary.base}
        ropes[f"{'full' if kind.window is None else 'sliding'}_attention"] = plain | (
            frequencies.write(kind.rotary) or {}
        )
    own = {str(i): {t: getattr(k, o) for t, o in _HEADS.items() if getattr(k, o)} for i, k in enumerate(kinds)}
    return {
        "layer_types": fields["layer_types"],
        "sliding_window": fields["sliding_window"] or 512,
        "rope_parameters": ropes,
        "per_layer_config": {i: heads for i, heads in own.items() if heads},
        "attention_k_eq_v": any(kind.keys_as_values for kind in kinds),
        "num_kv_shared_layers": sum(kind.kv_layer is not None for kind in kinds),
        "use_double_wide_mlp": any(kind.n_inner is not None for kind in kinds),
        "vocab_size_per_layer_input": config.vocab_size,
    }


FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    {theirs: ours for theirs, ours in gemma3.FAMILY.fields.items() if theirs != "attn_logit_softcapping"}
    | {"num_hidden_layers": ("n_layer", 30), "vocab_size": ("vocab_size", 262144)}
    | {"hidden_size_per_layer_input": ("per_layer_dim", 256)},
    gemma3.FAMILY.names
    | {
        "per_layer.wte": "model.embed_tokens_per_layer",
        "per_layer.c_in": "model.per_layer_model_projection",
        "per_layer.norm": "model.per_layer_projection_norm",
        "after.scale": "layer_scalar",
        "after.c_gate": "per_layer_input_gate",
        "after.c_proj": "per_layer_projection",
        "after.post": "post_per_layer_input_norm",
    },
    gemma3.FAMILY.fixed | {"norm_weight": "plain", "attention_scale": 1.0},
    biases=gemma3.FAMILY.biases,
    only={"use_bidirectional_attention": (None, "vision"), "enable_moe_block": (False,)},
    harmless=("num_experts", "top_k_experts", "moe_intermediate_size"),
    read_layers=_read_layers,
    write_layers=_write_layers,
    folded=frozenset({"per_layer.wte"}),
)
