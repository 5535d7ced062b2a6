"""Open GGUF files: the metadata of llama.cpp's architectures as a config, and their tensors as ours.

The metadata is translated into the fields of a Hugging Face config.json, which the family reads. Every key of the
architecture must be known: one that is not, or whose value is not supported, is an error that names it. llama.cpp's
convert_hf_to_gguf.py is the source of keys, names and orders of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.checkpoints.gguf_file import GGUFFile, Value, read_gguf
from nanoinfer.models.checkpoints.gguf_tokenizer import check_counts, end_tokens, read_tokenizer
from nanoinfer.models.checkpoints.stored import StoredTensor
from nanoinfer.models.checkpoints.weights import Weights, check
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.base import Family, within_heads
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.rotary import frequencies
from nanoinfer.models.tokenizers import Tokenizer
from nanoinfer.utils.arrays import HostTensor
from nanoinfer.utils.checks import plain, show
from nanoinfer.utils.files import escaped

log = logging.getLogger("nanoinfer")

_TOP = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
_LAYER: dict[str, str | tuple[str, ...]] = {
    "ln_1": "attn_norm",
    "attn.c_attn": ("attn_q", "attn_k", "attn_v"),
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.c_proj": "attn_output",
    "post_1": "post_attention_norm",
    "ln_2": "ffn_norm",
    "mlp.c_gate": "ffn_gate",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "post_2": "post_ffw_norm",
}
FREQUENCIES = "rope_freqs.weight"
_LLAMA3_CONTEXT = 8192
_MAX_LENGTH = 4096  # of a value: no architecture has more layers


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures describes and stores models of a family."""

    family: str
    """model_type of the family."""
    fields: Callable[[_Metadata], dict[str, Any]]
    """Return the fields of config.json that `_common` does not."""
    interleaved: bool = False
    """Whether queries and keys are stored for a rotation of adjacent dimensions (2i, 2i + 1)."""
    joined: bool = False
    """Whether queries, keys and values are one tensor."""
    added_to_norms: float = 0.0
    """Number that was added to the weights of norms."""


