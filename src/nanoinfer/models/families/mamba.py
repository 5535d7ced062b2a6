"""Models with Mamba 2 layers: Granite 4, Nemotron-H and Falcon-H1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import Experts, LayerKind, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families import experts, granite
from nanoinfer.models.families.base import row_factors
from nanoinfer.models.families.fields import Fields, rope_fields
from nanoinfer.models.families.hybrid import RECURRENT, layer_kinds, without_drafts
from nanoinfer.models.families.llama import ARCEE, ATTENTION_BIAS, BIASES, LLAMA
from nanoinfer.models.stored import ChangedTensor, StoredTensor
from nanoinfer.recurrence import Recurrence
from nanoinfer.utils.arrays import HostTensor
from nanoinfer.utils.checks import require_float

_STATE: dict[str, tuple[str, Any]] = {
    "taps": ("mamba_d_conv", 4), "num_heads": ("mamba_n_heads", 128), "num_key_heads": ("mamba_n_groups", 1),
    "key_dim": ("mamba_d_state", 256), "value_dim": ("mamba_d_head", "auto"), "bias": ("mamba_conv_bias", True),
    "projection_bias": ("mamba_proj_bias", False),
}  # fmt: skip
_LIMITS: tuple[list[Any] | None, ...] = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)
"""Sizes of steps that are none at all: as older versions of transformers write them, and version 5."""
_IDLE = ("mamba_chunk_size", "num_logits_to_keep")


def _names(prefix: str) -> Mapping[str, str]:
    """Return `Family.recurrent` of Mamba 2 layers."""
    names = {
        "c_attn": "in_proj", "c_proj": "out_proj", "conv": "conv1d.weight", "conv_bias": "conv1d.bias",
        "a_log": "A_log", "dt_bias": "dt_bias", "skip_scale": "D", "norm_scale": "norm.weight",
    }  # fmt: skip
    return {f"attn.{ours}": f"{prefix}.{theirs}" for ours, theirs in names.items()}


def _read_state(f: Fields, names: dict[str, tuple[str, Any]], inner: float | None = None) -> Recurrence:
    """Return the state of layers from fields with these names. inner: number of values, if other fields have it."""
    given = {ours: f.get(theirs, default) for ours, (theirs, default) in names.items()}
    if given["value_dim"] == "auto" and inner is not None:
        given["value_dim"] = int(inner) // f.integer(*names["num_heads"])
    f.only("time_step_limit", *_LIMITS)
    state = Recurrence("mamba2", **given)
    if inner not in (None, state.inner_dim):
        heads, width = names["num_heads"][0], names["value_dim"][0]
        raise NanoinferError(
            f"{heads}={state.num_heads} of {width}={state.value_dim} values are not the {inner} of a layer"
        )
    return replace(state, norm_groups=state.num_key_heads)


def _write_state(config: ModelConfig, names: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that `_read_state` reads."""
    return {theirs: getattr(config.recurrence, ours) for ours, (theirs, _) in names.items() if config.recurrence}


def _inner(f: Fields, config: ModelConfig) -> float:
    """Return the number of values of a layer as a multiple of the width of the residual stream."""
    f.only("hidden_act", "silu")
    return f.number("mamba_expand", 2) * config.n_embd


_SHARED = ("shared_mlp.gate", "shared_mlp.up")  # of these a stored tensor is made
_ATTENTION = ("attention", "full_attention")


