"""Open GGUF files: the metadata of llama.cpp's architectures as a config, and their tensors as ours.

The metadata is translated into the fields of a Hugging Face config.json, which the family reads. Every key of the
architecture must be known: one that is not, or whose value is not supported, is an error that names it. llama.cpp's
convert_hf_to_gguf.py is the source of keys, names and orders of rows.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from nanoinfer.checkpoints.gguf import gemma4 as gguf_gemma4
from nanoinfer.checkpoints.gguf import hybrid
from nanoinfer.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    FREQUENCIES,
    JOINED_HEADS,
    LAYER,
    OF_HEADS,
    SHARED_GATE,
    STACKED,
    STACKED_BIASES,
    TOP,
    Architecture,
)
from nanoinfer.checkpoints.gguf.file import BlockTensor, GGUFFile, Value, read_gguf
from nanoinfer.checkpoints.gguf.metadata import LONG, Metadata
from nanoinfer.checkpoints.gguf.tokenizer import check_counts, end_tokens, read_tokenizer
from nanoinfer.checkpoints.weights import Weights, check
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped, show
from nanoinfer.models.families import FAMILIES, deepseek
from nanoinfer.models.families.base import FOLDED_HEADS, Family, interleaved
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.families.hybrid import key_heads_apart
from nanoinfer.models.rotary import frequencies
from nanoinfer.models.stored import ChangedTensor, StoredTensor
from nanoinfer.tokenizers.tokenizer import Tokenizer
from nanoinfer.utils.arrays import HostTensor

log = logging.getLogger("nanoinfer")

_LLAMA3_CONTEXT = 8192
_OTHER_PARTS = {"v.": "images", "mm.": "images", "a.": "sound", "cls": "classes"}
"""Beginnings of the names of tensors that are not the language model's -> what they are for."""
_NEXT = {
    "blk.{}.nextn.eh_proj.": "mtp_in.", "blk.{}.nextn.enorm.": "mtp_norm_e.", "blk.{}.nextn.hnorm.": "mtp_norm_h.",
    "blk.{}.nextn.shared_head_norm.": "output_norm.", "blk.{}.nextn.shared_head_head.": "",
    "blk.{}.nextn.embed_tokens.": "", "blk.{}.": "blk.0.",
}  # fmt: skip
"""`Family.mtp`: llama.cpp's names of the block after the last layer."""
_EACH_EXPERT = {f"mlp.experts.c_{ours}": f"ffn_{theirs}.{{}}" for ours, theirs in
                (("gate", "gate"), ("fc", "up"), ("proj", "down"))}  # fmt: skip
"""Names in files of 2023 and early 2024."""
_NEXT_ORDER = partial(key_heads_apart, stored_apart=True)


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
    file = _without_other_parts(file, where, arch)
    config = _read_config(file, where, arch, layout)
    with about(where):
        stored = _as_stored(file, config, layout)
    rounded = sorted({t.format.name for t in stored.values() if isinstance(t, BlockTensor) and t.format.rounded})
    if rounded:
        log.warning("%s: engine native rounds the values of its formats %s to Q8_0", where, ", ".join(rounded))
    family = stored_family(config, layout, file.tensors)
    if config.experts is not None:
        forms = ((gguf_gemma4.JOINED, gguf_gemma4.SPLIT), (("ffn_gate.0.weight",), _EACH_EXPERT))
        own = [names for ends, names in forms if any(name.endswith(ends) for name in file.tensors)]
        family = replace(family, names=dict(family.names) | (own[0] if own else {}))
    return check(config, stored, where, dtype, family), file.metadata