class _Metadata(Fields):
    """The metadata of one architecture; the prefix of its keys is added here."""

    def __init__(self, raw: Mapping[str, Value], arch: str, tensors: Mapping[str, StoredTensor]) -> None:
        ours = {k: v for k, v in raw.items() if k.startswith(f"{arch}.")}
        for key, value in ours.items():
            if isinstance(value, (str, list, np.ndarray)) and len(value) > _MAX_LENGTH:
                raise NanoinferError(f"{show(key)} has more than {_MAX_LENGTH} values")
        super().__init__({key: plain(value) for key, value in ours.items()})
        self.arch, self.tensors = arch, tensors

    def key(self, name: str) -> str:
        """Return a key of this architecture: "block_count" -> "llama.block_count"."""
        return f"{self.arch}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.raw

    def int_(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        if default is None:
            self.required(self.key(name))
        return self.integer(self.key(name), default or 1)

    def float_(self, name: str, default: float | None) -> float | None:
        """Return a positive number."""
        return default if self.get(self.key(name)) is None else self.number(self.key(name), 1.0)

    def check_known(self) -> None:
        """Raise NanoinferError if the architecture has a key that was not read."""
        if unknown := sorted(self.raw.keys() - self.known):
            value = show(self.raw[unknown[0]])
            raise NanoinferError(
                f"{escaped(unknown[0])}={value} is not supported: the model needs something that is not implemented"
            )


def _shape(m: _Metadata) -> dict[str, Any]:
    """Return the fields of config.json that all families but GPT-2 have, under the names that Llama has for them."""
    n_head = m.int_("attention.head_count")
    n_embd = m.int_("embedding_length")
    width = m.int_("attention.key_length", max(1, n_embd // n_head))
    m.get(m.key("pooling_type"))  # models/pooling.py
    m.only(m.key("attention.value_length"), width)
    return {
        "vocab_size": _vocab_size(m),
        "max_position_embeddings": m.int_("context_length"),
        "num_hidden_layers": _num_layers(m),
        "num_attention_heads": n_head,
        "num_key_value_heads": m.int_("attention.head_count_kv", n_head),
        "head_dim": width,
        "hidden_size": n_embd,
        "intermediate_size": m.int_("feed_forward_length"),
        "rms_norm_eps": m.float_("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in m.tensors,
        "rope_theta": m.float_("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(m),
    }


def _num_layers(m: _Metadata) -> int:
    """Return the number of layers, after comparing it with the tensors: the config has an entry for each layer."""
    layers = {name.split(".")[1] for name in m.tensors if name.startswith("blk.")}
    if (count := m.int_("block_count")) != len(layers):
        raise m.error(m.key("block_count"), f"is not the number of layers that the file has: {len(layers)}")
    return count


def _vocab_size(m: _Metadata) -> int:
    m.get(m.key("vocab_size"))  # some converters wrote the tokenizer's, which is smaller than the embedding
    if (embedding := m.tensors.get("token_embd.weight")) is None:
        raise NanoinferError("tensor token_embd.weight is missing")
    return embedding.shape[0]


def _scaling(m: _Metadata) -> dict[str, Any] | None:
    """Return rope_scaling. llama.cpp stores Llama 3's as a divisor of each frequency, computed when converting."""
    kind = m.get(m.key("rope.scaling.type"), "none")
    factor = m.float_("rope.scaling.factor", m.float_("rope.scale_linear", 1.0))
    for name in ("original_context_length", "finetuned"):  # inputs of yarn, which is refused
        m.get(m.key(f"rope.scaling.{name}"))
    m.only(m.key("rope.scaling.attn_factor"), 1.0)
    if kind not in ("none", "linear"):
        raise m.error(m.key("rope.scaling.type"), "is not supported: only none and linear are")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" or factor != 1.0 else None


def _plain(m: _Metadata) -> dict[str, Any]:
    """Return the fields of a family that rotates all dimensions of a head."""
    shape = _shape(m)
    m.only(m.key("rope.dimension_count"), shape["head_dim"])
    return shape


def _llama(m: _Metadata) -> dict[str, Any]:
    for name in ("expert_count", "expert_used_count"):
        m.only(m.key(name), 0)
    m.get(m.key("tensor_data_layout"))  # older converters wrote whose layout they had read
    biased = {part: f"blk.0.{name}.bias" in m.tensors for part, name in (("attention", "attn_q"), ("mlp", "ffn_up"))}
    fields = _plain(m) | {f"{part}_bias": found for part, found in biased.items()}
    if (window := "attention.sliding_window") in m:
        fields |= {"model_type": "mistral", "sliding_window": m.int_(window)}  # a Llama with a window in all layers
    return fields


def _gemma3(m: _Metadata) -> dict[str, Any]:
    """llama.cpp fixes what the file does not say: every sixth layer is global, the local base is 10,000."""
    shape, pattern = _plain(m), m.int_("attention.sliding_window_pattern", 6)
    at_27b = shape["num_hidden_layers"] == 62
    width = shape["hidden_size"] // shape["num_attention_heads"] if at_27b else shape["head_dim"]
    return shape | {
        "sliding_window": m.int_("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": m.float_("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": m.float_("attn_logit_softcapping", None),
        "final_logit_softcapping": m.float_("final_logit_softcapping", None),
    }


def _gpt2(m: _Metadata) -> dict[str, Any]:
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


def _gpt_neox(m: _Metadata) -> dict[str, Any]:
    shape = _shape(m)
    rotated = m.int_("rope.dimension_count", shape["head_dim"])
    whole = rotated >= shape["head_dim"]  # else half a dimension more, so that the product is not rounded down
    return shape | {
        "layer_norm_eps": m.float_("attention.layer_norm_epsilon", 1e-5),
        "rotary_pct": 1.0 if whole else (rotated + 0.5) / shape["head_dim"],
        "rotary_emb_base": shape["rope_theta"],
        "use_parallel_residual": m.flag(m.key("use_parallel_residual"), True),
        "attention_bias": "blk.0.attn_qkv.bias" in m.tensors,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, interleaved=True),
    "qwen2": Architecture("qwen2", _plain),
    "qwen3": Architecture("qwen3", _plain),
    "gemma3": Architecture("gemma3_text", _gemma3, added_to_norms=1.0),
    "olmo2": Architecture("olmo2", _plain),
    "smollm3": Architecture("smollm3", _plain, interleaved=True),
    "gpt2": Architecture("gpt2", _gpt2, joined=True),
    "gptneox": Architecture("gpt_neox", _gpt_neox, joined=True),
}
"""By general.architecture."""


def open_file(path: Path, dtype: str = "float32") -> tuple[Weights, dict[str, Value]]:
    """Return the checked weights in a GGUF file, and its metadata. The file stays open as long as the weights exist.

    Args:
        path: the file.
        dtype: dtype to compute in.

    Raises:
        NanoinferError: the file is malformed, or needs something that is not supported.
    """
    file, where = read_gguf(path), escaped(path)
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or (layout := ARCHITECTURES.get(arch)) is None:
        known = ", ".join(ARCHITECTURES)
        raise NanoinferError(f"{where}: general.architecture={show(arch)} is not supported: only {known} are")
    config = _read_config(file, where, arch, layout)
    return check(config, _as_stored(file, layout), where, dtype, stored_family(config, layout)), file.metadata


def open_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a GGUF file. Raises NanoinferError as `open_file`, or if there is none."""
    file, where = read_gguf(path), escaped(path)
    embedding = file.tensors.get("token_embd.weight")
    with about(where):
        check_counts(file.metadata, None if embedding is None else embedding.shape[0])
    return read_tokenizer(file.metadata, where)


def _read_config(file: GGUFFile, where: str, arch: str, layout: Architecture) -> ModelConfig:
    with about(where):
        m = _Metadata(file.metadata, arch, file.tensors)
        fields = {"model_type": layout.family} | layout.fields(m)
        m.only(m.key("attention.causal"), True)
        m.get(m.key("rope.dimension_count"))
        m.check_known()
        config = FAMILIES[fields["model_type"]].read(Fields(fields))
        if (stored := file.tensors.get(FREQUENCIES)) is not None:
            config = _with_frequencies(config, stored)
        check_counts(file.metadata, config.vocab_size)
        bos, ends = end_tokens(file.metadata, config.vocab_size)
        return replace(config, bos_token_id=bos, eos_token_ids=ends)


def _with_frequencies(config: ModelConfig, stored: StoredTensor) -> ModelConfig:
    """Return a config whose rotary embedding has the stored divisors of the frequencies.

    They are those of Llama 3.1 and later: the largest is its `factor`, and the other parameters are the same in all.
    """
    rotary = next((kind.rotary for kind in config.layers if kind.rotary is not None), None)
    if rotary is None or rotary.scaling != "none" or stored.shape != (rotary.dim // 2,):
        raise NanoinferError(f"tensor {FREQUENCIES} {list(stored.shape)} does not fit the rotary embedding")
    divisors = stored.read().float32()
    if (divisors == 1).all():
        return config
    factor = float(divisors.max()) if np.isfinite(divisors).all() else 0.0
    context = {"original_context": _LLAMA3_CONTEXT}
    if factor >= 1:
        scaled = replace(rotary, scaling="llama3", factor=factor, **context)
        if np.allclose(frequencies(rotary) / divisors, frequencies(scaled), rtol=1e-4, atol=0.0):
            layers = tuple(replace(k, rotary=None if k.rotary is None else scaled) for k in config.layers)
            return replace(config, layers=layers)
    raise NanoinferError(
        f"tensor {FREQUENCIES} has other divisors than Llama 3's scaling (low 1, high 4, context"
        f" {_LLAMA3_CONTEXT}), which is not supported"
    )


@dataclass(frozen=True)
class _ShiftedTensor(StoredTensor):
    """A tensor from whose stored values a number is subtracted."""

    shift: float

    def read(self) -> HostTensor:
        """Read the tensor in float32. Raises as `StoredTensor.read`."""
        return HostTensor(super().read().float32() - np.float32(self.shift), "float32")


def _as_stored(file: GGUFFile, layout: Architecture) -> dict[str, StoredTensor]:
    """Return the tensors without the frequencies, with the weights of norms as the family has them."""
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != FREQUENCIES}
    for name, t in tensors.items():
        if layout.added_to_norms and name.endswith("norm.weight") and type(t) is StoredTensor:
            tensors[name] = _ShiftedTensor(t.file, t.start, t.dtype, t.shape, t.strides, layout.added_to_norms)
    return tensors


def stored_family(config: ModelConfig, layout: Architecture) -> Family:
    """Return the family with llama.cpp's names of tensors and order of rows."""
    family, names = FAMILIES[config.family], _TOP | _LAYER
    if layout.joined:
        names = names | {"attn.c_attn": "attn_qkv"}
    order = _interleaved if layout.interleaved else lambda config, part: None
    return replace(family, names=names, layer="blk.{}.", order=order, transposed=frozenset(), ignored=())


def _interleaved(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    """Undo the converter's order of rows: it stores dimensions i and i + D / 2 of a head at 2 i and 2 i + 1."""
    if part != "attn.c_attn":
        return None
    return within_heads(config, np.arange(config.head_dim).reshape(-1, 2).T.reshape(-1))
