"""Gemma 1 to 4, text only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.config import Backbone, Experts, LayerKind, ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, head_fields, rotated, typed_rope_fields, window_fields
from nanoinfer.models.families.llama import ATTENTION_BIAS, LLAMA, QK_NORM
from nanoinfer.models.stored import ChangedTensor

GEMMA = LLAMA.derive(
    "gemma",
    "GemmaForCausalLM",
    defaults={
        "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    fixed={"norm_weight": "one_plus"},
    biases=ATTENTION_BIAS,
    only={"use_bidirectional_attention": (False, None), "hidden_activation": (None, "gelu_pytorch_tanh")},
    read_layers=lambda f, config: rotated(f, config) | {"embedding_scale": config.n_embd**0.5},
)  # fmt: skip
"""Gemma: weights of norms added to 1, a scaled embedding, a gated MLP with GELU."""


def _scales(f: Fields, config: ModelConfig) -> dict[str, Any]:
    scalar = f.number("query_pre_attn_scalar", 256.0)
    return {"attention_scale": scalar**-0.5, "embedding_scale": config.n_embd**0.5}


def _scalar_field(config: ModelConfig) -> dict[str, Any]:
    scalar = round((config.attention_scale or 1.0) ** -2, 9)
    return {"query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar}


def _read_gemma2(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = f.windows(config.n_layer, f.window("sliding_window", 4096), lambda i: i % 2 == 0)
    return rotated(f, config, windows) | _scales(f, config)


_SIZES = {  # the configs of models of texts and images leave out the defaults
    "vocab_size": ("vocab_size", 262208), "max_position_embeddings": ("block_size", 131072),
    "num_hidden_layers": ("n_layer", 26), "num_attention_heads": ("n_head", 8),
    "hidden_size": ("n_embd", 2304), "intermediate_size": ("n_inner", 9216),
}  # fmt: skip
GEMMA2 = GEMMA.derive(
    "gemma2",
    "Gemma2ForCausalLM",
    {
        **_SIZES,
        "hidden_activation": ("activation", "gelu_pytorch_tanh"),
        "attn_logit_softcapping": ("attention_softcap", 50.0),
        "final_logit_softcapping": ("logits_softcap", 30.0),
    },
    {"post_1": "post_attention_layernorm", "ln_2": "pre_feedforward_layernorm", "post_2": "post_feedforward_layernorm"},
    {"norm_placement": "both"},
    defaults={"num_key_value_heads": 4},
    without=("hidden_act",),
    biases=ATTENTION_BIAS,
    only={"use_bidirectional_attention": (False, None), "hidden_act": ("gelu_pytorch_tanh",)},
    harmless=("cache_implementation",),
    read_layers=_read_gemma2,
    write_layers=lambda config: window_fields(config) | _scalar_field(config),
)
"""Gemma 2: Gemma with norms on both sides, soft caps of scores and logits, and every second layer local."""


def _read_gemma3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    pattern = f.integer("sliding_window_pattern", f.integer("_sliding_window_pattern", 6))
    windows = f.windows(config.n_layer, f.integer("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    everywhere = f.rotary(config, 1000000.0, kind="full_attention")
    nearby = f.rotary(config, 10000.0, kind="sliding_attention", theta_field="rope_local_base_freq", scaled=False)
    layers = tuple(LayerKind(w, everywhere if w is None else nearby) for w in windows)
    return {"layers": layers} | _scales(f, config)


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config) | _scalar_field(config)
    nearby = next((kind.rotary for kind in config.layers if kind.window is not None), None)
    if nearby is None:  # null is not a window to transformers
        del fields["sliding_window"]
        return fields
    return fields | {"rope_local_base_freq": nearby.base}


GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    "Gemma3ForCausalLM",
    names=QK_NORM,
    fixed={"qk_norm": "head"},
    defaults={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    biases=ATTENTION_BIAS,
    only={"use_bidirectional_attention": (False, None)},
    read_layers=_read_gemma3,
    write_layers=_write_gemma3,
)
"""Gemma 3, text only: norms on both sides, weights of norms added to 1, local and global layers, a scaled embedding."""

_ROPES: dict[str, dict[str, Any]] = {  # transformers' default
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_PARTS = experts.parts("experts", "gate_proj", "up_proj", "down_proj")
_NAMES = {
    "after.scale": "layer_scalar", "after.c_gate": "per_layer_input_gate", "after.c_proj": "per_layer_projection",
    "after.post": "post_per_layer_input_norm", "per_layer.wte": "model.embed_tokens_per_layer",
    "per_layer.c_in": "model.per_layer_model_projection", "per_layer.norm": "model.per_layer_projection_norm",
    # of experts beside an MLP (models/experts.py)
    "mlp.router_scale": "router.scale", "mlp.expert_scale": "router.per_expert_scale",
    "mlp.ln_1": "pre_feedforward_layernorm", "mlp.post_1": "post_feedforward_layernorm_1",
    "mlp.ln_2": "pre_feedforward_layernorm_2", "mlp.post_2": "post_feedforward_layernorm_2",
    **experts.names("router.proj", _PARTS), **experts.shared("mlp"),
}  # fmt: skip
_EXPERT_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")


def _read_gemma4(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.integer("vocab_size_per_layer_input", 262144, 0) != config.vocab_size and config.per_layer_dim:
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
        of = next((j for j in range(first - 1, -1, -1) if windows[j] == windows[i]), None)
        if f.raw["model_type"] == "gemma4_assistant":
            of = 0  # until its model is known
        if of is None:
            raise f.error("num_kv_shared_layers", f"leaves no keys and values for layer {i}")
        kinds.append(replace(kind, kv_layer=of, n_inner=2 * config.mlp_dim if wide else None))
    return _with_experts_beside(f, {"layers": tuple(kinds), "embedding_scale": config.n_embd**0.5})


def _with_experts_beside(f: Fields, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, with experts beside all its MLPs if the config has them."""
    mixed = f.flag("enable_moe_block", False)
    count, chosen, width = ((f.required if mixed else f.get)(name) for name in _EXPERT_SIZES)
    if not mixed:
        return fields
    return experts.with_experts(fields, Experts(count, chosen, width, normalize=True, beside=True))


