"""Load and save the Hugging Face layout: a local folder or a Hub repository with config.json and *.safetensors.

Covered: one file, or all shards with or without their index; GPT-2's tensor names with and without the `transformer.`
prefix; tied and untied heads; `pytorch_model.bin` if there is no safetensors file (torch_file.py reads it without
executing code). Not covered: sharded `pytorch_model.bin`.

A field of config.json that requests an unsupported feature is an error that names the field. No field that changes the
model's output is ignored.
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

from nanoinfer.checkpoints.weights import Weights, check, main_dtype
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped, show
from nanoinfer.models.families import ASSISTANTS, FAMILIES
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.parameters import shapes
from nanoinfer.models.stored import StoredTensor, read_safetensors, to_safetensors
from nanoinfer.utils.arrays import HostTensor
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.files import read_object, write_folder

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
    config = read_config(folder / "config.json", quantized=True)
    quantization = quantization_of(folder / "config.json")
    if quantization is None and (path := folder / "hf_quant_config.json").is_file():
        known = "save it as compressed-tensors, or use a GGUF file"
        raise NanoinferError(f"{escaped(path)}: weights quantized by modelopt are not supported: {known}")
    stored: dict[str, StoredTensor] = {}
    files = [text_part(read_tensors(path)) for path in weight_files(folder)]
    prefix, head = _left_out(config, (key for tensors in files for key in tensors)), _names(config)[1]
    for tensors in files:
        for key, tensor in tensors.items():
            if (name := key if key.startswith((prefix, head)) else prefix + key) in stored:
                raise NanoinferError(f"{escaped(folder)} contains tensor {name!r:.80} twice: keep one")
            stored[name] = tensor
    quantized: dict[str, Any] = {}
    if quantization is not None:
        from nanoinfer.checkpoints.quantized.base import QuantizedTensor
        from nanoinfer.checkpoints.quantized.methods import dequantized

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
    raw = read_object(path, MAX_CONFIG_BYTES, "the config of an adapter")
    kind, base = raw.get("peft_type"), raw.get("base_model_name_or_path")
    into = show(base) if isinstance(base, str) else "its base model"
    raise NanoinferError(
        f"{escaped(folder)} is an adapter ({escaped(kind or 'LORA', 40)}), not a model: give {into} as the model, and"
        " the adapter as lora_request or --lora-modules (docs/lora.md)"
    )


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by their names. Raises NanoinferError if it is malformed."""
    if path.suffix != ".bin":
        return read_safetensors(path)
    from nanoinfer.checkpoints.torch_file import read_checkpoint, stored_tensors

    return stored_tensors(read_checkpoint(path), path)


