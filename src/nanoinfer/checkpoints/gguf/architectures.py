"""llama.cpp's architectures: the keys of their metadata as fields of a config.json, of some also back, and tensors.

A key that is a field under another name is a row of a table, which reads and writes it; functions do the others. A file
of deepseek2 with `key_length_mla` has one matrix of keys and one of values for each head, as ours are; files before
April 2025 have both in one matrix of all heads.

Source: llama.cpp, convert_hf_to_gguf.py, gguf-py/gguf/constants.py and src/models.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf import gemma4 as gguf_gemma4
from nanoinfer.checkpoints.gguf import hybrid
from nanoinfer.checkpoints.gguf.file import Value
from nanoinfer.checkpoints.gguf.metadata import LONG, Metadata, Row, scaling, windows
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.rotary import frequencies

log = logging.getLogger("nanoinfer")

TOP = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
LAYER: dict[str, str | tuple[str, ...]] = {
    "ln_1": "attn_norm", "attn.c_attn": ("attn_q", "attn_k", "attn_v"), "attn.sinks": "attn_sinks.weight",
    "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "attn.c_proj": "attn_output",
    "attn.sub_norm": "attn_sub_norm", "mlp.sub_norm": "ffn_sub_norm", "post_1": "post_attention_norm",
    "ln_2": "ffn_norm", "mlp.c_gate": "ffn_gate", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "post_2": "post_ffw_norm", "mlp.router": "ffn_gate_inp", "mlp.experts.c_gate": "ffn_gate_exps",
    "mlp.experts.c_fc": "ffn_up_exps", "mlp.experts.c_proj": "ffn_down_exps", "mlp.shared.c_gate": "ffn_gate_shexp",
    "mlp.shared.c_fc": "ffn_up_shexp", "mlp.shared.c_proj": "ffn_down_shexp", "mlp.shared_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
"""Our part of a layer -> llama.cpp's; with the suffix where ours has none."""
STACKED = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
"""Endings of tensors with three dimensions, the experts first."""
STACKED_BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")
"""Endings of their biases, with two dimensions."""
SHARED_GATE = "ffn_gate_inp_shexp.weight"
"""Ending of a matrix of one row that is stored as a vector."""
_QUERY_NORM = "blk.0.attn_q_norm.weight"
FREQUENCIES = "rope_freqs.weight"
"""Divisors of the frequencies, of Llama 3's scaling."""
LATENT: dict[str, str | tuple[str, ...]] = {
    "attn.c_attn": ("attn_q", "attn_q_a", "attn_kv_a_mqa"), "attn.q_norm": "attn_q_a_norm", "attn.q_b": "attn_q_b",
    "attn.kv_norm": "attn_kv_a_norm", "attn.k_b": "attn_k_b", "attn.v_b": "attn_v_b", "mlp.correction": "exp_probs_b",
}  # fmt: skip
OF_HEADS = ("attn_k_b.weight", "attn_v_b.weight")
"""Endings of tensors with three dimensions, the heads first."""
JOINED_HEADS = "attn_kv_b"
"""Keys and values of all heads in one matrix, in files before April 2025."""


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures describes and stores models of a family."""

    family: str
    """model_type of the family."""
    further: Callable[[Metadata, dict[str, Any]], dict[str, Any]] = lambda m, shape: {}
    """Return the fields of config.json beside those of `_sizes`, `_heads` and the rows, or in place of them."""
    rows: tuple[Row, ...] = ()
    partial: bool = False
    """Whether a share of each head may be rotated."""
    own_heads: bool = False
    """Whether `further` reads the width of a head."""
    interleaved: bool = False
    """Whether queries and keys are stored for a rotation of adjacent dimensions (2i, 2i + 1)."""
    joined: bool = False
    """Whether queries, keys and values are one tensor, as in a file of any architecture with `attn_qkv`."""
    added_to_norms: float = 0.0
    """Number that was added to the weights of norms."""
    gate_in_up: bool = False
    """Whether the gate and the MLP's first matrix are one tensor."""
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Our part -> the name of the tensor, where it is not the usual one."""
    recurrent: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """The same of recurrent layers. The number of heads of keys may then be 0 in some layers."""
    tiled: bool = False
    """Whether heads of a state that share a key are `Recurrence.tiled`."""

    def read(self, m: Metadata) -> dict[str, Any]:
        """Return the fields of config.json, for any family: one ignores those that it does not have."""
        shape = _sizes(m, bool(self.recurrent)) | ({} if self.own_heads else _heads(m, self.partial))
        fields = {"model_type": self.family} | shape | {row.field: m.row(row, shape) for row in self.rows}
        return fields | self.further(m, fields)

    def write(self, fields: Mapping[str, Any]) -> dict[str, Value]:
        """Return the keys of the rows, without the prefix."""
        values = {row.key: (row, fields.get(row.field)) for row in self.rows}
        return {key: row.kind(value) for key, (row, value) in values.items() if value not in (None, row.omit)}


def _heads(m: Metadata, partial: bool) -> dict[str, Any]:
    """Return the width of a head, and the share of it that is rotated, if that may be less than all."""
    width = m.int_("attention.key_length", max(1, m.int_("embedding_length") // m.int_("attention.head_count")))
    m.only(m.key("attention.value_length"), width)
    if not partial:
        m.only(m.key("rope.dimension_count"), width)
        return {"head_dim": width}
    rotated = m.int_("rope.dimension_count", width)
    share = 1.0 if rotated >= width else (rotated + 0.5) / width  # so that the product is not rounded down
    return {"head_dim": width, "partial_rotary_factor": share, "rotary_pct": share}


def _sizes(m: Metadata, hybrid: bool) -> dict[str, Any]:
    """Return the fields of config.json that most families have, each under all of its names.

    In a hybrid model, layers without attention have 0 heads of keys, and one with experts need not have another MLP.
    """
    n_head, n_embd = m.int_("attention.head_count"), m.int_("embedding_length")
    m.get(m.key("pooling_type"))  # models/pooling.py
    m.get(m.key("tensor_data_layout"))  # older converters wrote whose layout they had read
    vocab_size, num_layers = _vocab_size(m), _num_layers(m)
    differ = m.arch == "gemma4"  # `_gemma4` reads the numbers of all layers
    heads, width, mixed = "attention.head_count_kv", "feed_forward_length", hybrid and "expert_count" in m
    theta, epsilon = m.float_("rope.freq_base", 10000.0), m.float_("attention.layer_norm_epsilon", 1e-5)
    return {
        "vocab_size": vocab_size,
        "max_position_embeddings": m.int_("context_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": n_head,
        "num_key_value_heads": m.ints(heads, num_layers)[0] if differ else m.int_(heads, n_head, hybrid),
        "hidden_size": n_embd,
        "intermediate_size": m.ints(width, num_layers)[0]
        if differ
        else m.int_(width, n_embd if mixed else None, hybrid),
        "rms_norm_eps": m.float_("attention.layer_norm_rms_epsilon", epsilon),
        **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps"), epsilon),
        "tie_word_embeddings": "output.weight" not in m.tensors,
        **dict.fromkeys(("rope_theta", "rotary_emb_base"), theta),
        "rope_scaling": scaling(m),
        **dict.fromkeys(("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias"), m.has_bias("attn_q")),
        "attention_out_bias": m.has_bias("attn_output"),
        "mlp_bias": m.has_bias("ffn_up"),
    }


def _num_layers(m: Metadata) -> int:
    """Return the number of layers, after comparing it with the tensors: the config has an entry for each layer."""
    layers = {name.split(".")[1] for name in m.tensors if name.startswith("blk.")}
    further = m.integer(m.key("nextn_predict_layers"), 0, 0)  # of which model.py leaves out all but the first
    count = m.int_("block_count") - further
    if len(layers) not in (count, count + min(further, 1)):
        raise m.error(m.key("block_count"), f"is not the number of layers that the file has: {len(layers)}")
    return count


def _vocab_size(m: Metadata) -> int:
    m.get(m.key("vocab_size"))  # some converters wrote the tokenizer's, which is smaller than the embedding
    if (embedding := m.tensors.get("token_embd.weight")) is None:
        raise NanoinferError("tensor token_embd.weight is missing")
    return embedding.shape[0]


def _llama(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if (window := "attention.sliding_window") in m:
        fields = {"model_type": "mistral", "sliding_window": m.int_(window)}  # a Llama with a window in all layers
    return fields | _experts(m, shape) | {"model_type": "mixtral"} if "expert_count" in m else fields


def _experts(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a mixture of experts. All layers have one: llama.cpp reads no others."""
    m.only(m.key("expert_gating_func"), 1)  # a softmax
    return {"num_local_experts": m.int_("expert_count"), "num_experts_per_tok": m.int_("expert_used_count")}


