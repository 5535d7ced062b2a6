"""Llama, whose tables most other families take with changes, and those descendants that have no file of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import BIASES as EVERYWHERE
from nanoinfer.config import Experts, LayerKind, ModelConfig
from nanoinfer.models.families import experts
from nanoinfer.models.families.base import FOLDED_HEADS, Biases, Family, interleaved, within_heads
from nanoinfer.models.families.fields import Fields, partial_fields, rope_fields, rotated, window_fields

ATTENTION_BIAS: Biases = {"attention_bias": (("qkv", "proj"), False)}
BIASES: Biases = {**ATTENTION_BIAS, "mlp_bias": (("mlp",), False)}
INNER_ATTENTION: dict[str, str | tuple[str, ...]] = {
    "attn.c_attn": tuple(f"attn.attention.{part}_proj" for part in "qkv"),
    "attn.c_proj": "attn.attention.out_proj",
}
QK_NORM = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "block_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": ("num_kv_heads", None),
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "head_dim": ("head_size", None),
        "hidden_act": ("activation", "silu"),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    },
    {
        "wte": "model.embed_tokens",
        "ln_f": "model.norm",
        "lm_head": "lm_head",
        "ln_1": "input_layernorm",
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_gate": "mlp.gate_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    {"norm": "rms", "gated_mlp": True, "learned_positions": False},
    biases=BIASES,
    only={"pretraining_tp": (1, None)},
)
"""Llama 2 and 3.x, SmolLM, SmolLM2, TinyLlama."""

ARCEE = LLAMA.derive(
    "arcee",
    "ArceeForCausalLM",
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    fixed={"gated_mlp": False},
    without=("mlp.c_gate",),
    biases=BIASES,
)
"""Arcee (AFM): Llama whose MLP has squared ReLU and no gate."""


def _read_bitnet(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.only("head_dim", config.head_dim, None)
    return rotated(f, config, theta=500000.0)


BITNET = LLAMA.derive(
    "bitnet",
    "BitNetForCausalLM",
    names={"attn.sub_norm": "self_attn.attn_sub_norm", "mlp.sub_norm": "mlp.ffn_sub_norm"},
    fixed={"sub_norms": True},
    defaults={"num_key_value_heads": 5, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    without=("head_dim",),
    biases=ATTENTION_BIAS,
    read_layers=_read_bitnet,
    written=False,
)
"""BitNet b1.58: Llama with norms inside attention and MLP, squared ReLU, and inputs of 8 bits if the config quantizes.

What rounds the inputs is not of the family: `quantization_config` requests it (huggingface.py)."""

ERNIE4_5 = LLAMA.derive(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    biases={"use_bias": (("qkv", "proj", "mlp"), False)},
    read_layers=partial(rotated, theta=500000.0),
    order=interleaved,
)
"""ERNIE 4.5 (dense): Llama that rotates adjacent dimensions."""

EXAONE = LLAMA.derive(
    "exaone",
    "ExaoneForCausalLM",
    {
        "num_layers": "n_layer",
        "intermediate_size": ("n_inner", None),
        "activation_function": ("activation", "silu"),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    },
    {"wte": "transformer.wte", "ln_f": "transformer.ln_f", "mlp.c_gate": "mlp.c_fc_0", "mlp.c_fc": "mlp.c_fc_1"}
    | {name: name for name in ("ln_1", "ln_2", "mlp.c_proj")}
    | INNER_ATTENTION,
    without=("num_hidden_layers", "hidden_act", "rms_norm_eps"),
    harmless=("embed_dropout",),
    layer="transformer.h.{}.",
    written=False,
)
"""EXAONE 3.x: Llama with other names. The class is not in transformers, but beside the published weights."""

HELIUM = LLAMA.derive(
    "helium",
    "HeliumForCausalLM",
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
    biases={"attention_bias": (("qkv",), False), "mlp_bias": (("mlp",), False)},
    read_layers=partial(rotated, theta=100000.0),
    order=interleaved,
)
"""Helium: Llama that rotates adjacent dimensions."""

JAIS2 = ARCEE.derive(
    "jais2",
    "Jais2ForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5)},
    fixed={"norm": "layer"},
    without=("rms_norm_eps",),
    biased=("norm",),
    biases={"attention_bias": (("qkv", "proj"), True), "mlp_bias": (("mlp",), True)},
)
"""Jais 2: layer norms, rotary positions, biases everywhere, an MLP with squared ReLU and no gate."""


def _halves_swapped(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    if part != "attn.c_attn":
        return None
    return within_heads(config, np.roll(np.arange(config.head_dim), config.head_dim // 2))


NANOCHAT = LLAMA.derive(
    "nanochat",
    "NanoChatForCausalLM",
    {"final_logit_softcapping": ("logits_softcap", 15.0)},
    {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
    {"gated_mlp": False, "norm_weight": "none", "embedding_norm": True, "qk_norm": "head"},
    defaults={"hidden_act": "relu2"},
    without=("head_dim", "mlp.c_gate"),
    biases=ATTENTION_BIAS,
    harmless=("head_dim",),
    order=_halves_swapped,
)
"""nanochat: norms without weights, squared ReLU, a soft cap of the logits.