def text_part(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without those for images. The text model's get the names that they have without images."""
    text_tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith(_IMAGES):
            name = name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")
            name = name.replace("model.text_model.", "model.", 1)
            text_tensors[name] = tensor
    return text_tensors


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
    content = escaped(", ".join(there[:8])) or "nothing"
    raise NanoinferError(f"{escaped(folder)} has no model.safetensors or {PICKLED} (it contains: {content})")


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


def require_writable(config: ModelConfig) -> None:
    """Raise NanoinferError if `save` cannot write a model."""
    if not FAMILIES[config.family].written or config.rounded_inputs:
        raise NanoinferError(f"models of the family {config.family} cannot be written as a folder: keep the original")


def save(weights: Weights, folder: Path, tokenizer_json: str | None = None, dtype: str | None = None) -> None:
    """Write a model as a Hugging Face folder that `transformers` loads.

    Each file is written to a temporary file and renamed, so that readers never see a partial file. Models without
    biases get biases of zero, because the layout always has biases.

    Args:
        weights: of the model.
        folder: created if it does not exist.
        tokenizer_json: content of tokenizer.json, if there is one.
        dtype: dtype of the stored weights; None is `weights.dtype`.

    Raises:
        NanoinferError: the folder, or a model of the family, cannot be written.
    """
    require_writable(weights.config)
    config, dtype = weights.config, dtype or weights.dtype
    family = FAMILIES[config.family]
    tensors: dict[str, HostTensor] = {}
    for name, tensor in weights.read():
        tensors.update(family.recipe(config, name, tensor.shape[0]).stored(tensor.to(dtype)))
    if config.family == "gpt2":  # its layout always has biases
        for name, shape in shapes(replace(config, bias=True)).items():
            zeros = HostTensor(np.zeros(shape, np.float32), "float32").to(dtype) if name.endswith(".bias") else None
            if zeros is not None and name not in tensors:
                tensors[name] = zeros
    files = {
        "model.safetensors": to_safetensors(tensors),
        "config.json": json.dumps(config_to_dict(config, dtype), indent=2).encode() + b"\n",
    }
    if tokenizer_json is not None:
        files["tokenizer.json"] = tokenizer_json.encode()
        files["tokenizer_config.json"] = _TOKENIZER_CONFIG
    write_folder(folder, files)


WITH_IMAGES = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral", "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text", "llava": "llama", "llava_next": "llama",
    "llava_onevision": "qwen2", "vipllava": "llama", "internvl": "qwen2", "idefics3": "llama", "smolvlm": "llama",
    "qwen2_audio": "qwen2", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "lfm2_vl": "lfm2",
}  # fmt: skip
"""Models of texts and images or sounds whose text model is read -> its model_type where the config has none."""
_SIZES = dict(zip(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "max_position_embeddings"), (32000, 4096, 11008, 32, 32, 2048), strict=True,
))  # fmt: skip
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"intermediate_size": 14336, "max_position_embeddings": 131072},
    "qwen2": _SIZES | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
}
"""Sizes of transformers' classes, which text configs of models with images leave out."""
_QWEN_VL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", _QWEN_VL), "qwen2_5_vl_text": ("qwen2", _QWEN_VL),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 5e5}),
    "glm4_moe_lite": ("deepseek_v3", {
        "rms_norm_eps": 1e-5, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }),
}  # fmt: skip
"""model_type of a model that is one of a family -> the family, and the defaults that differ."""
_MISSING = {
    "gemma3n": "its residual streams (AltUp, LAuReL) and sparse activations are not",
    "gemma3n_text": "its residual streams (AltUp, LAuReL) and sparse activations are not",
    "apertus": "its activation, which has parameters in each layer (xIELU), is not",
    "hunyuan_v1_dense": "its norms of queries and keys after their rotation are not",
    "mllama": "its layers of attention to images are not",
    "qwen3_next": "the order of its layers' projections is not",
}
"""model_type -> the part of such models that is not supported."""
_QUANTIZATION = ("quantization_config", "compression_config")  # the second one before compressed-tensors 0.8
_SHARED = (*_QUANTIZATION, "bos_token_id", "eos_token_id", "tie_word_embeddings")  # of both parts
_BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
_DEFAULT_ENDS = {"gpt2": 50256, "mistral": 2, "ministral": 2, "ministral3": 2}
"""End-of-text token of transformers' classes, which published configs of these leave out."""
MAX_CONFIG_BYTES = 1 << 20  # GPT-2's has 0.7 KB


def read_config(path: Path, quantized: bool = False) -> ModelConfig:
    """Return the model config in the `config.json` at `path`.

    Args:
        path: the file.
        quantized: whether it may describe quantized weights, which `quantization_of` returns.

    Raises:
        NanoinferError: the file is missing or not a JSON object, or a field has an unsupported value; or the
            generation_config.json in the same folder is malformed.
    """
    raw, where = read_object(path, MAX_CONFIG_BYTES, "a config"), escaped(path)
    known = f"one of the {len(FAMILIES)} families in docs/models.md, such as llama or qwen3"
    if isinstance(kind := raw.get("model_type"), str) and kind in WITH_IMAGES:
        raw = _text_config(raw, where)
    if kind in ASSISTANTS and isinstance(text := raw.get("text_config"), dict):
        raw = text | raw | {"model_type": ASSISTANTS[0]}
    if "model_type" not in raw:
        raise NanoinferError(f"{where} has no model_type: add it, {known}")
    kind = raw["model_type"]
    if isinstance(kind, str) and kind in ALIASES:
        raw = ALIASES[kind][1] | raw | {"model_type": ALIASES[kind][0]}
    if not isinstance(kind, str) or (family := FAMILIES.get(raw["model_type"])) is None:
        why = _MISSING.get(kind) if isinstance(kind, str) else None
        raise NanoinferError(f"{where}: model_type={show(kind)} is not supported: {why or f'it must be {known}'}")
    fields = Fields(raw)
    with about(where):
        fields.only("is_encoder_decoder", False, None)
        quantizations = [fields.get(name) for name in _QUANTIZATION]
        rounds = any(isinstance(q, dict) and q.get("quant_method") == "bitnet" for q in quantizations)  # its inputs
        for name in _QUANTIZATION:
            fields.get(name) if quantized or rounds else fields.only(name, None)
        fields.only("is_causal", True, None)
        fields.only("use_bidirectional_attention", False, None, "vision")  # of images alone
        config = family.read(fields)
        default_start = 50256 if raw["model_type"] == "gpt2" else None
        tokens: dict[str, Any] = {
            "bos_token_id": next(iter(_token_ids("bos_token_id", raw.get("bos_token_id", default_start), raw)), None),
            "eos_token_ids": _end_tokens(raw, path.with_name("generation_config.json")),
        }
        config = replace(config, **tokens, rounded_inputs=rounds)
    if unknown := sorted(raw.keys() - fields.known):
        log.warning("%s: unknown fields are ignored: %s", where, escaped(", ".join(unknown)))
    return config