def _write_gemma4(config: ModelConfig) -> dict[str, Any]:
    fields, own = window_fields(config), head_fields(config) | typed_rope_fields(config)
    if (mixture := config.experts) is not None:
        own |= dict(zip(_EXPERT_SIZES, (mixture.count, mixture.per_token, mixture.width), strict=True))
    return own | {
        "enable_moe_block": mixture is not None,
        "layer_types": fields["layer_types"], "sliding_window": fields["sliding_window"] or 512,
        "attention_k_eq_v": any(kind.keys_as_values for kind in config.layers),
        "num_kv_shared_layers": sum(kind.kv_layer is not None for kind in config.layers),
        "use_double_wide_mlp": any(kind.n_inner is not None for kind in config.layers),
        "vocab_size_per_layer_input": config.vocab_size,
    }  # fmt: skip


GEMMA4 = GEMMA3.derive(
    "gemma4_text",
    "Gemma4ForCausalLM",
    {"hidden_size_per_layer_input": ("per_layer_dim", 256)},
    _NAMES,
    {"norm_weight": "plain", "attention_scale": 1.0},
    defaults={"num_hidden_layers": 30, "vocab_size": 262144},
    without=("attn_logit_softcapping",),
    biases=ATTENTION_BIAS,
    only={"use_bidirectional_attention": (None, "vision")},
    read_layers=_read_gemma4,
    write_layers=_write_gemma4,
    folded={"per_layer.wte": lambda config: config.n_layer},
    fused=experts.stacked(_PARTS, "experts"),
    written=False,
)
"""Gemma 4, text only: per-layer embeddings, shared keys and values, other heads in global layers, experts beside MLPs.

The last layer is global whatever the config has."""


def _read_assistant(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.raw = {**f.raw, "num_kv_shared_layers": config.n_layer}
    fields, ordered = _read_gemma4(f, config), f.flag("use_ordered_embeddings", False)
    width, *groups = map(f.required, ("backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k"))
    backbone = Backbone(width, *groups) if ordered else Backbone(width)
    # Keys are those before the newest token, so that one more is in reach, as in transformers' mask.
    fields["layers"] = tuple(replace(kind, window=kind.window and kind.window + 1) for kind in fields["layers"])
    return fields | {"embedding_scale": width**0.5, "logits_softcap": None, "mtp": True, "backbone": backbone}


def _with_order(config: ModelConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's tensors; the order of its tokens, which are integers, as one of weights."""
    order = {name: tensor for name, tensor in stored.items() if tensor.dtype == "int64"}
    return stored | {name: ChangedTensor.of(t, t.shape, lambda ids: ids) for name, t in order.items()}


GEMMA4_ASSISTANT = GEMMA4.derive(
    "gemma4_assistant",
    "Gemma4AssistantForCausalLM",
    names={
        "mtp.c_in": "pre_projection", "assistant.c_out": "post_projection",
        "assistant.groups": "masked_embedding.centroids", "assistant.order": "masked_embedding.token_ordering",
    },
    fixed=GEMMA4.fixed,
    biases=ATTENTION_BIAS,
    only={"hidden_size_per_layer_input": (0,), "enable_moe_block": (False,), "use_double_wide_mlp": (False,)},
    harmless=("text_config", "vocab_size_per_layer_input", "use_bidirectional_attention"),
    read_layers=_read_assistant,
    from_stored=_with_order,
    written=False,
)  # fmt: skip
"""The assistant of a Gemma 4, which is a draft alone: its layers have queries, and attend to the model's keys."""