nanochat rotates in the other direction: (a, b) becomes (a cos + b sin, b cos - a sin). Swapping the halves of each head
of queries and keys makes that the usual rotation, and does not change the scores.
"""

NEMOTRON = ARCEE.derive(
    "nemotron",
    "NemotronForCausalLM",
    {"norm_eps": ("norm_epsilon", 1e-5)},
    fixed={"norm": "layer", "norm_weight": "one_plus"},
    without=("rms_norm_eps",),
    biased=("norm",),
    biases=BIASES,
    read_layers=partial(rotated, share=("partial_rotary_factor", 0.5)),
    write_layers=partial_fields,
)
"""Nemotron-3, Nemotron-4 and Minitron: layer norms whose weights are added to 1, half of each head rotated, an MLP with
squared ReLU and no gate."""

SEED_OSS = LLAMA.derive(
    "seed_oss",
    "SeedOssForCausalLM",
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    biases={
        "attention_bias": (("qkv",), True),
        "attention_out_bias": (("proj",), False),
        "mlp_bias": (("mlp",), False),
    },
    only={"pretraining_tp": (1, None)},
    harmless=("residual_dropout",),
)
"""Seed-OSS: Llama with biases on queries, keys and values."""


def _read_smollm3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    """Return the layers: those with a 0 in no_rope_layers have no positions, and a window if there is one."""
    n_layer, interval = config.n_layer, f.integer("no_rope_layer_interval", 4)
    turns = f.get("no_rope_layers")
    if turns is None:
        turns = [int((i + 1) % interval != 0) for i in range(n_layer)]
    if not isinstance(turns, list) or len(turns) != n_layer or any(r not in (0, 1) for r in turns):
        raise f.error("no_rope_layers", f"is not a list of 0 and 1 for {n_layer} layers")
    used, window = f.flag("use_sliding_window", False), f.window("sliding_window", None)
    window = window if used else None
    windows = f.windows(n_layer, window, lambda i: window is not None and not turns[i])
    rotary = f.rotary(config, 2000000.0)
    return {"layers": tuple(LayerKind(w, rotary if turn else None) for w, turn in zip(windows, turns, strict=True))}


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    return window_fields(config) | {"no_rope_layers": [int(kind.rotary is not None) for kind in config.layers]}


SMOLLM3 = LLAMA.derive(
    "smollm3",
    "SmolLM3ForCausalLM",
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    biases=BIASES,
    read_layers=_read_smollm3,
    write_layers=_write_smollm3,
)
"""SmolLM3: Llama whose every fourth layer has no positions."""


def _read_stablelm(f: Fields, config: ModelConfig) -> dict[str, Any]:
    layers = rotated(f, config, share=("partial_rotary_factor", 0.25))
    layers |= {"qk_norm": "heads" if f.flag("qk_layernorm", False) else "none"}
    return layers | ({"norm_placement": "shared"} if config.parallel_residual else {})


STABLELM = LLAMA.derive(
    "stablelm",
    "StableLmForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5), "use_parallel_residual": ("parallel_residual", False)},
    {"attn.q_norm": "self_attn.q_layernorm.norms.{}", "attn.k_norm": "self_attn.k_layernorm.norms.{}"},
    defaults={"num_key_value_heads": 32},
    without=("head_dim", "rms_norm_eps", "norm"),
    biased=("norm",),
    biases={"use_qkv_bias": (("qkv",), False)},
    harmless=("hidden_dropout",),
    read_layers=_read_stablelm,
    write_layers=lambda config: partial_fields(config) | {"qk_layernorm": config.qk_norm == "heads"},
)
"""StableLM: layer norms, a gated MLP, rotary positions on a share of each head; StableLM 2 12B: also a layer norm of
each head of queries and keys, with weights of its own."""


def _read_phi(f: Fields, config: ModelConfig) -> dict[str, Any]:
    layers = rotated(f, config, share=("partial_rotary_factor", 0.5))
    return layers | {"qk_norm": "head" if f.flag("qk_layernorm", False) else "none"}


PHI = LLAMA.derive(
    "phi",
    "PhiForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5)},
    {
        "ln_f": "model.final_layernorm", "attn.c_proj": "self_attn.dense", "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    },
    {"norm_placement": "shared", "parallel_residual": True, "head_bias": True},
    defaults={"hidden_act": "gelu_new"},
    without=("head_dim", "rms_norm_eps", "ln_2", "mlp.c_gate", "norm", "gated_mlp"),
    biased=EVERYWHERE,
    harmless=("resid_pdrop", "embd_pdrop", "rotary_dim"),
    read_layers=_read_phi,
    write_layers=lambda config: partial_fields(config) | {"qk_layernorm": config.qk_norm == "head"},
)  # fmt: skip
"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, biases everywhere, the head included.
"""

GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_CONTEXT = "original_max_position_embeddings"


def _read_phi3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = [f.window("sliding_window", None)] * config.n_layer
    return rotated(f, config, windows, share=("partial_rotary_factor", 1.0), original=4096)


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    rotary = config.layer(0).rotary
    scaled = rotary is not None and rotary.scaling != "none"
    context = {_CONTEXT: rotary.original_context} if rotary is not None and scaled else {}
    return partial_fields(config) | context | {"sliding_window": config.layer(0).window}


PHI3 = LLAMA.derive(
    "phi3",
    "Phi3ForCausalLM",
    names={"attn.c_attn": "self_attn.qkv_proj"},
    defaults={"rms_norm_eps": 1e-5},
    without=("head_dim",),
    only={"attention_bias": (False,)},
    harmless=("resid_pdrop", "embd_pdrop"),
    read_layers=_read_phi3,
    write_layers=_write_phi3,
    fused=GATE_UP,
    written=False,
)
"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with joined matrices, and divisors of the frequencies for long contexts."""

GLM = LLAMA.derive(
    "glm",
    "GlmForCausalLM",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 0.00000015625},
    biases={"attention_bias": (("qkv",), True)},
    read_layers=partial(rotated, share=("partial_rotary_factor", 0.5)),
    write_layers=partial_fields,
    order=interleaved,
    fused=GATE_UP,
    written=False,
)
"""GLM-4 of 2024 and GLM-Edge: Llama with half of each head rotated, adjacent dimensions in pairs."""

GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={**GLM.names, "post_1": "post_self_attn_layernorm", "post_2": "post_mlp_layernorm"},
    fixed={**GLM.fixed, "norm_placement": "both"},
)
"""GLM-4 of 2025 (0414): norms on both sides, half of each head rotated, adjacent dimensions in pairs."""