def quantization_of(path: Path) -> Any:
    """Return the description of quantized weights in the `config.json` at `path`, not checked; None if it has none.

    Raises:
        NanoinferError: the file is missing or not a JSON object.
    """
    raw = read_object(path, MAX_CONFIG_BYTES, "a config")
    text = raw.get("text_config")
    configs = [part.get(name) for part in (raw, text) if isinstance(part, dict) for name in _QUANTIZATION]
    return next((config for config in configs if config is not None), None)


def _text_config(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the config of the text model in that of a model of texts and images."""
    default = WITH_IMAGES[raw["model_type"]]
    if "text_config" not in raw and default in ALIASES:  # transformers 4 wrote the fields of Qwen's side by side
        return raw | {"model_type": default}
    if not isinstance(text := raw.get("text_config"), dict):
        raise NanoinferError(f"{where}: text_config={show(text)} is not an object")
    ends = [part["eos_token_id"] for part in (text, raw) if part.get("eos_token_id") is not None]
    both: dict[str, Any] = (
        {"eos_token_id": [i for end in ends for i in (end if isinstance(end, list) else [end])]} if ends else {}
    )
    shared = {name: raw[name] for name in _SHARED if name in raw}
    if any(part.get("tie_word_embeddings") is True for part in (text, raw)):
        both["tie_word_embeddings"] = True
    kind = text.get("model_type", default)
    sizes = _TEXT_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    return sizes | shared | {"model_type": kind} | text | both


def _end_tokens(raw: dict[str, Any], beside: Path) -> tuple[int, ...]:
    """Return the end-of-text tokens of generation_config.json and config.json together.

    Chat models list several in the first; some that saved one of the files again have the end of a turn in one alone.
    """
    generation = read_object(beside, MAX_CONFIG_BYTES, "a generation config") if beside.is_file() else {}
    with about(escaped(beside)):
        ends = _token_ids("eos_token_id", generation.get("eos_token_id"), raw)
    default = None if ends else _DEFAULT_ENDS.get(raw["model_type"])
    return tuple(dict.fromkeys([*ends, *_token_ids("eos_token_id", raw.get("eos_token_id", default), raw)]))


def _token_ids(name: str, value: Any, raw: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids of special tokens without duplicates: 5 -> (5,), [5, 6] -> (5, 6), None -> ().

    transformers writes GPT2Config's default, 50256, into every config, even if the vocabulary is smaller. An id outside
    the vocabulary is therefore ignored with a warning.
    """
    vocab_size = raw.get("vocab_size", 50257)
    ids: list[int] = []
    for token_id in value if isinstance(value, list) else [] if value is None else [value]:
        require_int(name, token_id, 0)
        if isinstance(vocab_size, int) and token_id >= vocab_size:
            log.warning("%s=%d is outside the vocabulary of %d tokens and is ignored", name, token_id, vocab_size)
        else:
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def config_to_dict(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json content that `transformers` reads.

    Args:
        config: the model's shape.
        dtype: name of the dtype of the stored weights.
    """
    eos, family = config.eos_token_ids, FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name before transformers 5
        **({"quantization_config": _BITNET} if config.rounded_inputs else {}),
        "use_cache": True,
        "pad_token_id": None,  # some defaults of transformers are outside a small vocabulary
    }
