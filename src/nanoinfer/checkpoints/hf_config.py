"""config.json of the Hugging Face layout: convert it to `ModelConfig` and back.

A field that requests an unsupported feature is an error that names the field. No field that changes the model's output
is ignored.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.fields import Fields
from nanoinfer.utils.checks import require_int, show
from nanoinfer.utils.files import escaped, read_object

log = logging.getLogger("nanoinfer")

WITH_IMAGES = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral", "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text", "llava": "llama", "llava_next": "llama",
    "llava_onevision": "qwen2", "vipllava": "llama", "internvl": "qwen2", "idefics3": "llama", "smolvlm": "llama",
    "qwen2_audio": "qwen2",
}  # fmt: skip
"""Models of texts and images or sounds whose text model is read -> its model_type where the config does not say it."""
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
    "mllama": "its layers of attention to images are not",
    "qwen3_next": "its layers of linear attention are not",
}
"""What of a model_type is not supported."""
_QUANTIZATION = ("quantization_config", "compression_config")  # the second one before compressed-tensors 0.8
_SHARED = (*_QUANTIZATION, "bos_token_id", "eos_token_id", "tie_word_embeddings")  # of both parts
_BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
_DEFAULT_ENDS = {"gpt2": 50256, "mistral": 2, "ministral": 2, "ministral3": 2}
"""End-of-text token of transformers' classes, which published configs of these leave out."""
MAX_CONFIG_BYTES = 1 << 20  # GPT-2's has 0.7 KB


def read(path: Path, quantized: bool = False) -> ModelConfig:
    """Return the model config in the `config.json` at `path`.

    Args:
        path: the file.
        quantized: whether it may describe quantized weights, which `quantization` returns.

    Raises:
        NanoinferError: the file is missing or not a JSON object, or a field has an unsupported value; or the
            generation_config.json in the same folder is malformed.
    """
    raw, where = read_object(path, MAX_CONFIG_BYTES, "a config"), escaped(path)
    known = ", ".join(FAMILIES)
    if isinstance(kind := raw.get("model_type"), str) and kind in WITH_IMAGES:
        raw = _text_part(raw, where)
    if "model_type" not in raw:
        raise NanoinferError(f"{where} has no model_type: add it, one of {known}")
    kind = raw["model_type"]
    if isinstance(kind, str) and kind in ALIASES:
        raw = ALIASES[kind][1] | raw | {"model_type": ALIASES[kind][0]}
    if not isinstance(kind, str) or (family := FAMILIES.get(raw["model_type"])) is None:
        why = _MISSING.get(kind) if isinstance(kind, str) else None
        raise NanoinferError(f"{where}: model_type={show(kind)} is not supported: {why or f'only {known} are'}")
    fields = Fields(raw)
    with about(where):
        fields.only("is_encoder_decoder", False, None)
        rounds = [_rounds_inputs(fields.get(name)) for name in _QUANTIZATION]
        for name in _QUANTIZATION:
            fields.get(name) if quantized or any(rounds) else fields.only(name, None)
        fields.only("is_causal", True, None)
        fields.only("use_bidirectional_attention", False, None, "vision")  # of images alone
        config = family.read(fields)
        default_start = 50256 if raw["model_type"] == "gpt2" else None
        tokens: dict[str, Any] = {
            "bos_token_id": next(iter(_token_ids("bos_token_id", raw.get("bos_token_id", default_start), raw)), None),
            "eos_token_ids": _end_tokens(raw, path.with_name("generation_config.json")),
        }
        config = replace(config, **tokens, rounded_inputs=any(rounds))
    if unknown := sorted(raw.keys() - fields.known):
        log.warning("%s: unknown fields are ignored: %s", where, escaped(", ".join(unknown)))
    return config


def _rounds_inputs(quantization: Any) -> bool:
    """Return whether a quantization_config asks for BitNet's layers, whose inputs are rounded."""
    return isinstance(quantization, dict) and quantization.get("quant_method") == "bitnet"


def quantization(path: Path) -> Any:
    """Return how the `config.json` at `path` says that weights are quantized, not checked; None if it does not.

    Raises:
        NanoinferError: the file is missing or not a JSON object.
    """
    raw = read_object(path, MAX_CONFIG_BYTES, "a config")
    text = raw.get("text_config")
    found = [part.get(name) for part in (raw, text) if isinstance(part, dict) for name in _QUANTIZATION]
    return next((given for given in found if given is not None), None)


def _text_part(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the config of the text model in that of a model of texts and images."""
    default = WITH_IMAGES[raw["model_type"]]
    if "text_config" not in raw and default in ALIASES:  # transformers 4 wrote the fields of Qwen's side by side
        return raw | {"model_type": default}
    if not isinstance(text := raw.get("text_config"), dict):
        raise NanoinferError(f"{where}: text_config={show(text)} is not an object")
    ends = [part["eos_token_id"] for part in (text, raw) if part.get("eos_token_id") is not None]
    both: dict[str, Any] = (
        {"eos_token_id": [i for found in ends for i in (found if isinstance(found, list) else [found])]} if ends else {}
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
    found = read_object(beside, MAX_CONFIG_BYTES, "a generation config") if beside.is_file() else {}
    with about(escaped(beside)):
        ends = _token_ids("eos_token_id", found.get("eos_token_id"), raw)
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


def to_dict(config: ModelConfig, dtype: str) -> dict[str, Any]:
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