COHERE = LLAMA.derive(
    "cohere",
    "CohereForCausalLM",
    {"layer_norm_eps": ("norm_epsilon", 1e-5), "logit_scale": ("final_scale", 0.0625)},
    QK_NORM,
    defaults={"tie_word_embeddings": True},
    fixed={"norm": "layer", "norm_placement": "shared", "parallel_residual": True},
    without=("head_dim", "rms_norm_eps", "ln_2"),
    biases=ATTENTION_BIAS,
    read_layers=lambda f, config: (
        rotated(f, config, theta=500000.0) | {"qk_norm": "heads" if f.flag("use_qk_norm", False) else "none"}
    ),
    write_layers=lambda config: rope_fields(config) | {"use_qk_norm": config.qk_norm == "heads"},
    order=interleaved,
    folded=FOLDED_HEADS,
)
"""Command R: attention and MLP in parallel after one layer norm, a factor of the logits, adjacent dimensions rotated;
Command R+: also a layer norm of each head of queries and keys, with weights of its own."""


def _read_cohere2(f: Fields, config: ModelConfig) -> dict[str, Any]:
    pattern = f.integer("sliding_window_pattern", 4)
    windows = f.windows(config.n_layer, f.integer("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    rotary = f.rotary(config)
    return {"layers": tuple(LayerKind(w, None if w is None else rotary) for w in windows)}


def _write_cohere2(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config)
    if fields["sliding_window"] is None:  # null is not a window to transformers
        del fields["sliding_window"]
    return fields


COHERE2 = COHERE.derive(
    "cohere2",
    "Cohere2ForCausalLM",
    {"head_dim": ("head_size", None)},
    biases=ATTENTION_BIAS,
    only={
        "use_qk_norm": (False,), "use_gated_activation": (True,), "use_parallel_block": (True,),
        "position_embedding_type": ("rope_gptj",), "order_of_interleaved_layers": ("local_attn_first",),
        "rotary_pct": (1.0,),
    },
    harmless=("use_parallel_embedding",),
    read_layers=_read_cohere2,
    write_layers=_write_cohere2,
)  # fmt: skip
"""Command R7B: Command R whose every fourth layer is global and has no positions."""

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_gpt_oss(f: Fields, config: ModelConfig) -> dict[str, Any]:
    if f.get("rope_parameters") is None and f.get("rope_scaling") is None:
        f.raw = {**f.raw, "rope_scaling": _YARN}
    windows = f.windows(config.n_layer, f.window("sliding_window", 128), lambda i: i % 2 == 0)
    width, chosen = f.get("intermediate_size", 2880), f.get("num_experts_per_tok", 4)
    mixture = Experts(experts.num_experts(f, 128), chosen, width, normalize=True, bias=True)
    return experts.with_experts(rotated(f, config, windows, theta=150000.0), mixture)


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config) | experts.width_fields(config)
    del fields["use_sliding_window"]
    return fields | {"rope_scaling": fields["rope_scaling"] or {"rope_type": "default"}}


GPT_OSS = LLAMA.derive(
    "gpt_oss",
    "GptOssForCausalLM",
    names=experts.NAMES | {"attn.sinks": "self_attn.sinks", "mlp.router": "mlp.router"},
    fixed={"activation": "clamped_silu", "sinks": True},
    defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
    without=("intermediate_size", "hidden_act"),
    biases={"attention_bias": (("qkv", "proj"), True)},
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    harmless=(*experts.HARMLESS, "experts_per_token", "initial_context_length"),
    read_layers=_read_gpt_oss,
    write_layers=_write_gpt_oss,
    transposed=frozenset(experts.STACKED),
    fused=experts.STACKED,
    written=False,
    alternating=True,
)
"""gpt-oss: experts with biases and a clamped gate, sinks in attention, windows in every other layer.

Source, too: the model card (arXiv 2508.10925)."""
