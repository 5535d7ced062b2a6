"""DeepSeek-V2 and V3, and what families with latent attention share.

A file has one matrix kv_b for keys and values, which has the rows of the first head's key, those of its value, those of
the next head's key. Ours are k_b, transposed for each head, and v_b (models/other_attention.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import Experts, Latent, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families import experts
from nanoinfer.models.families.fields import Fields, magnitude, rope_fields, rotated
from nanoinfer.models.families.llama import LLAMA
from nanoinfer.models.stored import ChangedTensor, StoredTensor
from nanoinfer.utils.checks import require_float

ONLY = {"attention_bias": (False,), "moe_layer_freq": (1,), "pretraining_tp": (1, None)}
HARMLESS = (
    *experts.HARMLESS, "num_key_value_heads", "head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux",
)  # fmt: skip
_KV, _KEYS, _VALUES = (f"self_attn.kv_b_proj{end}" for end in ("", ".keys", ".values"))
_CORRECTION = "mlp.gate.e_score_correction"
NAMES: dict[str, str | tuple[str, ...]] = {
    **experts.NAMES, **experts.shared("mlp.shared_experts"),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "attn.q_norm": "self_attn.q_a_layernorm", "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_norm": "self_attn.kv_a_layernorm", "attn.k_b": _KEYS, "attn.v_b": _VALUES, "mlp.correction": _CORRECTION,
}  # fmt: skip
_SIZES = {
    "kv_lora_rank": ("rank", 512),
    "qk_rope_head_dim": ("rotary_dim", 64),
    "qk_nope_head_dim": ("plain_dim", 128),
    "v_head_dim": ("value_dim", 128),
}


def read_layers(f: Fields, config: ModelConfig, mixture: Experts, first: int, further: int = 0) -> dict[str, Any]:
    """Return the fields of a model with latent attention, and with experts from layer `first` on.

    `further` is the default of the number of layers that predict further tokens.
    """
    sizes = {ours: f.integer(theirs, default) for theirs, (ours, default) in _SIZES.items()}
    query_rank = 0 if f.get("q_lora_rank", 1536) is None else f.integer("q_lora_rank", 1536)
    further = f.integer("num_nextn_predict_layers", f.integer("num_mtp_layers", further, 0), 0)
    latent = Latent(**sizes, query_rank=query_rank, further_layers=further)
    fields = rotated(f, ModelConfig(block_size=config.block_size, head_size=latent.rotary_dim))
    rotary, scale = fields["layers"][0].rotary, latent.query_dim**-0.5
    if share := f.rope().get("mscale_all_dim"):
        scale *= magnitude(rotary.factor, require_float("mscale_all_dim", share, 0.0, 1e3)) ** 2
    fields["layers"] = (fields["layers"][0],) * config.n_layer
    attention = {"latent": latent, "head_size": latent.head_dim, "num_kv_heads": 1, "attention_scale": scale}
    return experts.with_experts(fields | attention, mixture, lambda i: i >= first)


def mixture_of(f: Fields, *, count: int, chosen: int, width: int, shared: int, **others: Any) -> Experts:
    """Return the mixture of experts; the arguments are defaults, and `others` fields of `Experts`."""
    size, used = f.integer("moe_intermediate_size", width), f.get("num_experts_per_tok")
    return Experts(
        f.integer("n_routed_experts", count),
        chosen if used is None else used,
        size,
        shared_width=f.integer("n_shared_experts", shared) * size,
        **others,
    )


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_layers` and `mixture_of` read, and the factor of the chosen experts' sum."""
    latent, mixture = config.latent, config.experts
    assert latent is not None
    assert mixture is not None
    rope, rotary, scale = rope_fields(config), config.layer(0).rotary, config.attention_scale
    assert rotary is not None
    assert scale is not None
    grown = math.sqrt(scale * math.sqrt(latent.query_dim)) - 1  # magnitude is 1 + 0.1 share ln(factor)
    if rotary.scaling == "yarn" and rotary.factor > 1 and abs(grown) > 1e-9:
        rope["rope_scaling"]["mscale_all_dim"] = round(grown / (0.1 * math.log(rotary.factor)), 9)
    sparse = [config.layer(i).experts for i in range(config.n_layer)]
    return (
        rope
        | {theirs: getattr(latent, ours) for theirs, (ours, _) in _SIZES.items()}
        | experts.width_fields(config, count="n_routed_experts", width="moe_intermediate_size")
        | {
            "num_key_value_heads": config.n_head,
            "q_lora_rank": latent.query_rank or None,
            "n_shared_experts": mixture.shared_width // mixture.width,
            "first_k_dense_replace": sparse.index(True) if True in sparse else config.n_layer,
            "norm_topk_prob": mixture.normalize,
            "routed_scaling_factor": mixture.scale,
            "n_group": mixture.groups,
            "topk_group": mixture.groups_per_token,
        }
    )


