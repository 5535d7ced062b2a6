"""Write GGUF files for tests, independently of the package: the container, tokenizers, and transformers' models.

The names of tensors, the order of rows and the keys are those of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STRING, ARRAY = 8, 9
KINDS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7, "uint64": 10,
         "int64": 11, "float64": 12}  # fmt: skip
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


class Stored(NamedTuple):
    """A tensor as it is stored."""

    shape: tuple[int, ...]
    kind: int
    content: bytes


def as_f32(values: Any) -> Stored:
    array = np.ascontiguousarray(values, np.float32)
    return Stored(array.shape, F32, array.tobytes())


def as_f16(values: Any) -> Stored:
    array = np.ascontiguousarray(values, np.float16)
    return Stored(array.shape, F16, array.tobytes())


def as_q8_0(values: Any) -> Stored:
    """Quantize with ggml's rule: the largest magnitude of 32 values is 127."""
    array = np.asarray(values, np.float32)
    blocks = array.reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    q = np.round(blocks / np.where(scale == 0, 1, scale.astype(np.float32))).astype(np.int8)
    return Stored(array.shape, Q8_0, np.concatenate([scale.view(np.uint8), q.view(np.uint8)], 1).tobytes())


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Return a typed value: strings, lists of strings, NumPy scalars and arrays; int is uint32, float is float32."""
    if isinstance(item, bytes):  # as it is, for hostile files
        return item
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    if isinstance(item, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(string, item))
    if isinstance(item, np.ndarray):
        return struct.pack("<IIQ", ARRAY, KINDS[str(item.dtype)], len(item)) + item.tobytes()
    scalar = {bool: np.bool_, int: np.uint32, float: np.float32}.get(type(item), lambda x: x)(item)
    return struct.pack("<I", KINDS[str(scalar.dtype)]) + scalar.tobytes()


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, Stored], *, version: int = 3, alignment: int = 32) -> bytes:
    """Return the content of a GGUF file."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, t in tensors.items():
        data += bytes(-len(data) % alignment)
        dims = t.shape[::-1]
        out += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.kind, len(data))
        data += t.content
    return out + bytes(-len(out) % alignment) + data


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Stored], **options: Any) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def rewritten(path: Path, change: Any, **metadata: Any) -> Path:
    """Write a file again after `change(tensors)`, with other metadata; None removes a key."""
    from nanoinfer.checkpoints.gguf.file import read_gguf

    file = read_gguf(path)
    tensors = {name: as_f32(t.read().float32()) for name, t in file.tensors.items()}
    change(tensors)
    found = {key: value for key, value in (file.metadata | metadata).items() if value is not None}
    return write_gguf(path, found, tensors)


def tiny_gguf(
    path: Path, rows: int = 8, metadata: dict[str, Any] | None = None, tensor: str | None = None, **tokenizer: Any
) -> Path:
    """Write a GPT-2 of one layer with an embedding of `rows` rows, further metadata, and another tensor."""
    shapes = {"token_embd.weight": (rows, 4), "position_embd.weight": (8, 4), "output_norm.weight": (4,),
              "output_norm.bias": (4,), "blk.0.attn_norm.weight": (4,), "blk.0.attn_norm.bias": (4,),
              "blk.0.attn_qkv.weight": (12, 4), "blk.0.attn_qkv.bias": (12,), "blk.0.attn_output.weight": (4, 4),
              "blk.0.attn_output.bias": (4,), "blk.0.ffn_norm.weight": (4,), "blk.0.ffn_norm.bias": (4,),
              "blk.0.ffn_up.weight": (16, 4), "blk.0.ffn_up.bias": (16,), "blk.0.ffn_down.weight": (4, 16),
              "blk.0.ffn_down.bias": (4,)}  # fmt: skip
    arch = {"context_length": 8, "block_count": 1, "attention.head_count": 2, "embedding_length": 4,
            "feed_forward_length": 16}  # fmt: skip
    found: dict[str, Any] = {"general.architecture": "gpt2"} | {f"gpt2.{k}": v for k, v in arch.items()}
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": list("abcdefgh"), "merges": []} | tokenizer
    found |= {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items() if v is not None}
    if tensor is not None:
        shapes[tensor] = (1,)
    return write_gguf(path, found | (metadata or {}), {k: as_f32(np.zeros(shape)) for k, shape in shapes.items()})


