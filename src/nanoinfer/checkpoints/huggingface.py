"""Load and save the Hugging Face layout: a local folder or a Hub repository with config.json and *.safetensors.

Covered: one file, or all shards with or without their index; GPT-2's tensor names with and without the `transformer.`
prefix; tied and untied heads; `pytorch_model.bin` if there is no safetensors file (torch_archive.py reads it without
executing code). Not covered: sharded `pytorch_model.bin`; consolidated.safetensors.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.checkpoints import hf_config
from nanoinfer.checkpoints.quantized.base import QuantizedTensor
from nanoinfer.checkpoints.quantized.methods import dequantized
from nanoinfer.checkpoints.torch_archive import check_state, read_archive
from nanoinfer.checkpoints.weights import Weights, check, main_dtype
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.base import Family
from nanoinfer.models.parameters import CORRECTION, shapes
from nanoinfer.models.stored import StoredTensor, read_safetensors, to_safetensors
from nanoinfer.utils.arrays import HostTensor
from nanoinfer.utils.checks import show
from nanoinfer.utils.files import escaped, read_object, write_folder

log = logging.getLogger("nanoinfer")

ADAPTER = "adapter_config.json"
PICKLED = "pytorch_model.bin"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", PICKLED)
_IMAGES = tuple(
    f"{prefix}{part}"
    for prefix in ("", "model.")
    for part in (
        "vision_tower. vision_model. visual. audio_tower. "
        "multi_modal_projector. connector. image_newline embed_vision. embed_audio."
    ).split()
)
_SHARD = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
MAX_INDEX_BYTES = 16 << 20
# Without this file, AutoTokenizer uses GPT-2's own tokenizer class, which splits text before it applies tokenizer.json.
_TOKENIZER_CONFIG = b'{"tokenizer_class": "PreTrainedTokenizerFast"}\n'


def open_folder(folder: Path, dtype: str = "float32") -> Weights:
    """Return the checked weights in a Hugging Face folder. Its files stay open as long as the weights exist.

    Args:
        folder: contains config.json and model.safetensors (or a sharded index), or pytorch_model.bin.
        dtype: dtype to compute in.

    Raises:
        NanoinferError: a file is missing or malformed, or requests an unsupported feature.
    """
    refuse_adapter(folder)
    if (folder / "params.json").is_file() and not (folder / "config.json").is_file():
        raise NanoinferError(
            f"{escaped(folder)} has params.json and no config.json, the layout of Mistral's and Meta's own code: give a"
            " folder in the Hugging Face layout (config.json, model.safetensors)"
        )
    config = hf_config.read(folder / "config.json", quantized=True)
    quantization = hf_config.quantization(folder / "config.json")
    if quantization is None and (path := folder / "hf_quant_config.json").is_file():
        known = "save it as compressed-tensors, or use a GGUF file"
        raise NanoinferError(f"{escaped(path)}: weights quantized by modelopt are not supported: {known}")
    stored: dict[str, StoredTensor] = {}
    files = [_text_part(_tensors(path)) for path in weight_files(folder)]
    prefix, head = _left_out(config, (key for tensors in files for key in tensors)), _names(config)[1]
    for tensors in files:
        for key, tensor in tensors.items():
            if (name := key if key.startswith((prefix, head)) else prefix + key) in stored:
                raise NanoinferError(f"{escaped(folder)} contains tensor {name!r:.80} twice: keep one")
            stored[name] = tensor
    quantized: dict[str, Any] = {}
    if quantization is not None:
        if any(path.name == PICKLED for path in weight_files(folder)):
            raise NanoinferError(f"{escaped(folder)} has quantized weights in {PICKLED}: save them as safetensors")
        stored, method = dequantized(stored, quantization, escaped(folder), FAMILIES[config.family].transposed)
        plain = {name: t for name, t in stored.items() if not isinstance(t, QuantizedTensor)}
        quantized = {"method": method, "stored_dtype": main_dtype(plain)}
    has_head = config.tie_word_embeddings or any(name.startswith(head) for name in stored)
    if prefix and config.family != "gpt2" and not has_head:
        log.info("%s has no output head: it makes embeddings, and generates nothing", escaped(folder))
        weights = check(replace(config, tie_word_embeddings=True), stored, escaped(folder), dtype)
        return replace(weights, has_head=False, **quantized)
    return replace(check(config, stored, escaped(folder), dtype), **quantized)


def refuse_adapter(folder: Path) -> None:
    """Raise NanoinferError if a folder has an adapter of peft, and no whole model."""
    if not (path := folder / ADAPTER).is_file():
        return
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in _WEIGHTS):
        log.warning("%s is ignored: the adapter is not applied", escaped(path))
        return
    raw = read_object(path, hf_config.MAX_CONFIG_BYTES, "the config of an adapter")
    kind, base = raw.get("peft_type"), raw.get("base_model_name_or_path")
    into = show(base) if isinstance(base, str) else "its base model"
    raise NanoinferError(
        f"{escaped(folder)} is an adapter ({escaped(kind or 'LORA', 40)}), not a model: merge it into {into}"
        " (merge_and_unload of peft), save that, and give its folder"
    )


def _tensors(path: Path) -> dict[str, StoredTensor]:
    if path.name != PICKLED:
        return read_safetensors(path)
    state, num_bytes = read_archive(path)
    check_state(state, num_bytes, escaped(path))
    return state  # type: ignore[no-any-return]  # checked


def _text_part(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without those for images. The text model's get the names that they have without images."""
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith(_IMAGES):
            name = name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")
            name = name.replace("model.text_model.", "model.", 1)
            found[name] = tensor
    return found


