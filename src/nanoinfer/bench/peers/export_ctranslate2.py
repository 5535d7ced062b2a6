"""A Hugging Face folder as a CTranslate2 model folder: model.bin, config.json, vocabulary.json.

Covered: every model that our loader reads (both kinds of GELU, tied and untied heads, any MLP width). The
vocabulary is "t0", "t1", ...: prompts of a benchmark are token ids. Weights are converted when the folder is
saved, so that loading it takes no more memory than running it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.bench.backends.capabilities import require_module
from nanoinfer.bench.peers import export_once
from nanoinfer.checks import require_choice
from nanoinfer.models.checkpoints.huggingface import load_folder

if TYPE_CHECKING:
    from nanoinfer.models.gpt import GPT

COMPUTE_TYPES = ("float32", "bfloat16", "float16", "int8", "int8_bfloat16", "int8_float16")


def export_ctranslate2(weights: Path, folder: Path, compute_type: str) -> Path:
    """Return a CTranslate2 model folder, written if it is not there.

    Args:
        weights: Hugging Face folder.
        folder: the model folder is made in it, as `ctranslate2-<compute_type>`.
        compute_type: CTranslate2's name for the format of the weights: one of COMPUTE_TYPES.

    Raises:
        NanoinferError: unknown type, ctranslate2 is missing, or a folder cannot be read or written.
    """
    require_choice("compute_type", compute_type, COMPUTE_TYPES)
    require_module("ctranslate2")

    def write(partial: Path) -> None:
        spec = _spec(load_folder(weights)[0])
        spec.validate()
        spec.optimize(quantization=compute_type)
        spec.save(str(partial))

    return export_once(folder / f"ctranslate2-{compute_type}", weights, write)


def token(token_id: int) -> str:
    """Return the name of a token in the exported vocabulary: 7 -> "t7"."""
    return f"t{token_id}"


def _spec(model: GPT) -> Any:
    """Return CTranslate2's description of a model, with its weights in it."""
    specs, config = require_module("ctranslate2").specs, model.config
    activation = specs.Activation.GELUTanh if config.activation == "gelu_new" else specs.Activation.GELU
    spec = specs.TransformerDecoderModelSpec.from_config(
        config.n_layer, config.n_head, pre_norm=True, activation=activation
    )
    spec.register_vocabulary([token(i) for i in range(config.vocab_size)])
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    for name in ("unk_token", "bos_token", "eos_token"):  # one that is not in the vocabulary would be added to it
        setattr(spec.config, name, token(0))
    decoder, parts = spec.decoder, model.transformer
    decoder.scale_embeddings = False  # by sqrt(C), as translation models do
    decoder.embeddings.weight = parts["wte"].weight
    decoder.position_encodings.encodings = parts["wpe"].weight
    decoder.projection.weight = model.lm_head.weight
    _set_layer_norm(decoder.layer_norm, parts["ln_f"])
    blocks: Any = parts["h"]
    for layer, block in zip(decoder.layer, blocks, strict=True):
        _set_layer_norm(layer.self_attention.layer_norm, block.ln_1)
        _set_linear(layer.self_attention.linear[0], block.attn.c_attn)
        _set_linear(layer.self_attention.linear[1], block.attn.c_proj)
        _set_layer_norm(layer.ffn.layer_norm, block.ln_2)
        _set_linear(layer.ffn.linear_0, block.mlp.c_fc)
        _set_linear(layer.ffn.linear_1, block.mlp.c_proj)
    return spec


def _set_layer_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = norm.weight, norm.bias


def _set_linear(spec: Any, linear: Any) -> None:
    spec.weight, spec.bias = linear.weight, linear.bias
