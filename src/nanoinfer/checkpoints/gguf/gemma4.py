"""Gemma 4 in GGUF files: the keys of layers that differ, and the names of its own tensors.

Source: llama.cpp, conversion/gemma.py and src/models/gemma4.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoinfer.checkpoints.gguf.metadata import LAYER_TYPES, Metadata, Row
from nanoinfer.errors import NanoinferError
from nanoinfer.models.stored import StoredTensor, contiguous

NAMES: dict[str, str | tuple[str, ...]] = {
    "per_layer.wte": "per_layer_token_embd", "per_layer.c_in": "per_layer_model_proj",
    "per_layer.norm": "per_layer_proj_norm", "after.c_gate": "inp_gate", "after.c_proj": "proj",
    "after.post": "post_norm", "after.scale": "layer_output_scale.weight", "mlp.router_scale": "ffn_gate_inp.scale",
    "mlp.expert_scale": "ffn_down_exps.scale", "mlp.ln_1": "ffn_norm", "mlp.post_1": "post_ffw_norm_1",
    "mlp.ln_2": "pre_ffw_norm_2", "mlp.post_2": "post_ffw_norm_2", "mlp.shared.c_gate": "ffn_gate",
    "mlp.shared.c_fc": "ffn_up", "mlp.shared.c_proj": "ffn_down",
}  # fmt: skip
JOINED = ("ffn_gate_up_exps.weight", "ffn_gate_up_exps.bias")
"""Endings of tensors that have the gate of each expert, and its first matrix below."""
SPLIT = {"mlp.experts.c_gate": "ffn_gate_exps.{}", "mlp.experts.c_fc": "ffn_up_exps.{}"}
"""Names in a file with such a tensor, after `split`."""
STILL = 1e30
"""Divisor of the frequencies of pairs that do not turn, as in llama.cpp."""
ROWS = (
    Row("attention.shared_kv_layers", "num_kv_shared_layers", int, default=0, low=0),
    Row("attention.sliding_window", "sliding_window", int),
    Row("embedding_length_per_layer_input", "hidden_size_per_layer_input", int, default=0, low=0),
    Row("final_logit_softcapping", "final_logit_softcapping", default=None),
)


def read(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that other families lack; `shape` has those of all and of ROWS."""
    num_layers, shared = shape["num_hidden_layers"], shape["num_kv_shared_layers"]
    pattern = m.pattern(num_layers)
    widths = {}
    for kind in ("", "_swa"):
        widths[bool(kind)] = width = m.int_(f"attention.key_length{kind}")
        m.only(m.key(f"attention.value_length{kind}"), width)
        m.only(m.key(f"rope.dimension_count{kind}"), width)
    heads, mlps = m.ints("attention.head_count_kv", num_layers), m.ints("feed_forward_length", num_layers)
    wide = mlps[-1] == 2 * mlps[0] and 0 < shared < num_layers
    if mlps != [mlps[0] * (1 + (wide and i >= num_layers - shared)) for i in range(num_layers)]:
        raise m.error(m.key("feed_forward_length"), "is not supported: only layers without keys may be twice as wide")
    own = [i for i, local in enumerate(pattern) if not local and i < num_layers - shared]
    mixture: dict[str, Any] = {"enable_moe_block": "expert_count" in m}
    if mixture["enable_moe_block"]:
        mixture["num_experts"] = m.int_("expert_count")
        mixture["top_k_experts"] = m.int_("expert_used_count")
        mixture["moe_intermediate_size"] = m.int_("expert_feed_forward_length")
    return mixture | {
        "head_dim": widths[True],
        "num_key_value_heads": heads[pattern.index(True) if any(pattern) else 0],
        "per_layer_config": {
            str(i): {"head_dim": widths[local], "num_key_value_heads": heads[i]} for i, local in enumerate(pattern)
        },
        "layer_types": [LAYER_TYPES[local] for local in pattern],
        "vocab_size_per_layer_input": shape["vocab_size"],
        "use_double_wide_mlp": wide,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in m.tensors for i in own),
        "rope_parameters": {
            "full_attention": _turning(m, widths[False]) | {"rope_theta": m.float_("rope.freq_base", 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": m.float_("rope.freq_base_swa", 1e4)},
        },
    }


def _turning(m: Metadata, width: int) -> dict[str, Any]:
    """Return the rotary parameters of the global layers, in which some pairs of dimensions turn, the first ones."""
    if (stored := m.tensors.get(name := "rope_freqs.weight")) is None:
        return {"rope_type": "default"}
    if stored.shape != (width // 2,):
        raise NanoinferError(f"tensor {name} is {list(stored.shape)}, but the heads require {[width // 2]}")
    divisors = stored.read().float32()
    turning = int((divisors == 1).sum())
    if not ((divisors[:turning] == 1).all() and (divisors[turning:] >= STILL * 0.99).all()):
        raise NanoinferError(
            f"tensor {name} is not supported: divisors must be 1, and those of the last pairs {STILL:g}"
        )
    if turning == width // 2:
        return {"rope_type": "default"}
    return {"rope_type": "proportional", "partial_rotary_factor": (2 * turning + 0.5) / width}


def split(tensor: StoredTensor, num_experts: int, alternating: bool) -> list[StoredTensor]:
    """Return the gate and the first matrix of each expert, one after the other, of a tensor with all of them.

    Args:
        tensor: matrices, (experts, rows, in), or biases, (experts, rows).
        num_experts: number of experts.
        alternating: whether the rows of both alternate, as in Ollama's files of gpt-oss; else they are halves.

    Raises:
        NanoinferError: it is not one of so many experts.
    """
    fits = len(tensor.shape) == 3 or (len(tensor.shape) == 2 and tensor.block_format is None)
    if not fits or tensor.shape[0] != num_experts or tensor.shape[1] % 2:
        raise NanoinferError(
            f"tensor {JOINED[0]} is {list(tensor.shape)}, which is not two matrices of {num_experts} experts"
        )
    shape = (tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])
    whole = replace(tensor, shape=shape, strides=contiguous(shape))
    if not alternating:
        return whole.equal_parts(2 * num_experts)
    return [part for one in whole.equal_parts(num_experts) for part in one.alternate(2)]
