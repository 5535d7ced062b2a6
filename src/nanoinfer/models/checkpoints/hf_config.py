"""config.json of the Hugging Face layout: to `ModelConfig` and back.

What a config asks for and this project does not do is an error that names the field; nothing that would
change the model's output is ignored.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from nanoinfer.checks import require_int
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError

log = logging.getLogger("nanoinfer")

# Field -> the only values that mean what our model does.
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
        NanoinferError: the file is missing or no JSON object, or asks for what we do not do (field named).
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise NanoinferError(f"{path} cannot be read as JSON: {' '.join(str(e).split())[:200]}") from None
    if not isinstance(raw, dict):
        raise NanoinferError(f"{path} holds a {type(raw).__name__}, not a JSON object")
    for name, allowed in _ONLY.items():
        if name in raw and raw[name] not in allowed:
            raise NanoinferError(f"{path}: {name}={raw[name]!r} is not supported: only {allowed[0]!r} is")
    if "model_type" not in raw:
        raise NanoinferError(f"{path} has no model_type: a GPT-2 folder says model_type=gpt2")
    activation = raw.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise NanoinferError(
            f"{path}: activation_function={activation!r} is not supported: use one of {', '.join(_ACTIVATIONS)}"
        )
    known = {*_ONLY, *_HARMLESS, *_SHAPE, "activation_function"}
    if unknown := sorted(raw.keys() - known):
        log.warning("%s: fields with no meaning here: %s", path, ", ".join(unknown))
    shape: dict[str, Any] = {name: raw.get(name, default) for name, default in _SHAPE.items()}
    try:
        require_int("n_positions", shape["n_positions"], 1, 2**31 - 1)  # ModelConfig has another name for it
        return ModelConfig(
            block_size=shape.pop("n_positions"),
            activation=_ACTIVATIONS[activation],
            bos_token_id=_token_id(raw, "bos_token_id"),
            eos_token_id=_token_id(raw, "eos_token_id"),
            **shape,
        )
    except NanoinferError as e:
        raise NanoinferError(f"{path}: {e}") from None


def _token_id(raw: dict[str, Any], name: str) -> int | None:
    """Return a special token's id; GPT2Config's default is 50256, which small vocabularies do not have.

    transformers writes that default into every config, so an id outside the vocabulary means "none".
    """
    value: Any = raw.get(name, 50256)
    if isinstance(value, list):  # newer configs may list several; the first is the one that matters
        value = value[0] if value else None
    vocab_size = raw.get("vocab_size", 50257)
    if isinstance(value, int) and isinstance(vocab_size, int) and value >= vocab_size:
        log.warning("%s=%d is outside the vocabulary of %d: there is none", name, value, vocab_size)
        return None
    return value  # type: ignore[no-any-return]  # ModelConfig checks it


def to_dict(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json content that `transformers` reads as GPT2LMHeadModel.

    Args:
        config: the model's shape.
        dtype: name of the dtype that the weights are stored in.
    """
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
        "eos_token_id": config.eos_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name before transformers 5
        "use_cache": True,
    }