def _read_granite(f: Fields, config: ModelConfig) -> dict[str, Any]:
    rotary = f.rotary(config)
    attention = LayerKind(rotary=rotary if f.get("position_embedding_type") == "rope" else None)
    kinds = dict.fromkeys(_ATTENTION, attention) | dict.fromkeys(("mamba", "linear_attention"), RECURRENT)
    layers = layer_kinds(f, config, kinds, ["mamba"] * config.n_layer)
    fields = granite.read_layers(f, config) | {"layers": layers}
    if RECURRENT in layers:
        fields["recurrence"] = _read_state(f, _STATE, _inner(f, config))
    f.known.update(("mamba_expand", "time_step_limit", *(name for name, _ in _STATE.values())))
    width, chosen = f.integer("intermediate_size", 11008), f.get("num_experts_per_tok", 2)
    if not (count := f.integer("num_local_experts", 8, low=0)):
        return fields
    return experts.with_experts(fields, Experts(count, chosen, width, normalize=True, shared_width=config.mlp_dim))


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    rotated = any(kind.rotary for kind in config.layers)
    fields = granite.write_layers(config) | {"position_embedding_type": "rope" if rotated else None}
    fields["layer_types"] = ["mamba" if kind.recurrent else "attention" for kind in config.layers]
    if (state := config.recurrence) is not None:
        fields |= _write_state(config, _STATE) | {"mamba_expand": state.inner_dim / config.n_embd}
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
    only={"position_embedding_type": (None, "rope", "nope"), "normalization_function": ("rmsnorm",)},
    harmless=(*experts.HARMLESS, *_IDLE, "init_method"),
    read_layers=_read_granite,
    write_layers=_write_granite,
    recurrent=_names("mamba"),
    fused={**granite.GRANITEMOE.fused, "shared_mlp.input_linear": _SHARED},
    from_stored=without_drafts,
)
"""Granite 4: Granite with Mamba 2 in most layers (H) or none, without positions or with, and experts in some models."""

_NEMOTRON: dict[str, tuple[str, Any]] = {
    "taps": ("conv_kernel", 4), "num_heads": ("mamba_num_heads", 128), "num_key_heads": ("n_groups", 8),
    "key_dim": ("ssm_state_size", 128), "value_dim": ("mamba_head_dim", 64), "bias": ("use_conv_bias", True),
    "projection_bias": ("use_bias", False),
}  # fmt: skip
_PATTERNS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_PARTS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", **{part: part for part in "M*-E"}}


