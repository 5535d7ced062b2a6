"""Models with recurrent layers in GGUF files: the keys of their states, and the names of the tensors of such layers.

Source: llama.cpp, conversion/ (qwen.py, lfm2.py, granite.py, falcon_h1.py, nemotron.py) and src/models.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.metadata import Metadata, Row
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError

CONVOLUTION: dict[str, str | tuple[str, ...]] = {
    "attn.c_attn": "shortconv.in_proj", "attn.c_proj": "shortconv.out_proj", "attn.conv": "shortconv.conv.weight",
}  # fmt: skip
_STATE: dict[str, str | tuple[str, ...]] = {
    "attn.c_proj": "ssm_out", "attn.conv": "ssm_conv1d.weight", "attn.a_log": "ssm_a", "attn.dt_bias": "ssm_dt.bias",
    "attn.norm_scale": "ssm_norm.weight",
}  # fmt: skip
MAMBA: dict[str, str | tuple[str, ...]] = _STATE | {
    "attn.c_attn": "ssm_in", "attn.conv_bias": "ssm_conv1d.bias", "attn.skip_scale": "ssm_d",
}  # fmt: skip
BESIDE = MAMBA | {"attn.c_attn": ("attn_q", "attn_k", "attn_v", "ssm_in"), "attn.c_proj": "attn_output",
                  "attn.state_proj": "ssm_out"}  # fmt: skip
"""Of layers with attention beside Mamba 2."""
DELTA: dict[str, str | tuple[str, ...]] = {"attn.c_attn": ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")} | _STATE
NEXT: dict[str, str | tuple[str, ...]] = DELTA | {"attn.c_attn": ("attn_qkv", "attn_gate", "ssm_ba")}
"""Of Qwen3-Next, whose rates of learning and decays of a head of keys stand together."""
DECAY = "ssm_a"
"""Ending of the tensor that has -exp(a_log)."""
VECTORS = (".ssm_d", ".ssm_norm.weight")
"""Endings of vectors that may be stored as matrices, of a head or a group a row."""
OWN_NORM = "ssm_norm.weight"
"""Ending of a norm that no number was added to."""
DELTA_ROWS = (
    Row("ssm.conv_kernel", "linear_conv_kernel_dim", int),
    Row("ssm.state_size", "linear_key_head_dim", int),
    Row("ssm.group_count", "linear_num_key_heads", int),
    Row("ssm.time_step_rank", "linear_num_value_heads", int),
)
MAMBA_ROWS = (
    Row("ssm.conv_kernel", "mamba_d_conv", int),
    Row("ssm.state_size", "mamba_d_state", int),
    Row("ssm.group_count", "mamba_n_groups", int),
    Row("ssm.time_step_rank", "mamba_n_heads", int),
    Row("ssm.inner_size", "mamba_d_ssm", int),
)
_NEMOTRON = {
    "mamba_d_conv": "conv_kernel", "mamba_d_state": "ssm_state_size", "mamba_n_groups": "n_groups",
    "mamba_n_heads": "mamba_num_heads",
}  # fmt: skip
NEMOTRON_ROWS = tuple(replace(row, field=_NEMOTRON[row.field]) for row in MAMBA_ROWS if row.field in _NEMOTRON)
CONVOLUTION_ROWS = (Row("shortconv.l_cache", "conv_L_cache", int),)


def delta(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that a model with the gated delta rule has beside those of DELTA_ROWS."""
    num_layers = shape["num_hidden_layers"]
    step, key = m.int_("full_attention_interval", 4), m.key("attention.recurrent_layers")
    given = m.get(key, [(i + 1) % step != 0 for i in range(num_layers)])  # with layers that predict further tokens
    if not isinstance(given, list) or len(given) < num_layers or not all(type(one) is bool for one in given):
        raise m.error(key, f"is not a list of {num_layers} booleans, one for each layer")
    types = ["linear_attention" if one else "full_attention" for one in given[:num_layers]]
    return {"linear_value_head_dim": _head_dim(m, shape["linear_num_value_heads"]), "layer_types": types}


def _head_dim(m: Metadata, heads: int) -> int:
    """Return the number of values of each head of a state."""
    if (inner := m.int_("ssm.inner_size")) % heads:
        raise m.error(m.key("ssm.inner_size"), f"is no multiple of the {heads} heads of {m.key('ssm.time_step_rank')}")
    return inner // heads


def mamba(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Mamba 2 layers beside those of MAMBA_ROWS; layers without keys are such layers."""
    kinds = _with_keys(m, shape["num_hidden_layers"])
    first = kinds.index(False) if False in kinds else 0
    return {
        "mamba_d_head": _head_dim(m, shape["mamba_n_heads"]),
        "mamba_expand": shape["mamba_d_ssm"] / shape["hidden_size"],
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in m.tensors,
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in m.tensors,
        "layer_types": ["attention" if one else "mamba" for one in kinds],
    }


def nemotron(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that other families lack: a layer of the file is a mixer, or an MLP alone."""
    m.only(m.key("expert_group_count"), 1)  # files lack the number of groups that a token may use
    num_layers, key = shape["num_hidden_layers"], m.key("feed_forward_length")
    widths = m.get(key)
    if not isinstance(widths, list) or len(widths) != num_layers:
        raise m.error(key, f"is not a list of {num_layers} numbers, one for each layer")
    kinds, mlp = zip(_with_keys(m, num_layers), widths, strict=True), "E" if "expert_count" in m else "-"
    pattern = "".join("*" if keys else mlp if width else "M" for keys, width in kinds)
    first = pattern.find("M")
    return {
        "hybrid_override_pattern": pattern,
        "layer_norm_epsilon": shape["rms_norm_eps"],
        "mamba_head_dim": _head_dim(m, shape["mamba_num_heads"]),
        "use_conv_bias": f"blk.{first}.ssm_conv1d.bias" in m.tensors,
        "use_bias": f"blk.{first}.ssm_in.bias" in m.tensors,
    }


def whole_layers(config: ModelConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors with those of a mixer and of the MLP after it in one layer (Nemotron-H)."""
    places = [place for i, kind in enumerate(config.layers) for place in [(i, False), (i, True)][: 1 + kind.mlp]]

    def ours(match: re.Match[str]) -> str:
        layer, mlp = places[int(match[1])] if int(match[1]) < len(places) else (int(match[1]), False)
        return f"blk.{layer}.{'ffn_norm.' if mlp and match[2] == 'attn_norm.' else match[2]}"

    return {re.sub(r"^blk\.(\d{1,9})\.(\w+\.?)", ours, name): tensor for name, tensor in stored.items()}


def _with_keys(m: Metadata, num_layers: int) -> list[bool]:
    """Return which layers have keys."""
    heads = m.get(key := m.key("attention.head_count_kv"))
    heads = heads if isinstance(heads, list) else [heads] * num_layers
    if len(heads) != num_layers:
        raise m.error(key, f"is not a list of {num_layers} numbers, one for each layer")
    return [bool(count) for count in heads]


def lfm2(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that other families lack: layers without keys have convolutions."""
    types = ["full_attention" if one else "conv" for one in _with_keys(m, shape["num_hidden_layers"])]
    return {"layer_types": types, "block_auto_adjust_ff_dim": False, "norm_eps": shape["rms_norm_eps"]}


def log_decay(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a_log, (H,), for the stored -exp(a_log). Raises NanoinferError if one is not negative."""
    if not (values < 0).all():
        raise NanoinferError(f"tensor {DECAY} has numbers that are not negative, so that states would grow")
    logarithms: NDArray[np.float32] = np.log(-values).reshape(-1)
    return logarithms