# Models of transformers -----------------------------------------------------------------------------------------

ARCHITECTURES = {"gpt2": "gpt2", "gpt_neox": "gptneox", "llama": "llama", "mistral": "llama", "qwen2": "qwen2",
                 "qwen3": "qwen3", "gemma3_text": "gemma3", "olmo2": "olmo2", "smollm3": "smollm3",
                 "gemma": "gemma", "gemma2": "gemma2", "phi": "phi2", "phi3": "phi3", "granite": "granite",
                 "olmo": "olmo", "stablelm": "stablelm", "glm4": "glm4", "cohere": "command-r", "cohere2": "cohere2",
                 "exaone4": "exaone4", "ernie4_5": "ernie4_5", "seed_oss": "seed_oss", "arcee": "arcee",
                 "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe",
                 "granitemoe": "granitemoe", "bitnet": "bitnet", "gemma4_text": "gemma4", "gpt_oss": "gpt-oss",
                 "ministral3": "mistral3", "starcoder2": "starcoder2", "glm": "chatglm", "olmo3": "olmo2",
                 "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "nemotron": "nemotron",
                 "jais2": "jais2", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2",
                 "lfm2_moe": "lfm2moe"}  # fmt: skip
DELTA = ("qwen3_5_text", "qwen3_5_moe_text")
PERMUTED = ("llama", "mistral", "smollm3", "granite", "olmo", "arcee", "mixtral", "granitemoe", "ministral3")
LAYER_NORMS = ("starcoder2", "gpt_neox", "phi", "stablelm", "cohere", "cohere2", "nemotron", "jais2")
ADDED = ("gemma", "gemma2", "gemma3_text", "nemotron")
"""Families whose weights of norms are added to 1."""
NAMES = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "model.final_layernorm": "output_norm",
    "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "self_attn.sinks": "attn_sinks", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "exp_probs_b": "exp_probs_b",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "per_layer_input_gate": "inp_gate",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "layer_scalar": "layer_output_scale",
    "router": "ffn_gate_inp", "router.proj": "ffn_gate_inp", "expert_scale": "ffn_down_exps",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "ssm_a": "ssm_a", "ssm_dt": "ssm_dt", "conv.conv": "shortconv.conv",
    "model.embedding_norm": "token_embd_norm", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip


AFTER_ATTENTION = ("gemma2", "gemma3_text", "gemma4_text", "olmo2", "olmo3", "exaone4", "seed_oss", "gpt_oss",
                   *DELTA)  # fmt: skip

LONG = ("phi3", "granite")  # a MiniCPM is a Granite