def _without_other_parts(file: GGUFFile, where: str, arch: str) -> GGUFFile:
    """Return the file without the tensors of parts that are not run, which a line of the log names."""
    purpose = {name: what for name in file.tensors for start, what in _OTHER_PARTS.items() if name.startswith(start)}
    total, further = (file.metadata.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if type(total) is int and type(further) is int and 0 < further < total:
        layers = {name: re.match(r"blk\.(\d{1,9})\.", name) for name in file.tensors}
        extra = [name for name, layer in layers.items() if layer and total - further < int(layer[1]) < total]
        purpose |= dict.fromkeys(extra, "the prediction of further tokens")
    if not purpose:
        return file
    what = ", ".join(sorted(set(purpose.values())))
    log.warning("%s: %d tensors for %s are not used: the text model runs without them", where, len(purpose), what)
    return GGUFFile(file.metadata, {name: t for name, t in file.tensors.items() if name not in purpose})


def open_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a GGUF file. Raises NanoinferError as `open_file`, or if there is none."""
    file, where = read_gguf(path), escaped(path)
    embedding = file.tensors.get("token_embd.weight")
    with about(where):
        check_counts(file.metadata, None if embedding is None else embedding.shape[0])
    return read_tokenizer(file.metadata, where)


def _read_config(file: GGUFFile, where: str, arch: str, layout: Architecture) -> ModelConfig:
    with about(where):
        m = Metadata(file.metadata, arch, file.tensors)
        fields = layout.read(m)
        m.only(m.key("attention.causal"), True)
        m.get(m.key("rope.dimension_count"))
        m.check_known()
        config = FAMILIES[fields["model_type"]].read(Fields(fields))
        if (stored := file.tensors.get(FREQUENCIES)) is not None and arch != "gemma4":  # it has read them
            config = _with_frequencies(config, stored)
        if layout.tiled and (state := config.recurrence) and state.num_heads > state.num_key_heads:
            config = replace(config, recurrence=replace(state, tiled=True))
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
    if factor >= 1:
        scaled = replace(rotary, scaling="llama3", factor=factor, original_context=_LLAMA3_CONTEXT)
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


def _as_stored(file: GGUFFile, config: ModelConfig, layout: Architecture) -> dict[str, StoredTensor]:
    """Return the tensors without the frequencies, with the weights of norms as the family has them, and experts and
    heads as matrices: the values of an expert follow those of the expert before it."""
    stored = {name: t for name, t in file.tensors.items() if name not in (FREQUENCIES, *LONG.values())}
    for name, t in list(stored.items()):
        if isinstance(t, BlockTensor) and t.format.name == "NVFP4":
            stored[name] = _with_factors(t, name, stored)
    tensors: dict[str, StoredTensor] = {}
    count = 0 if config.experts is None else config.experts.count
    for name, t in stored.items():
        of_each = (count, STACKED), (config.n_head, OF_HEADS)  # matrices of experts or heads
        several = any(name.endswith(ends) and len(t.shape) == 3 and t.shape[0] == n for n, ends in of_each)
        own = name.endswith(hybrid.OWN_NORM)
        if layout.added_to_norms and name.endswith("norm.weight") and type(t) is StoredTensor and not own:
            tensors[name] = _ShiftedTensor(t.file, t.start, t.dtype, t.shape, t.strides, layout.added_to_norms)
        elif name.endswith(".ffn_norm"):  # so the converter names that of Falcon-H1
            tensors[f"{name}.weight"] = t
        elif name.endswith(f".{hybrid.DECAY}"):
            tensors[name] = ChangedTensor.of(t, (math.prod(t.shape),), hybrid.log_decay)
        elif name.endswith(hybrid.VECTORS) and len(t.shape) > 1 and type(t) is StoredTensor:
            tensors[name] = replace(t, shape=(math.prod(t.shape),), strides=(1,))
        elif several or (name.endswith(SHARED_GATE) and len(t.shape) == 1):
            tensors[name] = t.merged()
        elif name.endswith(STACKED_BIASES) and config.experts is not None:
            shape = (count, config.n_embd if "ffn_down" in name else config.experts.width)
            if t.shape != shape:
                raise NanoinferError(f"tensor {name} is {list(t.shape)}, but the config requires {list(shape)}")
            tensors[name] = replace(t, shape=(math.prod(t.shape),), strides=(1,))
        elif count and name.endswith(gguf_gemma4.JOINED):
            for i, part in enumerate(gguf_gemma4.split(t, count, layout.family == "gpt_oss")):
                tensors[name.replace("gate_up_exps", f"{('gate', 'up')[i % 2]}_exps.{i // 2}")] = part
        elif config.latent and name.endswith(f"{JOINED_HEADS}.weight"):
            for ours, matrix in zip(("attn_k_b", "attn_v_b"), deepseek.split(config, name, t), strict=True):
                tensors[name.replace(JOINED_HEADS, ours)] = matrix
        else:
            tensors[name] = t
    return tensors


def _with_factors(t: BlockTensor, name: str, tensors: dict[str, StoredTensor]) -> StoredTensor:
    """Return a tensor with the factor of its values, or those of its experts, which another tensor has."""
    base = name.removesuffix("weight")
    tensors.pop(f"{base}input_scale", None)  # of activations of 4 bits
    if (factors := tensors.pop(f"{base}scale", None)) is None:
        return t
    if math.prod(factors.shape) not in (1, t.shape[0] if len(t.shape) == 3 else 1):
        raise NanoinferError(f"tensor {base}scale is {list(factors.shape)}, which does not fit {list(t.shape)}")
    return replace(t, factors=factors)


def stored_family(config: ModelConfig, layout: Architecture, stored: Container[str] = ()) -> Family:
    """Return the family with llama.cpp's names of tensors, of which `stored` has some, and order of rows."""
    family, names = FAMILIES[config.family], TOP | LAYER | dict(layout.names)
    attention = (i for i in range(config.n_layer) if not config.layer(i).recurrent)  # others have such a tensor
    if layout.joined or any(f"blk.{i}.attn_qkv.weight" in stored for i in attention):
        names = names | {"attn.c_attn": "attn_qkv"}
    own = interleaved if config.latent is None and not config.attention_gate else family.order
    order = own if layout.interleaved or config.attention_gate else lambda config, part: None
    fused = {"ffn_up": ("ffn_gate", "ffn_up")} if layout.gate_in_up else {}
    merged = layout.family == "nemotron_h"  # whose files have more layers
    return replace(
        family, names=names, layer="blk.{}.", order=order, transposed=frozenset(), fused=fused,
        recurrent=layout.recurrent, folded=FOLDED_HEADS if config.qk_norm == "heads" else family.folded,
        recurrent_order=_NEXT_ORDER if layout.recurrent is hybrid.NEXT else Family.recurrent_order,
        from_stored=hybrid.whole_layers if merged else Family.from_stored, mtp={} if merged else _NEXT,
    )  # fmt: skip