def _olmoe(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    m.only(m.key("attention.clamp_kqv"), None)
    return _experts(m, shape) | {"norm_topk_prob": False}


def _qwen_moe(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp fixes what the file lacks: whether the chosen experts' weights are divided by their sum."""
    return _qwen(m, shape) | _experts(m, shape) | {"norm_topk_prob": m.arch != "qwen2moe"}


def _delta_moe(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    m.only(m.key("expert_weights_norm"), True)
    return hybrid.delta(m, shape) | _experts(m, shape) | {"norm_topk_prob": True}


def _lfm2_moe(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    m.only(m.key("expert_gating_func"), 2)  # sigmoids
    m.only(m.key("expert_weights_norm"), True)
    counts = {"num_experts": m.int_("expert_count"), "num_experts_per_tok": m.int_("expert_used_count")}
    return hybrid.lfm2(m, shape) | counts


def _granite_hybrid(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """As in llama.cpp, positions are rotated if `rope.scaling.finetuned` is true."""
    rotated = m.flag(m.key("rope.scaling.finetuned"), False)
    fields = hybrid.mamba(m, shape) | {"position_embedding_type": "rope" if rotated else None}
    if "expert_count" not in m:
        return fields | {"num_local_experts": 0, "shared_intermediate_size": shape["intermediate_size"]}
    width = m.int_("expert_feed_forward_length", shape["intermediate_size"])
    shared = m.int_("expert_shared_feed_forward_length")
    return fields | _experts(m, shape) | {"intermediate_size": width, "shared_intermediate_size": shared}


def _falcon_h1(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """The converter has multiplied all factors into the weights."""
    norm = "blk.0.ssm_norm.weight" in m.tensors
    return hybrid.mamba(m, shape) | {"mamba_rms_norm": norm, "mamba_norm_before_gate": False}


def _gpt_oss(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp fixes what the file lacks: every second layer has a window, the first one included."""
    width = m.int_("expert_feed_forward_length", shape["intermediate_size"])
    rope = shape["rope_scaling"] or {"rope_type": "default"}
    return _experts(m, shape) | {"intermediate_size": width, "rope_scaling": rope}


def _gemma3(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp fixes what the file lacks: every sixth layer is global, the local base is 10,000.

    Files of Ollama have other names of bases; those with a vision part lack the scaling that such models have.
    """
    num_layers = shape["num_hidden_layers"]
    fields: dict[str, Any] = {"rms_norm_eps": m.float_("attention.layer_norm_rms_epsilon", 1e-6)}
    if "rope.freq_base" not in m:
        fields["rope_theta"] = m.float_("rope.global.freq_base", 1e6)
    if "rope.freq_base_swa" not in m:
        fields["rope_local_base_freq"] = m.float_("rope.local.freq_base", 10000.0)
    if "vision.block_count" in m and "rope.scaling.factor" not in m and num_layers in (34, 48, 62):
        fields["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    width = shape["hidden_size"] // shape["num_attention_heads"] if num_layers == 62 else shape["head_dim"]  # 27B
    local = windows(m, num_layers, 6) or {"layer_types": ["full_attention"] * num_layers}
    return fields | local | {"query_pre_attn_scalar": width}


def _gemma2(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    at_27b = shape["num_hidden_layers"] == 46  # llama.cpp fixes what the file lacks
    width = shape["hidden_size"] // shape["num_attention_heads"] if at_27b else shape["head_dim"]
    return {"query_pre_attn_scalar": width}


def _longrope(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    original = 4096 if m.arch == "phi3" else shape["max_position_embeddings"]
    context = m.int_("rope.scaling.original_context_length", original)
    scaling: dict[str, Any] | None = shape["rope_scaling"]
    if any(name in m.tensors for name in LONG.values()):
        scaling = {"rope_type": "longrope", "attention_factor": m.float_("rope.scaling.attn_factor", 1.0)}
        for theirs, name in LONG.items():
            if name not in m.tensors:
                raise NanoinferError(f"tensor {name} is missing: the file has other parts of longrope")
            scaling[theirs] = m.tensors[name].read().float32().reshape(-1).tolist()
    return {"original_max_position_embeddings": context, "rope_scaling": scaling}


def _olmo(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    m.only(m.key("attention.layer_norm_epsilon"), 1e-5)
    m.only(m.key("attention.clamp_kqv"), None)
    return {}


def _stablelm(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    m.get(m.key("use_parallel_residual"))  # as llama.cpp, which looks whether the tensor is there
    parallel = "blk.0.ffn_norm.weight" not in m.tensors
    return {"use_parallel_residual": parallel, "qk_layernorm": _QUERY_NORM in m.tensors}


def _exaone4(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": None} | windows(m, shape["num_hidden_layers"], 4)


def _qwen(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    return windows(m, shape["num_hidden_layers"])


def _cohere(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": _QUERY_NORM in m.tensors}


def _olmo2(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 is an OLMo 2 with windows: only its global layers have scaled positions."""
    if not (local := windows(m, shape["num_hidden_layers"], 4)):
        return {}
    theta, scaled = shape["rope_theta"], shape["rope_scaling"] or {"rope_type": "default"}
    nearby = {"rope_type": "default", "rope_theta": m.float_("rope.freq_base_swa", theta)}
    ropes = {"full_attention": scaled | {"rope_theta": theta}, "sliding_attention": nearby}
    return local | {"model_type": "olmo3", "rope_parameters": ropes}


def _mistral3(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Mistral Small 3.1, and Ministral 3, whose queries grow with the position."""
    growth, rope = m.float_("attention.temperature_scale", None), shape["rope_scaling"] or {"rope_type": "default"}
    return {"rope_scaling": rope if growth is None else rope | {"llama_4_scaling_beta": growth}}


_GPT2 = {
    "n_positions": "max_position_embeddings", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_embd": "hidden_size", "n_inner": "intermediate_size",
}  # fmt: skip


def _gpt2(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    return {theirs: shape[ours] for theirs, ours in _GPT2.items()}


def _deepseek(m: Metadata, shape: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSeek-V3's fields if experts are chosen by sigmoids, else V2's."""
    m.only(m.key("expert_gating_func"), 1, 2)
    # Files of GLM-4.7-Flash name no function; those of DeepSeek-V2 that name none do not normalize.
    corrected = m.get(m.key("expert_gating_func"), 2 if shape["norm_topk_prob"] else 1) == 2
    groups, rotated = m.int_("expert_group_count", 1), m.int_("rope.dimension_count")
    whole, values = (m.int_(f"attention.{name}_length") for name in ("key", "value"))
    if "attention.key_length_mla" in m:  # the others are then those of the latent
        whole, values = (m.int_(f"attention.{name}_length_mla") for name in ("key", "value"))
    return {
        "model_type": "deepseek_v3" if corrected else "deepseek_v2", "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated, "v_head_dim": values, "n_group": groups,
        "topk_group": m.int_("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if corrected else "group_limited_greedy" if groups > 1 else "greedy",
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _scales(embedding: Any, residual: Any, logits: Any) -> tuple[Row, ...]:
    """Return Granite's factors with these defaults, which are those of llama.cpp."""
    return (
        Row("attention.scale", "attention_multiplier", default=lambda shape: shape["head_dim"] ** -0.5),
        Row("embedding_scale", "embedding_multiplier", default=embedding),
        Row("residual_scale", "residual_multiplier", default=residual),
        Row("logit_scale", "logits_scaling", default=logits),
    )


_GRANITE = _scales(1.0, 1.0, 1.0)
_MINICPM = _scales(12.0, lambda s: 1.4 / s["num_hidden_layers"] ** 0.5, lambda s: s["hidden_size"] / 256)
_COHERE = Row("logit_scale", "logit_scale", default=0.0625)
_WIDTH = Row("expert_feed_forward_length", "moe_intermediate_size", int)
_SHARED = (_WIDTH, Row("expert_shared_feed_forward_length", "shared_expert_intermediate_size", int))
_WINDOW = Row("attention.sliding_window", "sliding_window", int)
_CAP = Row("final_logit_softcapping", "final_logit_softcapping", default=None)
_CAPS = (Row("attn_logit_softcapping", "attn_logit_softcapping", default=None), _CAP)
_SCALE = Row("expert_weights_scale", "routed_scaling_factor", default=1.0)
_DENSE = Row("leading_dense_block_count", "num_dense_layers", int, default=0, low=0)
_DEEPSEEK = (
    Row("attention.kv_lora_rank", "kv_lora_rank", int), Row("attention.q_lora_rank", "q_lora_rank", int, default=None),
    Row("expert_count", "n_routed_experts", int), Row("expert_used_count", "num_experts_per_tok", int), _WIDTH,
    Row("expert_shared_count", "n_shared_experts", int), _SCALE,
    Row("expert_weights_norm", "norm_topk_prob", bool, default=False), replace(_DENSE, field="first_k_dense_replace"),
)  # fmt: skip
_NEMOTRON_EXPERTS = (
    *_DEEPSEEK[2:8], Row("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", int),
    Row("moe_latent_size", "moe_latent_size", int, default=None),
)  # fmt: skip
_QWEN35 = Architecture(
    "qwen3_5_text", hybrid.delta, hybrid.DELTA_ROWS, partial=True, added_to_norms=1.0,
    names={"ln_2": "post_attention_norm"}, recurrent=hybrid.DELTA, tiled=True,
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, interleaved=True),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "qwen2vl": Architecture("qwen2", _qwen),
    "qwen3vl": Architecture("qwen3", _qwen),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe, _SHARED),
    "qwen3moe": Architecture("qwen3_moe", _qwen_moe, (_WIDTH,)),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, family="qwen3_5_moe_text", further=_delta_moe, rows=(*_QWEN35.rows, *_SHARED)),
    "qwen3next": replace(
        _QWEN35,
        family="qwen3_next",
        further=_delta_moe,
        rows=(*_QWEN35.rows, *_SHARED),
        recurrent=hybrid.NEXT,
        tiled=False,
    ),
    "lfm2": Architecture(
        "lfm2", hybrid.lfm2, hybrid.CONVOLUTION_ROWS, names={"ln_f": "token_embd_norm"}, recurrent=hybrid.CONVOLUTION
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _lfm2_moe,
        (*hybrid.CONVOLUTION_ROWS, _WIDTH, _SCALE, _DENSE),
        names={"ln_f": "token_embd_norm", "mlp.correction": "exp_probs_b"},
        recurrent=hybrid.CONVOLUTION,
    ),
    "qwen3vlmoe": Architecture("qwen3_moe", _qwen_moe, (_WIDTH,)),
    "olmoe": Architecture("olmoe", _olmoe),
    "granitemoe": Architecture("granitemoe", _experts, _GRANITE, interleaved=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, (_WINDOW,), names={"ln_2": "post_attention_norm"}),
    "gptoss": Architecture(
        "gpt_oss", _gpt_oss, (_WINDOW,), names={"attn.c_proj": "attn_out", "attn.sinks": "attn_sinks"}
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _gemma3,
        (*_CAPS, Row("rope.freq_base_swa", "rope_local_base_freq", default=1e4, omit=1e4)),
        added_to_norms=1.0,
    ),
    "gemma4": Architecture("gemma4_text", gguf_gemma4.read, gguf_gemma4.ROWS, own_heads=True, names=gguf_gemma4.NAMES),
    "olmo2": Architecture("olmo2", _olmo2),
    "mistral3": Architecture("ministral3", _mistral3, interleaved=True),
    "starcoder2": Architecture("starcoder2"),
    "smollm3": Architecture("smollm3", interleaved=True),
    "gemma": Architecture("gemma", added_to_norms=1.0),
    "gemma2": Architecture("gemma2", _gemma2, (replace(_WINDOW, default=4096), *_CAPS), added_to_norms=1.0),
    "phi2": Architecture("phi", partial=True),
    "phi3": Architecture(
        "phi3", _longrope, (replace(_WINDOW, default=None),), partial=True, joined=True, gate_in_up=True
    ),
    "granite": Architecture("granite", rows=_GRANITE, interleaved=True),
    "granitehybrid": Architecture(
        "granitemoehybrid", _granite_hybrid, (*_GRANITE, *hybrid.MAMBA_ROWS), interleaved=True, recurrent=hybrid.MAMBA
    ),
    "nemotron_h": Architecture("nemotron_h", hybrid.nemotron, hybrid.NEMOTRON_ROWS, recurrent=hybrid.MAMBA),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        hybrid.nemotron,
        (*hybrid.NEMOTRON_ROWS, *_NEMOTRON_EXPERTS),
        recurrent=hybrid.MAMBA,
        names={"mlp.correction": "exp_probs_b"},
    ),
    "falcon-h1": Architecture("falcon_h1", _falcon_h1, hybrid.MAMBA_ROWS, names=hybrid.BESIDE),
    "minicpm": Architecture("granite", _longrope, _MINICPM, interleaved=True),
    "olmo": Architecture("olmo", _olmo, interleaved=True),
    "stablelm": Architecture("stablelm", _stablelm, partial=True),
    "glm4": Architecture("glm4", partial=True, interleaved=True, gate_in_up=True),
    "chatglm": Architecture("glm", partial=True, interleaved=True, gate_in_up=True),
    "command-r": Architecture("cohere", _cohere, rows=(_COHERE,), interleaved=True),
    "cohere2": Architecture("cohere2", _cohere, rows=(_COHERE, replace(_WINDOW, default=4096)), interleaved=True),
    "exaone": Architecture("llama"),
    "exaone4": Architecture("exaone4", _exaone4),
    "ernie4_5": Architecture("ernie4_5", interleaved=True),
    "seed_oss": Architecture("seed_oss", names={"ln_2": "post_attention_norm"}),
    "arcee": Architecture("arcee", interleaved=True),
    "nemotron": Architecture("nemotron", partial=True, added_to_norms=1.0),
    "jais2": Architecture("jais2"),
    # llama.cpp fixes what the file lacks: SiLU, and inputs of 8 bits in groups of its own
    "bitnet": Architecture("bitnet", lambda m, shape: {"hidden_act": "silu"}),
    "deepseek2": Architecture("deepseek_v2", _deepseek, _DEEPSEEK, own_heads=True, interleaved=True, names=LATENT),
    "gpt2": Architecture("gpt2", _gpt2, joined=True, own_heads=True),
    "gptneox": Architecture(
        "gpt_neox",
        rows=(Row("use_parallel_residual", "use_parallel_residual", bool, default=True),),
        partial=True,
        joined=True,
    ),
}
"""By general.architecture."""


def describe(config: ModelConfig, arch: str) -> dict[str, Value]:
    """Return the keys of the architecture, without its prefix, from which model.py reads the config."""
    epsilon = "attention.layer_norm_rms_epsilon" if config.norm == "rms" else "attention.layer_norm_epsilon"
    keys: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.n_head,
        epsilon: float(config.norm_epsilon),
    }
    keys |= _describe_rotary(config) | ARCHITECTURES[arch].write(FAMILIES[config.family].write(config))
    windowed = next((kind for kind in config.layers if kind.window is not None), LayerKind())
    if windowed.window is not None:
        keys["attention.sliding_window"] = windowed.window
        if arch in ("llama", "qwen2", "qwen3") and windowed.window < config.block_size:
            log.warning("llama.cpp ignores the window of %d tokens: longer texts give other tokens", windowed.window)
    if arch in ("exaone4", "olmo2", "qwen2", "qwen3") and windowed.window is not None:
        keys["attention.sliding_window_pattern"] = np.array([kind.window is not None for kind in config.layers])
    if arch == "stablelm":
        keys["use_parallel_residual"] = config.parallel_residual
    if config.activation == "gelu":
        log.warning("llama.cpp computes GELU by its tanh approximation: logits differ by about 0.001")
    return keys


def _describe_rotary(config: ModelConfig) -> dict[str, Value]:
    """Return the keys of rotary positions, and of the heads that have them."""
    if (rotary := _rotary(config)) is None:
        return {}
    keys: dict[str, Value] = {
        "attention.head_count_kv": config.n_kv_head,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": rotary.dim,
        "rope.freq_base": float(rotary.base),
    }
    if rotary.scaling == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rotary.factor)}
    if rotary.scaling == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rotary.factor),
            "rope.scaling.original_context_length": rotary.original_context,
            "rope.scaling.yarn_attn_factor": float(rotary.attention_factor),
            "rope.scaling.yarn_beta_fast": float(rotary.high_freq_factor),
            "rope.scaling.yarn_beta_slow": float(rotary.low_freq_factor),
        }
        if not math.isclose(rotary.attention_factor, 0.1 * math.log(rotary.factor) + 1.0, rel_tol=1e-4):
            log.warning("llama.cpp ignores attention_factor=%g: its logits differ", rotary.attention_factor)
        if rotary.query_growth:
            keys["attention.temperature_scale"] = float(rotary.query_growth)
    return keys


def _rotary(config: ModelConfig) -> Rotary | None:
    """Return the rotary embedding of the layers without a window, else of those with one."""
    kinds = sorted((k for k in config.layers if k.rotary is not None), key=lambda k: k.window is not None)
    return kinds[0].rotary if kinds else None


def rotary_divisors(config: ModelConfig) -> NDArray[np.float32] | None:
    """Return what Llama 3's scaling divides the frequencies by; None for other models."""
    rotary = _rotary(config)
    if rotary is None or rotary.scaling != "llama3":
        return None
    divisors: NDArray[np.float32] = frequencies(replace(rotary, scaling="none")) / frequencies(rotary)
    return divisors
