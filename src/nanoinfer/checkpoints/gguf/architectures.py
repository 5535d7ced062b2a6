"""llama.cpp's architectures: the keys of their metadata as fields of a config.json, and the names of their tensors.

Source: llama.cpp, convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.checkpoints.gguf import gemma4 as gguf_gemma4
from nanoinfer.checkpoints.gguf import latent as gguf_latent
from nanoinfer.checkpoints.gguf.metadata import Metadata
from nanoinfer.checkpoints.gguf.rotary import LONG, scaling, windows
from nanoinfer.errors import NanoinferError

TOP = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
LAYER: dict[str, str | tuple[str, ...]] = {
    "ln_1": "attn_norm",
    "attn.c_attn": ("attn_q", "attn_k", "attn_v"),
    "attn.sinks": "attn_sinks.weight",  # ours has no suffix
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.c_proj": "attn_output",
    "attn.sub_norm": "attn_sub_norm",
    "mlp.sub_norm": "ffn_sub_norm",
    "post_1": "post_attention_norm",
    "ln_2": "ffn_norm",
    "mlp.c_gate": "ffn_gate",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "post_2": "post_ffw_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.c_gate": "ffn_gate_exps",
    "mlp.experts.c_fc": "ffn_up_exps",
    "mlp.experts.c_proj": "ffn_down_exps",
    "mlp.shared.c_gate": "ffn_gate_shexp",
    "mlp.shared.c_fc": "ffn_up_shexp",
    "mlp.shared.c_proj": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
STACKED = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
"""Endings of tensors with three dimensions, the experts first."""
STACKED_BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")
"""Endings of their biases, with two dimensions."""
SHARED_GATE = "ffn_gate_inp_shexp.weight"
"""Ending of a matrix of one row that is stored as a vector."""
FREQUENCIES = "rope_freqs.weight"
"""Divisors of the frequencies, of Llama 3's scaling."""


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures describes and stores models of a family."""

    family: str
    """model_type of the family."""
    fields: Callable[[Metadata], dict[str, Any]]
    """Return the fields of config.json that `_common` does not."""
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


def _shape(m: Metadata) -> dict[str, Any]:
    """Return the fields of config.json that all families but GPT-2 have, under the names that Llama has for them."""
    shape = _sizes(m)
    width = m.int_("attention.key_length", max(1, shape["hidden_size"] // shape["num_attention_heads"]))
    m.only(m.key("attention.value_length"), width)
    return shape | {"head_dim": width}


def _sizes(m: Metadata) -> dict[str, Any]:
    """Return the fields of `_shape` without the width of a head."""
    n_head = m.int_("attention.head_count")
    n_embd = m.int_("embedding_length")
    m.get(m.key("pooling_type"))  # models/pooling.py
    m.get(m.key("tensor_data_layout"))  # older converters wrote whose layout they had read
    vocab_size, num_layers = _vocab_size(m), _num_layers(m)
    differ = m.arch == "gemma4"  # gguf_gemma4.py reads the numbers of all layers
    heads = "attention.head_count_kv"
    return {
        "vocab_size": vocab_size,
        "max_position_embeddings": m.int_("context_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": n_head,
        "num_key_value_heads": m.ints(heads, num_layers)[0] if differ else m.int_(heads, n_head),
        "hidden_size": n_embd,
        "intermediate_size": m.ints("feed_forward_length", num_layers)[0] if differ else m.int_("feed_forward_length"),
        "rms_norm_eps": m.float_("attention.layer_norm_rms_epsilon", m.float_("attention.layer_norm_epsilon", 1e-5)),
        "tie_word_embeddings": "output.weight" not in m.tensors,
        "rope_theta": m.float_("rope.freq_base", 10000.0),
        "rope_scaling": scaling(m),
    }


def _num_layers(m: Metadata) -> int:
    """Return the number of layers, after comparing it with the tensors: the config has an entry for each layer."""
    layers = {name.split(".")[1] for name in m.tensors if name.startswith("blk.")}
    count = m.int_("block_count") - m.integer(m.key("nextn_predict_layers"), 0, 0)  # which gguf.py leaves out
    if count != len(layers):
        raise m.error(m.key("block_count"), f"is not the number of layers that the file has: {len(layers)}")
    return count


def _vocab_size(m: Metadata) -> int:
    m.get(m.key("vocab_size"))  # some converters wrote the tokenizer's, which is smaller than the embedding
    if (embedding := m.tensors.get("token_embd.weight")) is None:
        raise NanoinferError("tensor token_embd.weight is missing")
    return embedding.shape[0]


def _plain(m: Metadata) -> dict[str, Any]:
    """Return the fields of a family that rotates all dimensions of a head."""
    shape = _shape(m)
    m.only(m.key("rope.dimension_count"), shape["head_dim"])
    return shape


def _rotated_share(m: Metadata, head_dim: int) -> float:
    """Return the share of a head that is rotated."""
    rotated = m.int_("rope.dimension_count", head_dim)
    return 1.0 if rotated >= head_dim else (rotated + 0.5) / head_dim  # so that the product is not rounded down


def _layer_norms(m: Metadata) -> dict[str, Any]:
    """Return the fields of a family that has layer norms and rotates a share of each head."""
    shape = _shape(m)
    return shape | {
        "layer_norm_eps": m.float_("attention.layer_norm_epsilon", 1e-5),
        "partial_rotary_factor": _rotated_share(m, shape["head_dim"]),
        "use_qkv_bias": m.has_bias("attn_q"),
    }


def _llama(m: Metadata) -> dict[str, Any]:
    mixture = "expert_count" in m
    fields = _plain(m) | {"attention_bias": m.has_bias("attn_q"), "mlp_bias": m.has_bias("ffn_up")}
    if (window := "attention.sliding_window") in m:
        fields |= {"model_type": "mistral", "sliding_window": m.int_(window)}  # a Llama with a window in all layers
    return fields | _experts(m) | {"model_type": "mixtral"} if mixture else fields


def _experts(m: Metadata) -> dict[str, Any]:
    """Return the fields of a mixture of experts. All layers have one: llama.cpp reads no others."""
    m.only(m.key("expert_gating_func"), 1)  # a softmax
    return {"num_local_experts": m.int_("expert_count"), "num_experts_per_tok": m.int_("expert_used_count")}


def _olmoe(m: Metadata) -> dict[str, Any]:
    m.only(m.key("attention.clamp_kqv"), None)
    return _plain(m) | _experts(m) | {"norm_topk_prob": False, "attention_bias": m.has_bias("attn_q")}


def _qwen_moe(m: Metadata) -> dict[str, Any]:
    """llama.cpp fixes what the file does not say: whether the chosen experts' weights are divided by their sum."""
    width, shared = m.int_("expert_feed_forward_length"), {}
    if m.arch == "qwen2moe":
        shared = {"shared_expert_intermediate_size": m.int_("expert_shared_feed_forward_length")}
    flags = {"norm_topk_prob": m.arch != "qwen2moe", "qkv_bias": m.has_bias("attn_q")}
    return _qwen(m) | _experts(m) | {"moe_intermediate_size": width} | flags | shared


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    """llama.cpp fixes what the file does not say: every second layer has a window, the first one included."""
    shape = _plain(m)
    found = _experts(m) | {"intermediate_size": m.int_("expert_feed_forward_length", shape["intermediate_size"])}
    window, rope = m.int_("attention.sliding_window"), shape["rope_scaling"] or {"rope_type": "default"}
    return shape | found | {"sliding_window": window, "rope_scaling": rope, "attention_bias": m.has_bias("attn_q")}