def _read_nemotron(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers: each of the files is a mixer, an MLP or experts, and ours are a mixer and what follows it."""
    name = next((name for name in _PATTERNS if f.get(name) is not None), _PATTERNS[-1])
    types = f.required(name)
    types = types if isinstance(types, list | str) else []
    pattern = "".join(_PARTS.get(t, "?") if isinstance(t, str) else "?" for t in types)
    if not re.fullmatch("([M*][-E]?)+", pattern):
        raise f.error(
            name, "is not supported: it must be Mamba layers (M), attention (*), and MLPs (-) or experts (E) after one"
        )
    f.only("num_hidden_layers", len(pattern))
    kinds = re.findall("[M*][-E]?", pattern)
    layers = tuple(LayerKind(recurrent=k[0] == "M", mlp=len(k) == 2, experts=k[1:] == "E") for k in kinds)
    state = _read_state(f, _NEMOTRON) if "M" in pattern else None
    fields = {"n_layer": len(layers), "layers": layers, "recurrence": state}
    if "E" not in pattern:
        return fields
    f.only("moe_latent_size", None)
    f.only("mlp_bias", False)
    f.only("n_shared_experts", 1)
    return fields | {"experts": Experts(
        f.get("n_routed_experts", 8), f.get("num_experts_per_tok", 2), f.get("moe_intermediate_size", 7688),
        f.flag("norm_topk_prob", True), f.number("routed_scaling_factor", 1.0), scoring="sigmoid", correction=True,
        shared_width=f.integer("moe_shared_expert_intermediate_size", 7688), groups=f.get("n_group", 1),
        groups_per_token=f.get("topk_group", 1), group_top=2,
    )}  # fmt: skip


def _write_nemotron(config: ModelConfig) -> dict[str, Any]:
    pattern = "".join(
        ("M" if kind.recurrent else "*") + ("E" if kind.experts else "-") * kind.mlp for kind in config.layers
    )
    fields = _write_state(config, _NEMOTRON) | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    return fields if (mixture := config.experts) is None else fields | {
        "n_routed_experts": mixture.count, "num_experts_per_tok": mixture.per_token, "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token, "norm_topk_prob": mixture.normalize,
        "routed_scaling_factor": mixture.scale, "moe_intermediate_size": mixture.width,
        "moe_shared_expert_intermediate_size": mixture.shared_width,
    }  # fmt: skip


def _whole_layers(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with those of a mixer and of the MLP after it in one layer."""
    places = [place for i, kind in enumerate(config.layers) for place in [(i, "mixer"), (i, "mlp")][: 1 + kind.mlp]]

    def ours(match: re.Match[str]) -> str:
        layer, part = places[int(match[1])] if int(match[1]) < len(places) else (int(match[1]), "mixer")
        return f"model.layers.{layer}.{part}{'_norm' if match[2] == 'norm' else ''}."

    stored = {re.sub(r"^(model\.)?backbone\.", "model.", n): t for n, t in without_drafts(config, stored).items()}
    stored = {name.replace("e_score_correction_bias", "e_score_correction.bias"): t for name, t in stored.items()}
    return {re.sub(r"^model\.layers\.(\d{1,9})\.(norm|mixer)\.", ours, name): t for name, t in stored.items()}


_EXPERTS = {"mlp.experts.c_fc": "mlp.experts.{}.up_proj", "mlp.experts.c_proj": "mlp.experts.{}.down_proj"}
NEMOTRON_H = ARCEE.derive(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        "mlp_hidden_act": ("activation", "relu2"), "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "intermediate_size": ("n_inner", 21504),
    },
    {
        "wte": "model.embeddings", "ln_f": "model.norm_f", "ln_1": "mixer_norm", "ln_2": "mlp_norm",
        "attn.c_attn": tuple(f"mixer.{part}_proj" for part in "qkv"), "attn.c_proj": "mixer.o_proj",
        "mlp.router": "mlp.gate", "mlp.correction": "mlp.gate.e_score_correction", **_EXPERTS,
        "mlp.shared.c_fc": "mlp.shared_experts.up_proj", "mlp.shared.c_proj": "mlp.shared_experts.down_proj",
    },
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096},
    without=("num_hidden_layers", "hidden_act", "rms_norm_eps"),
    biases=BIASES,
    only={"mamba_hidden_act": ("silu",), "sliding_window": (None,)},
    harmless=tuple(  # those of experts and of drafts have no effect without either
        "num_logits_to_keep use_mamba_kernels expand time_step_min time_step_max time_step_floor chunk_size"
        " rms_norm_eps mamba_ssm_cache_dtype residual_in_fp32 hidden_dropout rescale_prenorm_residual"
        " n_routed_experts mamba_proj_bias n_shared_experts moe_intermediate_size"
        " moe_shared_expert_intermediate_size moe_latent_size n_group topk_group moe_shared_expert_overlap"
        " num_experts_per_tok routed_scaling_factor norm_topk_prob num_nextn_predict_layers"
        " mtp_layers_block_type mtp_hybrid_override_pattern output_router_logits".split()
    ),
    read_layers=_read_nemotron,
    write_layers=_write_nemotron,
    recurrent=_names("mixer"),
    from_stored=_whole_layers,
    fused={name.replace(".{}", ""): (name,) for name in _EXPERTS.values()},
    written=False,
)  # fmt: skip
"""Nemotron-H, Nemotron Nano 2 and 3 Nano: Mamba 2 or attention without positions, some with an MLP or experts."""

_MULTIPLIERS = tuple(f"{part}_multiplier" for part in "attention_in key attention_out ssm_in ssm_out".split())
_MLP = {"c_gate": "gate", "c_fc": "up", "c_proj": "down"}


