"""Models with recurrent layers in GGUF files: the keys of their states, and the names of the tensors of such layers.

Source: llama.cpp, conversion/qwen.py, conversion/lfm2.py and src/models/qwen35.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.metadata import Metadata, Row
from nanoinfer.errors import NanoinferError

CONVOLUTION: dict[str, str | tuple[str, ...]] = {
    "attn.c_attn": "shortconv.in_proj", "attn.c_proj": "shortconv.out_proj", "attn.conv": "shortconv.conv.weight",
}  # fmt: skip
_STATE: dict[str, str | tuple[str, ...]] = {
    "attn.c_proj": "ssm_out",
    "attn.conv": "ssm_conv1d.weight",
    "attn.a_log": "ssm_a",
    "attn.dt_bias": "ssm_dt.bias",
    "attn.norm_scale": "ssm_norm.weight",
}
DELTA: dict[str, str | tuple[str, ...]] = {"attn.c_attn": ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")} | _STATE
NEXT: dict[str, str | tuple[str, ...]] = DELTA | {"attn.c_attn": ("attn_qkv", "attn_gate", "ssm_ba")}
"""Of Qwen3-Next, whose rates of learning and decays of a head of keys stand together."""
DECAY = "ssm_a"
"""Ending of the tensor that has -exp(a_log)."""
OWN_NORM = "ssm_norm.weight"
"""Ending of a norm that no number was added to."""
DELTA_ROWS = (
    Row("ssm.conv_kernel", "linear_conv_kernel_dim", int),
    Row("ssm.state_size", "linear_key_head_dim", int),
    Row("ssm.group_count", "linear_num_key_heads", int),
    Row("ssm.time_step_rank", "linear_num_value_heads", int),
)
CONVOLUTION_ROWS = (Row("shortconv.l_cache", "conv_L_cache", int),)


def delta(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that a model with the gated delta rule has beside those of DELTA_ROWS."""
    inner, heads, num_layers = m.int_("ssm.inner_size"), shape["linear_num_value_heads"], shape["num_hidden_layers"]
    if inner % heads:
        raise m.error(m.key("ssm.inner_size"), f"is no multiple of the {heads} heads of {m.key('ssm.time_step_rank')}")
    step, key = m.int_("full_attention_interval", 4), m.key("attention.recurrent_layers")
    given = m.get(key, [(i + 1) % step != 0 for i in range(num_layers)])  # with layers that predict further tokens
    if not isinstance(given, list) or len(given) < num_layers or not all(type(one) is bool for one in given):
        raise m.error(key, f"is not a list of {num_layers} booleans, one for each layer")
    types = ["linear_attention" if one else "full_attention" for one in given[:num_layers]]
    return {"linear_value_head_dim": inner // heads, "layer_types": types}


def lfm2(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that other families lack: layers without keys have convolutions."""
    num_layers, key = shape["num_hidden_layers"], m.key("attention.head_count_kv")
    heads = m.get(key)
    heads = heads if isinstance(heads, list) else [heads] * num_layers
    if len(heads) != num_layers:
        raise m.error(key, f"is not a list of {num_layers} numbers, one for each layer")
    types = ["full_attention" if count else "conv" for count in heads]
    return {"layer_types": types, "block_auto_adjust_ff_dim": False, "norm_eps": shape["rms_norm_eps"]}


def log_decay(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a_log, (H,), for the stored -exp(a_log). Raises NanoinferError if one is not negative."""
    if not (values < 0).all():
        raise NanoinferError(f"tensor {DECAY} has numbers that are not negative, so that states would grow")
    logarithms: NDArray[np.float32] = np.log(-values).reshape(-1)
    return logarithms