def _gemma3(m: Metadata) -> dict[str, Any]:
    """llama.cpp fixes what the file does not say: every sixth layer is global, the local base is 10,000.

    Files of Ollama have other names of bases; those with a vision part lack the scaling that such models have.
    """
    shape = _plain(m)
    num_layers = shape["num_hidden_layers"]
    local = m.float_("rope.freq_base_swa", m.float_("rope.local.freq_base", 10000.0))
    if "rope.freq_base" not in m:
        shape["rope_theta"] = m.float_("rope.global.freq_base", 1e6)
    if "vision.block_count" in m and "rope.scaling.factor" not in m and num_layers in (34, 48, 62):
        shape["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    width = shape["hidden_size"] // shape["num_attention_heads"] if num_layers == 62 else shape["head_dim"]  # 27B
    return (
        shape
        | (windows(m, num_layers, 6) or {"layer_types": ["full_attention"] * num_layers})
        | {
            "rms_norm_eps": m.float_("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_local_base_freq": local,
            "query_pre_attn_scalar": width,
            "attn_logit_softcapping": m.float_("attn_logit_softcapping", None),
            "final_logit_softcapping": m.float_("final_logit_softcapping", None),
        }
    )


def _gemma4(m: Metadata) -> dict[str, Any]:
    shape = _sizes(m)
    return shape | {"vocab_size_per_layer_input": shape["vocab_size"]} | gguf_gemma4.read(m, shape["num_hidden_layers"])


def _gemma2(m: Metadata) -> dict[str, Any]:
    shape = _plain(m)
    at_27b = shape["num_hidden_layers"] == 46  # llama.cpp fixes what the file does not say
    return shape | {
        "sliding_window": m.int_("attention.sliding_window", 4096),
        "query_pre_attn_scalar": shape["hidden_size"] // shape["num_attention_heads"] if at_27b else shape["head_dim"],
        "attn_logit_softcapping": m.float_("attn_logit_softcapping", None),
        "final_logit_softcapping": m.float_("final_logit_softcapping", None),
    }


def _phi3(m: Metadata) -> dict[str, Any]:
    shape, context = _shape(m), m.int_("rope.scaling.original_context_length", 4096)
    scaling: dict[str, Any] | None = None
    if any(name in m.tensors for name in LONG.values()):
        scaling = {"rope_type": "longrope", "attention_factor": m.float_("rope.scaling.attn_factor", 1.0)}
        for theirs, name in LONG.items():
            if name not in m.tensors:
                raise NanoinferError(f"tensor {name} is missing: the file has other parts of longrope")
            scaling[theirs] = m.tensors[name].read().float32().reshape(-1).tolist()
    return shape | {
        "original_max_position_embeddings": context,
        "partial_rotary_factor": _rotated_share(m, shape["head_dim"]),
        "rope_scaling": scaling,
        "sliding_window": m.int_("attention.sliding_window") if "attention.sliding_window" in m else None,
    }


def _granite(m: Metadata) -> dict[str, Any]:
    shape = _plain(m)
    return shape | {
        "attention_multiplier": m.float_("attention.scale", shape["head_dim"] ** -0.5),
        "embedding_multiplier": m.float_("embedding_scale", 1.0),
        "residual_multiplier": m.float_("residual_scale", 1.0),
        "logits_scaling": m.float_("logit_scale", 1.0),
        "attention_bias": m.has_bias("attn_q"),
        "mlp_bias": m.has_bias("ffn_up"),
    }


def _olmo(m: Metadata) -> dict[str, Any]:
    m.only(m.key("attention.layer_norm_epsilon"), 1e-5)
    m.only(m.key("attention.clamp_kqv"), None)
    return _plain(m)


def _stablelm(m: Metadata) -> dict[str, Any]:
    m.get(m.key("use_parallel_residual"))  # as llama.cpp, which looks whether the tensor is there
    return _layer_norms(m) | {"use_parallel_residual": "blk.0.ffn_norm.weight" not in m.tensors}


def _glm4(m: Metadata) -> dict[str, Any]:
    shape = _shape(m)
    share = _rotated_share(m, shape["head_dim"])
    return shape | {"partial_rotary_factor": share, "attention_bias": m.has_bias("attn_q")}


def _cohere(m: Metadata) -> dict[str, Any]:
    found = _plain(m) | {
        "layer_norm_eps": m.float_("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": m.float_("logit_scale", 0.0625),
        "attention_bias": m.has_bias("attn_q"),
    }
    return found | ({"sliding_window": m.int_("attention.sliding_window")} if "attention.sliding_window" in m else {})


def _exaone4(m: Metadata) -> dict[str, Any]:
    shape = _plain(m)
    return shape | {"sliding_window": None} | windows(m, shape["num_hidden_layers"], 4)


def _biased(m: Metadata) -> dict[str, Any]:
    """Return the fields of a family whose biases follow from flags."""
    parts = ("attention", "attn_q"), ("attention_out", "attn_output"), ("mlp", "ffn_up")
    found = {f"{part}_bias": m.has_bias(name) for part, name in parts}
    return _plain(m) | found | {"use_bias": found["attention_bias"]}


def _qwen(m: Metadata) -> dict[str, Any]:
    shape = _plain(m)
    return shape | windows(m, shape["num_hidden_layers"])


def _olmo2(m: Metadata) -> dict[str, Any]:
    """OLMo 3 is an OLMo 2 with windows: only its global layers have scaled positions."""
    shape = _plain(m)
    if not (local := windows(m, shape["num_hidden_layers"], 4)):
        return shape
    theta, scaled = shape["rope_theta"], shape["rope_scaling"] or {"rope_type": "default"}
    nearby = {"rope_type": "default", "rope_theta": m.float_("rope.freq_base_swa", theta)}
    ropes = {"full_attention": scaled | {"rope_theta": theta}, "sliding_attention": nearby}
    return shape | local | {"model_type": "olmo3", "rope_parameters": ropes}


def _mistral3(m: Metadata) -> dict[str, Any]:
    """Mistral Small 3.1, and Ministral 3, whose queries grow with the position."""
    shape, growth = _plain(m), m.float_("attention.temperature_scale", None)
    rope = shape["rope_scaling"] or {"rope_type": "default"}
    return shape | {"rope_scaling": rope if growth is None else rope | {"llama_4_scaling_beta": growth}}


def _starcoder2(m: Metadata) -> dict[str, Any]:
    return _plain(m) | {
        "norm_epsilon": m.float_("attention.layer_norm_epsilon", 1e-5),
        "use_bias": m.has_bias("ffn_up"),
    }


def _minicpm(m: Metadata) -> dict[str, Any]:
    """A Granite with other defaults, which are those of llama.cpp."""
    found = _granite(m)
    residual, logits = 1.4 / found["num_hidden_layers"] ** 0.5, found["hidden_size"] / 256
    return found | {
        "embedding_multiplier": m.float_("embedding_scale", 12.0),
        "residual_multiplier": m.float_("residual_scale", residual),
        "logits_scaling": m.float_("logit_scale", logits),
    }


def _gpt2(m: Metadata) -> dict[str, Any]:
    return {
        "vocab_size": _vocab_size(m),
        "n_positions": m.int_("context_length"),
        "n_layer": _num_layers(m),
        "n_head": m.int_("attention.head_count"),
        "n_embd": m.int_("embedding_length"),
        "n_inner": m.int_("feed_forward_length"),
        "layer_norm_epsilon": m.float_("attention.layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in m.tensors,
    }


def _gpt_neox(m: Metadata) -> dict[str, Any]:
    shape = _shape(m)
    return shape | {
        "layer_norm_eps": m.float_("attention.layer_norm_epsilon", 1e-5),
        "rotary_pct": _rotated_share(m, shape["head_dim"]),
        "rotary_emb_base": shape["rope_theta"],
        "use_parallel_residual": m.flag(m.key("use_parallel_residual"), True),
        "attention_bias": m.has_bias("attn_q"),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, interleaved=True),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "qwen2vl": Architecture("qwen2", _qwen),
    "qwen3vl": Architecture("qwen3", _qwen),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen_moe),
    "qwen3vlmoe": Architecture("qwen3_moe", _qwen_moe),
    "olmoe": Architecture("olmoe", _olmoe),
    "granitemoe": Architecture("granitemoe", lambda m: _granite(m) | _experts(m), interleaved=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, names={"ln_2": "post_attention_norm"}),
    "gptoss": Architecture("gpt_oss", _gpt_oss, names={"attn.c_proj": "attn_out", "attn.sinks": "attn_sinks"}),
    "gemma3": Architecture("gemma3_text", _gemma3, added_to_norms=1.0),
    "gemma4": Architecture("gemma4_text", _gemma4, names=gguf_gemma4.NAMES),
    "olmo2": Architecture("olmo2", _olmo2),
    "mistral3": Architecture("ministral3", _mistral3, interleaved=True),
    "starcoder2": Architecture("starcoder2", _starcoder2),
    "smollm3": Architecture("smollm3", _plain, interleaved=True),
    "gemma": Architecture("gemma", _plain, added_to_norms=1.0),
    "gemma2": Architecture("gemma2", _gemma2, added_to_norms=1.0),
    "phi2": Architecture("phi", _layer_norms),
    "phi3": Architecture("phi3", _phi3, joined=True, gate_in_up=True),
    "granite": Architecture("granite", _granite, interleaved=True),
    "minicpm": Architecture("granite", _minicpm, interleaved=True),
    "olmo": Architecture("olmo", _olmo, interleaved=True),
    "stablelm": Architecture("stablelm", _stablelm),
    "glm4": Architecture("glm4", _glm4, interleaved=True, gate_in_up=True),
    "chatglm": Architecture("glm", _glm4, interleaved=True, gate_in_up=True),
    "command-r": Architecture("cohere", _cohere, interleaved=True),
    "cohere2": Architecture("cohere2", _cohere, interleaved=True),
    "exaone": Architecture("llama", _plain),
    "exaone4": Architecture("exaone4", _exaone4),
    "ernie4_5": Architecture("ernie4_5", _biased, interleaved=True),
    "seed_oss": Architecture("seed_oss", _biased, names={"ln_2": "post_attention_norm"}),
    "arcee": Architecture("arcee", _biased, interleaved=True),
    # llama.cpp fixes what the file does not say: SiLU, and inputs of 8 bits in groups of its own
    "bitnet": Architecture(
        "bitnet", lambda m: _plain(m) | {"hidden_act": "silu", "attention_bias": m.has_bias("attn_q")}
    ),
    "deepseek2": Architecture(
        "deepseek_v2", lambda m: _sizes(m) | gguf_latent.read(m), interleaved=True, names=gguf_latent.NAMES
    ),
    "gpt2": Architecture("gpt2", _gpt2, joined=True),
    "gptneox": Architecture("gpt_neox", _gpt_neox, joined=True),
}
"""By general.architecture."""