def _numbers(f: Fields, name: str, count: int) -> list[float]:
    values = f.get(name) or [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise f.error(name, f"is not a list of {count} numbers")
    return [require_float(name, value, 1e-12, 1e12) for value in values]


def _read_falcon(f: Fields, config: ModelConfig) -> dict[str, Any]:
    inner = _inner(f, config)
    state = _read_state(f, _STATE, inner if f.get("mamba_d_ssm", 0) is None else f.integer("mamba_d_ssm", 1024))
    if not f.flag("mamba_rms_norm", False):
        state = replace(state, norm_groups=0)
    elif f.flag("mamba_norm_before_gate", True):
        raise f.error("mamba_norm_before_gate", "is not supported with mamba_rms_norm: only false is")
    into, key, out, state_in, state_out = (f.number(name, 1.0) for name in _MULTIPLIERS)
    gate, down = _numbers(f, "mlp_multipliers", 2)
    of_parts = [state_in * factor for factor in _numbers(f, "ssm_multipliers", 5)]
    keys = state.num_key_heads * state.key_dim
    widths = (state.inner_dim, state.inner_dim, keys, keys, state.num_heads)
    factors = {
        "self_attn.q_proj": into, "self_attn.k_proj": into * key, "self_attn.v_proj": into, "self_attn.o_proj": out,
        "mamba.out_proj": state_out, "feed_forward.gate_proj": gate, "feed_forward.down_proj": down,
    }  # fmt: skip
    of_rows = {name: ((factor, 1),) for name, factor in factors.items()}
    weight_factors = (*of_rows.items(), ("mamba.in_proj", tuple(zip(of_parts, widths, strict=True))))
    layers = (LayerKind(rotary=f.rotary(config), recurrent=True, beside=True),) * config.n_layer
    return {"layers": layers, "recurrence": state, "weight_factors": weight_factors}


def _write_falcon(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model whose weights have been multiplied by their factors."""
    state = config.recurrence
    assert state is not None
    others = {"mamba_d_ssm": state.inner_dim, "mamba_rms_norm": state.norm_groups > 0, "mamba_norm_before_gate": False}
    return rope_fields(config) | _write_state(config, _STATE) | others


def _multiplied(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors times `weight_factors`, rounded to their dtype."""

    def times(factors: tuple[tuple[float, int], ...], values: NDArray[Any]) -> NDArray[Any]:
        dtype, by = "bfloat16" if values.dtype == np.uint16 else values.dtype.name, row_factors(factors)
        product = HostTensor(values, dtype).float32() * (by if values.ndim > 1 else by[:, 0])
        return HostTensor(product, "float32").to(dtype).values

    stored = without_drafts(config, stored)
    for part, factors in config.weight_factors:
        for name in [name for name in stored if name.rpartition(".")[0].endswith(f".{part}")]:
            stored[name] = ChangedTensor.of(stored[name], stored[name].shape, partial(times, factors))
    return stored


FALCON_H1 = LLAMA.derive(
    "falcon_h1",
    "FalconH1ForCausalLM",
    {"embedding_multiplier": ("embedding_scale", 1.0), "lm_head_multiplier": ("final_scale", 1.0)},
    {
        **{ours: theirs for ours, theirs in _names("mamba").items() if ours not in ("attn.c_attn", "attn.c_proj")},
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mamba.in_proj"),
        "attn.state_proj": "mamba.out_proj", "ln_f": "model.final_layernorm", "ln_2": "pre_ff_layernorm",
        **{f"mlp.{ours}": f"feed_forward.{theirs}_proj" for ours, theirs in _MLP.items()},
    },
    defaults={"intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    biases={"mlp_bias": (("mlp",), False)},
    only=dict.fromkeys(("attention_bias", "mamba_proj_bias", "projectors_bias"), (False,))
    | {"mamba_use_mlp": (True,), "attn_layer_indices": (None,)},
    harmless=(*_IDLE, "mamba_norm_before_gate", "mlp_expansion_factor"),
    read_layers=_read_falcon,
    write_layers=_write_falcon,
    from_stored=_multiplied,
    written=False,
)  # fmt: skip
"""Falcon-H1: attention and Mamba 2 side by side in each layer; factors of many matrices are multiplied into them."""