def order(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    """`Family.order`: a file has pairs of rotated dimensions (2 i, 2 i + 1), ours are i and i + rotary_dim / 2."""
    latent = config.latent
    assert latent is not None
    if part not in ("attn.q_b", "attn.c_attn"):
        return None
    turned = np.arange(latent.rotary_dim).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate((np.arange(latent.plain_dim), latent.plain_dim + turned))
    if part == "attn.c_attn" and latent.query_rank:
        first = np.arange(latent.query_rank)
    else:
        first = (np.arange(config.n_head)[:, None] * latent.query_dim + head).reshape(-1)
    if part == "attn.q_b":
        return first
    after = len(first) + latent.rank
    rows: NDArray[np.intp] = np.concatenate((first, np.arange(len(first), after), after + turned))
    return rows


def _heads(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return the number of heads, the rows of a key and of a value of one head in kv_b, and its columns."""
    assert config.latent is not None
    return config.n_head, config.latent.plain_dim, config.latent.value_dim, config.latent.rank


def from_stored(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`Family.from_stored`. Layers after the last one that predict further tokens are left out."""
    assert config.latent is not None
    further = range(config.n_layer, config.n_layer + config.latent.further_layers)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        layer = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
        if layer is not None and int(layer[1]) in further:
            continue
        if not name.endswith(f"{_KV}.weight"):
            tensors[name.replace(f"{_CORRECTION}_bias", f"{_CORRECTION}.bias")] = tensor
            continue
        tensors[name.replace(_KV, _KEYS)], tensors[name.replace(_KV, _VALUES)] = split(config, name, tensor)
    return tensors


def split(config: ModelConfig, name: str, tensor: StoredTensor) -> tuple[StoredTensor, StoredTensor]:
    """Return k_b and v_b, which are computed from kv_b as they are read. Raise NanoinferError if its shape is wrong."""
    heads, plain, value, rank = _heads(config)
    if tensor.shape != (expected := (heads * (plain + value), rank)):
        raise NanoinferError(f"tensor {name} is {list(tensor.shape)}, but the config requires {list(expected)}")

    def keys(x: NDArray[Any]) -> NDArray[Any]:
        transposed: NDArray[Any] = x.reshape(heads, -1, rank)[:, :plain].swapaxes(1, 2)
        return transposed.reshape(-1, plain)

    def values(x: NDArray[Any]) -> NDArray[Any]:
        return x.reshape(heads, -1, rank)[:, plain:].reshape(-1, rank)

    shapes = (heads * rank, plain), (heads * value, rank)
    return ChangedTensor.of(tensor, shapes[0], keys), ChangedTensor.of(tensor, shapes[1], values)


def _read_v2(f: Fields, config: ModelConfig) -> dict[str, Any]:
    f.only("topk_method", "greedy", "group_limited_greedy")
    groups = {"groups": f.get("n_group"), "groups_per_token": f.get("topk_group")}
    mixture = mixture_of(
        f, count=64, chosen=6,  # of V2 and V2-Lite; transformers has no default
        width=1407, shared=2, normalize=False, scale=f.number("routed_scaling_factor", 1.0),
        **(groups if f.get("topk_method") == "group_limited_greedy" else {}),
    )  # fmt: skip
    return read_layers(f, config, mixture, f.integer("first_k_dense_replace", 0, 0))


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    method = "group_limited_greedy" if config.experts.groups > 1 else "greedy"
    return write_layers(config) | {"topk_method": method, "scoring_func": "softmax"}


DEEPSEEK_V2 = LLAMA.derive(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    names=NAMES,
    fixed={"head_size": 1},  # until `read_layers` sets it
    without=("num_key_value_heads", "head_dim"),
    only=ONLY | {"mlp_bias": (False,), "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    harmless=HARMLESS,
    read_layers=_read_v2,
    write_layers=_write_v2,
    order=order,
    fused=experts.STACKED,
    written=False,
    from_stored=from_stored,
)
"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts that are chosen by a softmax, in groups or not."""


def _read_v3(f: Fields, config: ModelConfig) -> dict[str, Any]:
    mixture = mixture_of(
        f, count=256, chosen=8, width=2048, shared=1, normalize=f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", 2.5), scoring="sigmoid", correction=True,
        groups=f.integer("n_group", 8), groups_per_token=f.integer("topk_group", 4), group_top=2,
    )  # fmt: skip
    first = f.integer("first_k_dense_replace", 3, 0)
    if (types := f.get("mlp_layer_types")) is not None:  # of glm4_moe_lite
        first = types.count("dense") if isinstance(types, list) else -1
        if types != ["dense"] * first + ["sparse"] * (config.n_layer - first):
            raise f.error("mlp_layer_types", f"is not dense layers before sparse ones, {config.n_layer} in all")
    return read_layers(f, config, mixture, first, further=1)


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    return write_layers(config) | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


_NEXT = "model.layers.{}."
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    only=ONLY | {"rope_interleave": (True,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    read_layers=_read_v3,
    write_layers=_write_v3,
    mtp={
        f"{_NEXT}eh_proj.": "mtp_in.", f"{_NEXT}enorm.": "mtp_norm_e.", f"{_NEXT}hnorm.": "mtp_norm_h.",
        f"{_NEXT}shared_head.norm.": "model.norm.", f"{_NEXT}shared_head.head.": "", f"{_NEXT}embed_tokens.": "",
        _NEXT: "model.layers.0.",
    },
)  # fmt: skip
"""DeepSeek-V3, R1, Moonlight and GLM-4.7-Flash: DeepSeek-V2 with experts that are chosen by sigmoids plus a correction.
"""
