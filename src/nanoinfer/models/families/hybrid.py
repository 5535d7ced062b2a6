"""Models with recurrent layers beside attention: Qwen3.5 and LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import Experts, LayerKind, ModelConfig
from nanoinfer.errors import show
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, rope_fields
from nanoinfer.models.families.llama import LLAMA, QK_NORM
from nanoinfer.recurrence import Recurrence

RECURRENT = LayerKind(recurrent=True)
_STATES = {"attn.a_log": "A_log", "attn.dt_bias": "dt_bias", "attn.norm_scale": "norm.weight"}


def layer_kinds(
    f: Fields, config: ModelConfig, kinds: Mapping[str, LayerKind], default: list[str], name: str = "layer_types"
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer, from the names that a field lists; `default`: without it."""
    types = f.get(name) or default
    if not isinstance(types, list) or len(types) != config.n_layer:
        raise f.error(name, f"is not a list of {config.n_layer} types, one for each layer")
    if (unknown := next((t for t in types if t not in [*kinds]), None)) is not None:
        raise f.error(name, f"has {show(unknown)}: only {', '.join(kinds)} are supported")
    return tuple(kinds[t] for t in types)


def _read_qwen3_5(f: Fields, config: ModelConfig) -> dict[str, Any]:
    every = f.integer("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config.n_layer)]
    f.only("attn_output_gate", True, None)
    sizes: dict[str, Any] = {ours: f.integer(f"linear_{theirs}", size) for ours, (theirs, size) in _SIZES.items()}
    attention = LayerKind(rotary=f.rotary(config, share=("partial_rotary_factor", 0.25)))
    layers = layer_kinds(f, config, {"full_attention": attention, "linear_attention": RECURRENT}, default)
    state = Recurrence("delta", **sizes, tiled=f.flag(_TILED, False))
    return {"layers": layers, "recurrence": state if any(kind.recurrent for kind in layers) else None}


def _write_layers(config: ModelConfig, recurrent: str) -> dict[str, Any]:
    types = [recurrent if config.layer(i).recurrent else "full_attention" for i in range(config.n_layer)]
    return rope_fields(config) | {"layer_types": types}


def _write_qwen3_5(config: ModelConfig) -> dict[str, Any]:
    state, rotary = config.recurrence, next((kind.rotary for kind in config.layers if kind.rotary is not None), None)
    sizes = {f"linear_{theirs}": getattr(state, ours) for ours, (theirs, _) in _SIZES.items()} if state else {}
    sizes |= {_TILED: True} if state and state.tiled else {}
    share = {"partial_rotary_factor": rotary.dim / config.head_dim} if rotary is not None else {}
    return _write_layers(config, "linear_attention") | sizes | share


_TILED = "linear_value_heads_tiled"
"""Field of packed folders that were GGUF files: `Recurrence.tiled`."""
_SIZES = {
    "taps": ("conv_kernel_dim", 4), "num_heads": ("num_value_heads", 32), "value_dim": ("value_head_dim", 128),
    "num_key_heads": ("num_key_heads", 16), "key_dim": ("key_head_dim", 128),
}  # fmt: skip


def _gate_last(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    """Return the order of c_attn's rows: queries and gates, which alternate head by head, stand first."""
    if part != "attn.c_attn":
        return None
    rows = np.arange(2 * (config.attn_dim + config.kv_dim))
    queries = rows[: 2 * config.attn_dim].reshape(config.n_head, 2, config.head_dim)
    return np.concatenate((queries[:, 0].ravel(), rows[2 * config.attn_dim :], queries[:, 1].ravel()))


def without_drafts(config: ModelConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors, convolutions as matrices."""
    return stored | {n: t.merged() for n, t in stored.items() if n.endswith(_CONVOLUTIONS) and len(t.shape) == 3}


_CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
_IN_PROJ: Mapping[str, str | tuple[str, ...]] = {
    "attn.c_attn": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    "attn.c_proj": "linear_attn.out_proj",
    "attn.conv": "linear_attn.conv1d.weight",
    **{ours: f"linear_attn.{theirs}" for ours, theirs in _STATES.items()},
}
_MTP = {
    "mtp.fc.": "mtp_in.", "mtp.pre_fc_norm_embedding.": "mtp_norm_e.", "mtp.pre_fc_norm_hidden.": "mtp_norm_h.",
    "mtp.norm.": "model.norm.", "mtp.layers.0.": "model.layers.0.",
}  # fmt: skip
QWEN3_5 = LLAMA.derive(
    "qwen3_5_text", "Qwen3_5ForCausalLM", names=QK_NORM,
    fixed={"norm_weight": "one_plus", "qk_norm": "head", "attention_gate": True},
    defaults={"num_key_value_heads": 4, "head_dim": 256}, only={"attention_bias": (False, None)},
    harmless=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "mlp_only_layers"),
    read_layers=_read_qwen3_5, write_layers=_write_qwen3_5, recurrent=_IN_PROJ, order=_gate_last,
    from_stored=without_drafts, mtp=_MTP, written=False,
)  # fmt: skip
"""Qwen3.5: gated delta rule in three of four layers, attention with an output gate in the others."""


def _read_qwen3_5_moe(f: Fields, config: ModelConfig) -> dict[str, Any]:
    return experts.with_experts(_read_qwen3_5(f, config), experts.beside_shared(f, 256, 8, normalize=True))


def _write_qwen3_5_moe(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    fields = experts.width_fields(config, count="num_experts", width="moe_intermediate_size")
    return _write_qwen3_5(config) | fields | {"shared_expert_intermediate_size": config.experts.shared_width}


QWEN3_5_MOE = QWEN3_5.derive(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {"intermediate_size": ("n_inner", None)},
    experts.NAMES | experts.shared("mlp.shared_expert") | {"mlp.shared_gate": "mlp.shared_expert_gate"},
    defaults={"num_key_value_heads": 2}, without=("mlp.c_gate", "mlp.c_fc", "mlp.c_proj"),
    only={"attention_bias": (False, None)}, harmless=(*QWEN3_5.harmless, *experts.HARMLESS),
    read_layers=_read_qwen3_5_moe, write_layers=_write_qwen3_5_moe, fused=experts.STACKED,
)  # fmt: skip
"""Qwen3.5 with a mixture of experts in every layer."""


def key_heads_apart(config: ModelConfig, part: str, stored_apart: bool = False) -> NDArray[np.intp] | None:
    """Return the order of c_attn's rows, in whose stored parts what belongs to a head of keys stands together.

    stored_apart: whether only the rates of learning and the decays of such a head are together, as in GGUF files.
    """
    if part != "attn.c_attn" or (state := config.recurrence) is None:
        return None
    values = state.inner_dim // state.num_key_heads
    end = state.num_channels + state.inner_dim
    ends = np.cumsum((state.key_dim, state.key_dim, values, values))[:-1]
    main = np.arange(end)
    if not stored_apart:  # queries, keys, values and gates
        main = np.concatenate([x.ravel() for x in np.split(main.reshape(state.num_key_heads, -1), ends, 1)])
    gates = end + np.arange(state.num_gates).reshape(state.num_key_heads, 2, -1).swapaxes(0, 1)
    return np.concatenate((main, gates.ravel()))


def _read_qwen3_next(f: Fields, config: ModelConfig) -> dict[str, Any]:
    mixture = experts.beside_shared(f, 512, 10, normalize=f.flag("norm_topk_prob", True))
    return experts.with_experts(_read_qwen3_5(f, config), mixture, experts.sparse_layers(f))


def _write_qwen3_next(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen3_5_moe(config) | experts.sparse_fields(config)


QWEN3_NEXT = QWEN3_5_MOE.derive(
    "qwen3_next", "Qwen3NextForCausalLM",
    {"intermediate_size": ("n_inner", 5632), "num_key_value_heads": ("num_kv_heads", 2)},
    {part: LLAMA.names[part] for part in ("mlp.c_gate", "mlp.c_fc", "mlp.c_proj")},
    defaults={"max_position_embeddings": 32768, "vocab_size": 151936}, only={"attention_bias": (False, None)},
    harmless=tuple(name for name in QWEN3_5_MOE.harmless if name != "mlp_only_layers"), read_layers=_read_qwen3_next,
    write_layers=_write_qwen3_next,
    recurrent={**_IN_PROJ, "attn.c_attn": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")},
    recurrent_order=key_heads_apart,
)  # fmt: skip
"""Qwen3-Next: Qwen3.5 with experts, and with other defaults and joined projections."""


def _read_lfm2(f: Fields, config: ModelConfig) -> dict[str, Any]:
    width = f.integer("block_ff_dim", config.mlp_dim)
    if f.flag("block_auto_adjust_ff_dim", True):
        multiple = f.integer("block_multiple_of", 256)
        width = int(f.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return _read_convolutions(f, config) | {"n_inner": width}


def _read_convolutions(f: Fields, config: ModelConfig) -> dict[str, Any]:
    indices = f.get("full_attn_idxs")
    everywhere = [*range(config.n_layer)] if indices is None else indices
    if not isinstance(everywhere, list):
        raise f.error("full_attn_idxs", "is not a list of layers")
    default = ["full_attention" if i in everywhere else "conv" for i in range(config.n_layer)]
    attention = LayerKind(rotary=f.rotary(config, theta=1000000.0))
    layers = layer_kinds(f, config, {"full_attention": attention, "conv": RECURRENT}, default)
    state = Recurrence("conv", f.integer("conv_L_cache", 3), 1, config.n_embd)
    tied = f.flag("tie_embedding", config.tie_word_embeddings)
    f.only("conv_bias", False)
    any_state = any(kind.recurrent for kind in layers)
    return {"layers": layers, "recurrence": state if any_state else None, "tie_word_embeddings": tied}


def _write_lfm2(config: ModelConfig) -> dict[str, Any]:
    taps = {"conv_L_cache": config.recurrence.taps} if config.recurrence else {}
    return _write_layers(config, "conv") | taps | {"block_ff_dim": config.mlp_dim, "block_auto_adjust_ff_dim": False}


LFM2 = LLAMA.derive(
    "lfm2",
    "Lfm2ForCausalLM",
    {"norm_eps": ("norm_epsilon", 1e-5)},
    {
        "ln_f": "model.embedding_norm", "ln_1": "operator_norm", "ln_2": "ffn_norm",
        "attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm",
        "attn.c_proj": "self_attn.out_proj",
        "mlp.c_gate": "feed_forward.w1", "mlp.c_fc": "feed_forward.w3", "mlp.c_proj": "feed_forward.w2",
    },
    defaults={"num_key_value_heads": 8, "tie_word_embeddings": True},
    without=("rms_norm_eps", "hidden_act"),
    harmless=("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
              "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads",
              "use_pos_enc", "theta"),
    fixed={"norm": "rms", "gated_mlp": True, "learned_positions": False, "qk_norm": "head", "activation": "silu"},
    read_layers=_read_lfm2,
    write_layers=_write_lfm2,
    recurrent={"attn.c_attn": "conv.in_proj", "attn.c_proj": "conv.out_proj", "attn.conv": "conv.conv.weight"},
    from_stored=without_drafts,
    written=False,
)  # fmt: skip
"""LFM2 and LFM2.5: short convolutions with gates, and attention in some layers."""


def _read_lfm2_moe(f: Fields, config: ModelConfig) -> dict[str, Any]:
    mixture = Experts(
        experts.num_experts(f, 32), f.get("num_experts_per_tok", 4), f.get("moe_intermediate_size", 1792),
        normalize=f.flag("norm_topk_prob", True), scale=f.number("routed_scaling_factor", 1.0), scoring="sigmoid",
        correction=f.flag("use_expert_bias", True),
    )  # fmt: skip
    dense = f.integer("num_dense_layers", 2, 0)
    return experts.with_experts(_read_convolutions(f, config), mixture, lambda i: i >= dense)


def _write_lfm2_moe(config: ModelConfig) -> dict[str, Any]:
    mixture, taps = config.experts, {"conv_L_cache": config.recurrence.taps} if config.recurrence else {}
    assert mixture is not None
    fields = experts.width_fields(config, count="num_experts", width="moe_intermediate_size")
    return _write_layers(config, "conv") | taps | fields | {
        "norm_topk_prob": mixture.normalize, "routed_scaling_factor": mixture.scale,
        "use_expert_bias": mixture.correction,
        "num_dense_layers": sum(not config.layer(i).experts for i in range(config.n_layer)),
    }  # fmt: skip


def _with_corrections(config: ModelConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors, of which the corrections of experts end as biases."""
    stored = without_drafts(config, stored)
    return {f"{name}.bias" if name.endswith(".expert_bias") else name: tensor for name, tensor in stored.items()}


_LFM2_PARTS = experts.parts("feed_forward.experts", "w1", "w3", "w2")
LFM2_MOE = LFM2.derive(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    names=experts.names("feed_forward.gate", _LFM2_PARTS) | {"mlp.correction": "feed_forward.expert_bias"},
    defaults={"max_position_embeddings": 128000, "vocab_size": 65536},
    harmless=(*LFM2.harmless, *experts.HARMLESS),
    read_layers=_read_lfm2_moe,
    write_layers=_write_lfm2_moe,
    fused=experts.stacked(_LFM2_PARTS, "feed_forward.experts"),
    from_stored=_with_corrections,
)
"""LFM2 with experts that are chosen by sigmoids plus a correction, but in the first layers."""