def permute(rows: np.ndarray, n_head: int) -> np.ndarray:
    """Reorder the rows of queries or keys as llama.cpp's converter does for Llama."""
    return rows.reshape(n_head, 2, rows.shape[0] // n_head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tiled(values: np.ndarray, config: Any, part: str) -> np.ndarray:
    """Return a tensor whose heads of values that share a key are not side by side, but beside those of other keys."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    share = config.linear_num_value_heads // keys
    if part == "out_proj":
        return values.reshape(len(values), keys, share, width).swapaxes(1, 2).reshape(values.shape)
    width = width if part in ("in_proj_qkv", "in_proj_z", "conv1d") else 1
    first = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv", "conv1d") else 0
    rest = values[first:].reshape(keys, share, width, -1).swapaxes(0, 1)
    return np.concatenate((values[:first], rest.reshape(values[first:].shape)))


def tensor_of(name: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """Return the name and the values of a tensor of transformers' in a GGUF file."""
    name = name.replace("mlp.gate.e_score_correction_bias", "exp_probs_b.bias")
    name = name.replace("layer_scalar", "layer_scalar.weight").replace("router.per_expert_scale", "expert_scale.scale")
    name = name.replace("feed_forward.expert_bias", "exp_probs_b.bias")
    name = name.replace("linear_attn.dt_bias", "ssm_dt.bias").replace("linear_attn.A_log", "ssm_a.")
    base, _, suffix = name.rpartition(".")
    prefix, kind = "", config.model_type
    if ".layers." in base or ".h." in base:
        _, _, rest = base.partition(".layers." if ".layers." in base else ".h.")
        layer, _, base = rest.partition(".")
        prefix = f"blk.{layer}."
    if base == "post_attention_layernorm":
        theirs = "post_attention_norm" if kind in AFTER_ATTENTION else "ffn_norm"
    else:
        theirs = NAMES[base]
    if base.endswith(("conv1d", "conv.conv")):
        values = values.squeeze(1)
    if base.startswith(("linear_attn.", "ssm_")) and not base.endswith("norm"):
        values = tiled(-np.exp(values) if base == "ssm_a" else values, config, base.removeprefix("linear_attn."))
    if kind == "gpt2" and prefix and values.ndim == 2:
        values = values.T
    if kind in PERMUTED and theirs in ("attn_q", "attn_k"):
        values = permute(values, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads)
    if kind in (*ADDED, *DELTA) and theirs.endswith("norm") and suffix == "weight" and theirs != "ssm_norm":
        values = values + np.float32(1)
    if kind == "gpt_neox" and theirs == "attn_qkv":  # of each head its queries, keys and values -> all queries, ...
        values = (
            values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        )
    return f"{prefix}{theirs}.{suffix}".rstrip("."), values


def metadata_of(config: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a config of transformers'."""
    arch, kind = ARCHITECTURES[config.model_type], config.model_type
    if kind == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True  # `gemma4_keys` has those of each layer
    n_head, rope = config.num_attention_heads, getattr(config, "rope_parameters", None) or {}
    width = getattr(config, "head_dim", None) or config.hidden_size // n_head
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": n_head,
    }
    if kind in ("gpt2", *LAYER_NORMS):
        names = {"gpt2": "layer_norm_epsilon", "starcoder2": "norm_epsilon", "nemotron": "norm_eps"}
        epsilon = getattr(config, names.get(kind, "layer_norm_eps"))
        found["attention.layer_norm_epsilon"] = float(epsilon)
    elif kind == "olmo":
        found["attention.layer_norm_epsilon"] = 1e-5
    else:
        epsilon = config.norm_eps if kind.startswith("lfm2") else config.rms_norm_eps
        found["attention.layer_norm_rms_epsilon"] = float(epsilon)
    if kind not in ("gpt2", "gpt_neox"):
        found |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "vocab_size": config.vocab_size,
            "attention.key_length": width,
            "attention.value_length": width,
        }
    found |= further_keys(config) | latent_keys(config) | gemma4_keys(config) | state_keys(config)
    if "partial_rotary_factor" in rope:
        found["rope.dimension_count"] = int(width * rope["partial_rotary_factor"])
    if kind == "gpt_neox":
        found["use_parallel_residual"] = config.use_parallel_residual
    elif kind in ("llama", "mistral"):
        found["rope.dimension_count"] = width
    rope = rope.get("full_attention", rope)
    if kind in ("gemma3_text", "gemma4_text", "mistral", "mixtral") and config.sliding_window is not None:
        found["attention.sliding_window"] = config.sliding_window
    if kind != "gpt2":
        found["rope.freq_base"] = float(rope["rope_theta"])
    if (scaling := rope.get("rope_type")) in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling, "rope.scaling.factor": float(rope["factor"])}
    if scaling == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow")}
        if kind in ("llama", "ministral3") and "mscale_all_dim" in rope:
            found["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    return {"general.architecture": arch} | {f"{arch}.{name}": item for name, item in found.items()}


def further_keys(config: Any) -> dict[str, Any]:
    """Return the keys of single architectures."""
    kind, found = config.model_type, {}
    if kind == "gemma2":
        found["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        found["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        found["expert_count"] = getattr(config, "num_local_experts", None) or config.num_experts
        found["expert_used_count"] = config.num_experts_per_tok
    if kind == "gpt_oss":
        found["expert_feed_forward_length"] = config.intermediate_size
        found["attention.sliding_window"] = config.sliding_window
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"):
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind in ("qwen2_moe", "qwen3_5_moe_text"):
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if kind in ("granite", "granitemoe"):
        found["attention.scale"] = float(config.attention_multiplier)
        found["embedding_scale"] = float(config.embedding_multiplier)
        found["residual_scale"] = float(config.residual_multiplier)
        found["logit_scale"] = float(config.logits_scaling)
    if kind == "bitnet":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
    if kind in ("cohere", "cohere2"):
        found |= {"logit_scale": float(config.logit_scale), "rope.scaling.type": "none"}
    if kind == "phi3":
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        found["attention.sliding_window"] = config.sliding_window or 0
    if kind in LONG and longrope(config):
        context, original = config.max_position_embeddings, config.original_max_position_embeddings
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(context / original) / math.log(original))
    if kind in ("gemma2", "cohere2", "exaone4", "olmo3", "qwen2") and config.sliding_window is not None:
        found["attention.sliding_window"] = config.sliding_window
    if kind == "ministral3":
        found["attention.temperature_scale"] = float(config.rope_parameters["llama_4_scaling_beta"])
    if kind in ("exaone4", "olmo3", "qwen2") and config.sliding_window is not None:
        found["attention.sliding_window_pattern"] = np.array([t != "full_attention" for t in config.layer_types])
    return found


def gemma4_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a model whose layers differ."""
    if config.model_type != "gemma4_text":
        return {}
    local = [kind == "sliding_attention" for kind in config.layer_types]
    first = config.num_hidden_layers - config.num_kv_shared_layers
    at = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    found: dict[str, Any] = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window_pattern": np.array(local),
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }
    for suffix, width in (("", at[-1].head_dim), ("_swa", at[local.index(True)].head_dim)):
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        found |= {f"{name}{suffix}": width for name in names}
    if config.use_double_wide_mlp:
        widths = [config.intermediate_size * (1 + (i >= first)) for i in range(config.num_hidden_layers)]
        found["feed_forward_length"] = np.array(widths, np.int32)
    if len({one.num_key_value_heads for one in at}) > 1:
        found["attention.head_count_kv"] = np.array([one.num_key_value_heads for one in at], np.int32)
    if config.final_logit_softcapping is not None:
        found["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if config.enable_moe_block:
        found |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    return found


def latent_keys(config: Any) -> dict[str, Any]:
    """Return the keys of files with one matrix for keys and values of all heads."""
    if not config.model_type.startswith("deepseek"):
        return {}
    corrected, rope = config.model_type == "deepseek_v3", config.rope_parameters
    found: dict[str, Any] = {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2 if corrected else 1,
    }
    if config.q_lora_rank:
        found["attention.q_lora_rank"] = config.q_lora_rank
    if corrected or config.topk_method == "group_limited_greedy":
        found |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return found


def state_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a model with recurrent layers."""
    kind = config.model_type
    attention = np.array([layer == "full_attention" for layer in getattr(config, "layer_types", None) or ()])
    if kind.startswith("lfm2"):
        found = {"shortconv.l_cache": config.conv_L_cache, "attention.head_count_kv": attention.astype(np.int32) * 2}
        if kind == "lfm2":
            return found | {"feed_forward_length": 256}  # `block_multiple_of`
        return found | {
            "leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    if kind not in DELTA:
        return {}
    return {
        "rope.dimension_sections": np.array([1, 1, 0, 0], np.int32), "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": ~attention,
    }  # fmt: skip


def longrope(config: Any) -> dict[str, np.ndarray]:
    """Return the divisors of the frequencies of a Phi-3, a MiniCPM 4 or a Gemma 4 as tensors."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "gemma4_text":
        pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (pairs - turning))}
    names = [name for name in ("long_factor", "short_factor") if config.model_type in LONG and name in rope]
    return {f"rope_factors_{name.split('_')[0]}.weight": np.array(rope[name]) for name in names}


def by_heads(values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Return kv_b as in files since April 2025: keys (heads, rank, width), values (heads, width, rank)."""
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys = np.ascontiguousarray(heads[:, : config.qk_nope_head_dim].swapaxes(1, 2))
    return {"attn_k_b": keys, "attn_v_b": heads[:, config.qk_nope_head_dim :]}


def convert(model: Any, path: Path, store: Any = as_f32, split_heads: bool = False, **extra: Any) -> Path:
    """Write a model of transformers' as a GGUF file; matrices are stored by `store`, vectors in float32."""
    tensors: dict[str, Stored] = {}
    heads: dict[str, list[np.ndarray]] = {}
    tied = model.config.tie_word_embeddings
    for name, p in model.state_dict().items():
        if (tied and name in ("lm_head.weight", "embed_out.weight")) or name.endswith((".attn.bias", "inv_freq")):
            continue
        values = p.detach().float().numpy()
        if name.endswith("sinks"):
            name += ".weight"
        if ".experts." in name and model.config.model_type == "gpt_oss":  # (E, C, 2 F), or (E, F, C), and biases
            for part in ("gate", "up") if "gate_up" in name else ("down",):
                of = values[..., part == "up" :: 2] if "gate_up" in name else values
                stack = as_f32(of) if name.endswith("_bias") else store(of.swapaxes(1, 2))
                suffix = "bias" if name.endswith("_bias") else "weight"
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.{suffix}"] = stack
            continue
        if ".experts.gate_up_proj" in name and model.config.model_type == "gemma4_text":
            tensors[f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight"] = store(values)
            continue
        if ".experts." in name:  # (E, 2 F, C), or (E, C, F)
            halves = np.split(values, 1 if name.endswith("down_proj") else 2, axis=1)
            for part, stack in zip(("down",) if len(halves) == 1 else ("gate", "up"), halves, strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = store(stack)
            continue
        if ".norms." in name:  # of each head
            heads.setdefault(name.split(".norms.")[0] + ".weight", []).append(values)
            continue
        if split_heads and name.endswith("kv_b_proj.weight"):
            parts = by_heads(values, model.config).items()
            tensors |= {f"blk.{name.split('.')[2]}.{part}.weight": store(matrices) for part, matrices in parts}
            continue
        theirs, values = tensor_of(name, values, model.config)
        if theirs.endswith("inp_shexp.weight"):
            values = values[0]
        exact = values.ndim == 1 or "ffn_gate_inp" in theirs
        exact |= theirs.endswith(("_norm.weight", "conv1d.weight", "shortconv.conv.weight"))
        tensors[theirs] = as_f32(values) if exact else store(values)
    for name, each in heads.items():
        theirs, values = tensor_of(name, np.stack(each), model.config)
        tensors[theirs] = as_f32(values)
    tensors |= {name: as_f32(values) for name, values in longrope(model.config).items()}
    extra_tensors = extra.pop("tensors", {})
    if split_heads:
        c = model.config
        extra["deepseek2.attention.key_length_mla"] = c.qk_nope_head_dim + c.qk_rope_head_dim
        extra["deepseek2.attention.value_length_mla"] = c.v_head_dim
    return write_gguf(path, metadata_of(model.config) | extra, tensors | extra_tensors)
