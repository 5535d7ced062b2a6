"""config.json of the Hugging Face layout: convert it to `ModelConfig` and back.

A field that requests an unsupported feature is an error that names the field. No field that changes the model's output
is ignored.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nanoinfer.checks import require_int, show
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.files import escaped, read_json

log = logging.getLogger("nanoinfer")

MAX_CONFIG_BYTES = 1 << 20  # GPT-2's has 0.7 KB

# Field -> its supported values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
_ACTIVATIONS = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu"}
# Fields that do not change the logits of a plain forward pass.
_HARMLESS = frozenset(
    "architectures attn_pdrop embd_pdrop resid_pdrop initializer_range use_cache n_ctx task_specific_params "
    "torch_dtype dtype transformers_version _name_or_path name_or_path return_dict output_hidden_states "
    "output_attentions gradient_checkpointing id2label label2id problem_type num_labels is_decoder "
    "pad_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type "
    "summary_use_proj chunk_size_feed_forward tokenizer_class prefix finetuning_task torchscript "
    "use_bfloat16 tf_legacy_loss bos_token_id eos_token_id cross_attention_hidden_size".split()
)
_SHAPE = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def read(path: Path) -> ModelConfig:
    """Return the model config in the `config.json` at `path`.

    Raises:
        NanoinferError: the file is missing or not a JSON object, or a field has an unsupported value; or the
            generation_config.json in the same folder is malformed.
    """
    raw, where = _object(path, "a config"), escaped(path)
    for name, allowed in _ONLY.items():
        if name in raw and raw[name] not in allowed:
            raise NanoinferError(f"{where}: {name}={show(raw[name])} is not supported: only {allowed[0]!r} is")
    if "model_type" not in raw:
        raise NanoinferError(f"{where} has no model_type: add model_type=gpt2 if it is a GPT-2 model")
    activation = raw.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise NanoinferError(
            f"{where}: activation_function={show(activation)} is not supported: use one of {', '.join(_ACTIVATIONS)}"
        )
    known = {*_ONLY, *_HARMLESS, *_SHAPE, "activation_function"}
    if unknown := sorted(raw.keys() - known):
        log.warning("%s: unknown fields are ignored: %s", where, escaped(", ".join(unknown)))
    shape: dict[str, Any] = {name: raw.get(name, default) for name, default in _SHAPE.items()}
    try:
        require_int("n_positions", shape["n_positions"], 1, 2**31 - 1)  # ModelConfig's error would name block_size
        return ModelConfig(
            block_size=shape.pop("n_positions"),
            activation=_ACTIVATIONS[activation],
            bos_token_id=next(iter(_token_ids("bos_token_id", raw.get("bos_token_id", 50256), raw)), None),
            eos_token_ids=_end_tokens(raw, path.with_name("generation_config.json")),
            **shape,
        )
    except NanoinferError as e:
        raise NanoinferError(f"{where}: {e}") from None


def _object(path: Path, what: str) -> dict[str, Any]:
    raw = read_json(path, MAX_CONFIG_BYTES, what)
    if not isinstance(raw, dict):
        raise NanoinferError(f"{escaped(path)} contains a {type(raw).__name__}, not a JSON object")
    return raw


def _end_tokens(raw: dict[str, Any], beside: Path) -> tuple[int, ...]:
    """Return the end-of-text tokens of generation_config.json if it has any, else those of config.json.

    transformers and vLLM stop at the tokens of generation_config.json. Chat models list several there.
    """
    if beside.is_file() and (value := _object(beside, "a generation config").get("eos_token_id")) is not None:
        try:
            return _token_ids("eos_token_id", value, raw)
        except NanoinferError as e:
            raise NanoinferError(f"{escaped(beside)}: {e}") from None
    return _token_ids("eos_token_id", raw.get("eos_token_id", 50256), raw)


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
    """Return the config.json content that `transformers` reads as GPT2LMHeadModel.

    Args:
        config: the model's shape.
        dtype: name of the dtype of the stored weights.
    """
    eos = config.eos_token_ids
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": config.activation,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.n_inner,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name before transformers 5
        "use_cache": True,
    }
