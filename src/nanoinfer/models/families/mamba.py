"""Models with Mamba 2 layers: Granite 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.config import Experts, LayerKind, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families import experts, granite
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.families.hybrid import RECURRENT, layer_kinds, without_drafts
from nanoinfer.models.families.llama import ATTENTION_BIAS
from nanoinfer.recurrence import Recurrence

_SIZES = {
    "taps": ("mamba_d_conv", 4), "num_heads": ("mamba_n_heads", 128), "num_key_heads": ("mamba_n_groups", 1),
    "key_dim": ("mamba_d_state", 256),
}  # fmt: skip
_FLAGS = {"bias": ("mamba_conv_bias", True), "projection_bias": ("mamba_proj_bias", False)}
_LIMITS: tuple[list[Any], ...] = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Sizes of steps that are none at all: as older versions of transformers write them, and version 5."""
_IDLE = ("mamba_chunk_size", "mamba_d_head", "mamba_expand", "time_step_limit", *(n for n, _ in _SIZES.values()),
         *(n for n, _ in _FLAGS.values()))  # fmt: skip


def _names(prefix: str) -> Mapping[str, str]:
    """Return `Family.recurrent` of Mamba 2 layers."""
    names = {
        "c_attn": "in_proj", "c_proj": "out_proj", "conv": "conv1d.weight", "conv_bias": "conv1d.bias",
        "a_log": "A_log", "dt_bias": "dt_bias", "skip_scale": "D", "norm_scale": "norm.weight",
    }  # fmt: skip
    return {f"attn.{ours}": f"{prefix}.{theirs}" for ours, theirs in names.items()}


def _read_state(f: Fields, inner: int) -> Recurrence:
    """Return the state of layers with this many values."""
    sizes: dict[str, Any] = {ours: f.integer(theirs, size) for ours, (theirs, size) in _SIZES.items()}
    flags = {ours: f.flag(theirs, value) for ours, (theirs, value) in _FLAGS.items()}
    heads, width = sizes["num_heads"], f.get("mamba_d_head", "auto")
    width = inner // heads if width == "auto" else f.integer("mamba_d_head", 1)
    if heads * width != inner:
        raise NanoinferError(f"mamba_n_heads={heads} of mamba_d_head={width} values are not the {inner} of a layer")
    f.only("hidden_act", "silu")
    f.only("time_step_limit", *_LIMITS, None)
    return Recurrence("mamba2", value_dim=width, norm_groups=sizes["num_key_heads"], **sizes, **flags)


def _write_state(state: Recurrence) -> dict[str, Any]:
    fields = {theirs: getattr(state, ours) for ours, (theirs, _) in (_SIZES | _FLAGS).items()}
    return fields | {"mamba_d_head": state.value_dim}


_SHARED = ("shared_mlp.gate", "shared_mlp.up")  # of these a stored tensor is made
_ATTENTION = ("attention", "full_attention")


def _read_granite(f: Fields, config: ModelConfig) -> dict[str, Any]:
    rotary = f.rotary(config)
    attention = LayerKind(rotary=rotary if f.get("position_embedding_type") == "rope" else None)
    kinds = dict.fromkeys(_ATTENTION, attention) | dict.fromkeys(("mamba", "linear_attention"), RECURRENT)
    layers = layer_kinds(f, config, kinds, ["mamba"] * config.n_layer)
    fields = granite.read_layers(f, config) | {"layers": layers}
    if RECURRENT in layers:
        fields["recurrence"] = _read_state(f, int(f.number("mamba_expand", 2) * config.n_embd))
    width, chosen = f.integer("intermediate_size", 11008), f.get("num_experts_per_tok", 2)
    if not (count := f.integer("num_local_experts", 8, low=0)):
        return fields
    return experts.with_experts(fields, Experts(count, chosen, width, normalize=True, shared_width=config.mlp_dim))


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    rotated = any(kind.rotary for kind in config.layers)
    fields = granite.write_layers(config) | {"position_embedding_type": "rope" if rotated else None}
    fields["layer_types"] = ["mamba" if kind.recurrent else "attention" for kind in config.layers]
    if (state := config.recurrence) is not None:
        fields |= _write_state(state) | {"mamba_expand": state.inner_dim / config.n_embd}
    if config.experts is None:
        return fields | {"num_local_experts": 0}
    return fields | experts.width_fields(config)


GRANITEMOEHYBRID = granite.GRANITEMOE.derive(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {"shared_intermediate_size": ("n_inner", 1024)},
    {
        f"mlp.{of}{ours}": theirs
        for of in ("", "shared.")
        for ours, theirs in (("c_gate", _SHARED[0]), ("c_fc", _SHARED[1]), ("c_proj", "shared_mlp.output_linear"))
    },
    biases=ATTENTION_BIAS,
    only={
        "position_embedding_type": (None, "rope", "nope"), "normalization_function": ("rmsnorm",),
    },
    harmless=(*experts.HARMLESS, *_IDLE, "init_method"),
    read_layers=_read_granite,
    write_layers=_write_granite,
    recurrent=_names("mamba"),
    fused={**granite.GRANITEMOE.fused, "shared_mlp.input_linear": _SHARED},
    from_stored=without_drafts,
    written=False,
)  # fmt: skip
"""Granite 4: Granite with Mamba 2 in most layers (H) or none, without positions or with, and experts in some models."""