def _names(config: ModelConfig) -> tuple[str, str]:
    """Return how the names of a family's tensors begin, and those of the output head: "model.", "lm_head."."""
    family = FAMILIES[config.family]
    return family.layer.partition(".")[0] + ".", f"{family.names['lm_head']}."


def _left_out(config: ModelConfig, keys: Iterable[str]) -> str:
    """Return the prefix that names lack: old files of GPT-2 leave out "transformer.", embedding models "model."."""
    prefix, _ = _names(config)
    return "" if config.family != "gpt2" and any(key.startswith(prefix) for key in keys) else prefix


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: a single file, or the shards that the index lists."""
    for name in _WEIGHTS:
        if (path := folder / name).is_file():
            return _indexed(path) if name.endswith(".json") else [path]
    there = sorted(p.name for p in folder.iterdir() if p.is_file())
    shards = [m for name in there if (m := _SHARD.fullmatch(name))]
    if shards and [(int(m[1]), int(m[2])) for m in shards] == [(i + 1, len(shards)) for i in range(len(shards))]:
        return [folder / m[0] for m in shards]
    found = escaped(", ".join(there[:8])) or "nothing"
    raise NanoinferError(f"{escaped(folder)} has no model.safetensors or {PICKLED} (it contains: {found})")


def _indexed(index: Path) -> list[Path]:
    """Return the files that a sharded index lists."""
    names, where = read_object(index, MAX_INDEX_BYTES, "an index of weights").get("weight_map"), escaped(index)
    if not isinstance(names, dict) or not names:
        raise NanoinferError(f"{where} is not an index of weights: it has no weight_map of names to files")
    there, files = {p.name for p in index.parent.iterdir() if p.is_file()}, []
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name:  # a path could leave the folder
            raise NanoinferError(f"{where} lists the file {show(name)}: only file names in the same folder are allowed")
        if name not in there:
            raise NanoinferError(f"{where} lists the file {show(name)}, which is not in its folder")
        files.append(index.parent / name)
    return sorted(set(files))


def _fuse(tensors: dict[str, HostTensor], name: str, family: Family, num_experts: int) -> None:
    """Replace the tensor `name` and those that follow it by the one as which the family stores them."""
    stem, _, suffix = name.rpartition(".")
    for whole, parts in family.fused.items():
        if (base := stem.removesuffix(f".{parts[0].format(0)}")) == stem:
            continue
        stacked = "{}" in parts[0]
        names = [part.format(e) for e in range(num_experts if stacked else 1) for part in parts]
        found = [tensors.pop(f"{base}.{part}.{suffix}") for part in names]
        arrays = [part.dense().values for part in found]
        if family.alternating:
            values = np.stack(arrays, axis=1)  # (rows, experts * parts, ...)
            values = values.reshape(len(values), num_experts, len(parts), -1).transpose(1, 3, 0, 2)
            values = values.reshape(num_experts, *arrays[0].shape[1:], -1)  # (experts, in, rows) or (experts, rows)
            tensors[f"{base}.{whole}{'_bias' if suffix == 'bias' else ''}"] = HostTensor(values, found[0].dtype)
            continue
        values = np.concatenate(arrays)
        if stacked:
            values = values.reshape(num_experts, -1, values.shape[1])
        tensors[f"{base}.{whole}{'' if family.bare else f'.{suffix}'}"] = HostTensor(values, found[0].dtype)


def save(weights: Weights, folder: Path, tokenizer_json: str | None = None, dtype: str | None = None) -> None:
    """Write a model as a Hugging Face folder that `transformers` loads as GPT2LMHeadModel.

    Each file is written to a temporary file and renamed, so that readers never see a partial file. Models without
    biases get biases of zero, because the layout always has biases.

    Args:
        weights: of the model.
        folder: created if it does not exist.
        tokenizer_json: content of tokenizer.json, if there is one.
        dtype: dtype of the stored weights but corrections; None is `weights.dtype`.

    Raises:
        NanoinferError: the folder cannot be written.
    """
    config, dtype = weights.config, dtype or weights.dtype
    family = FAMILIES[config.family]
    tensors: dict[str, HostTensor] = {}
    for name, tensor in weights.read():
        kept = "float32" if name.endswith(CORRECTION) else dtype
        tensors.update(family.recipe(config, name, tensor.shape[0]).stored(tensor.to(kept)))
    tensors = family.to_stored(config, tensors)
    firsts = tuple(f".{parts[0].format(0)}.{of}" for parts in family.fused.values() for of in ("weight", "bias"))
    for name in [name for name in tensors if name.endswith(firsts)]:
        _fuse(tensors, name, family, 0 if config.experts is None else config.experts.count)
    if config.family == "gpt2":  # its layout always has biases
        for name, shape in shapes(replace(config, bias=True)).items():
            zeros = HostTensor(np.zeros(shape, np.float32), "float32").to(dtype) if name.endswith(".bias") else None
            if zeros is not None and name not in tensors:
                tensors[name] = zeros
    if config.rounded_inputs:  # BitNet's layers: stored values times a scale
        one = HostTensor(np.ones(1, np.float32), "float32").to(dtype)
        tensors |= {
            name.replace(".weight", ".weight_scale"): one
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and name.startswith(family.layer.partition("{}")[0])
        }
    files = {
        "model.safetensors": to_safetensors(tensors),
        "config.json": json.dumps(hf_config.to_dict(config, dtype), indent=2).encode() + b"\n",
    }
    if tokenizer_json is not None:
        files["tokenizer.json"] = tokenizer_json.encode()
        files["tokenizer_config.json"] = _TOKENIZER_CONFIG
    write_folder(folder, files)
