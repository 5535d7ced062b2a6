"""Assembling a GPT from a dict of tensors, with every name and shape checked first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    import torch

    from nanoinfer.models.gpt import GPT

# Hugging Face's GPT-2 stores these as Conv1D, (in, out): the transpose of a linear layer's (out, in).
CONV1D = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_LAYER = re.compile(r"^transformer\.h\.([0-9]{1,9})\.")
_DTYPES = ("float32", "bfloat16", "float16", "float64")  # 8 bits and fewer mean nothing without their scales


def build(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    source: str,
    dtype: torch.dtype,
) -> GPT:
    """Return a GPT in eval mode with the given weights.

    Shapes are compared before any tensor is read, so that a file cannot make us allocate what its config
    claims but its tensors do not hold. The weights are copies: those of a mapped file would change, or end
    the process, when a trainer writes its next checkpoint over it.

    Args:
        config: the model's shape.
        shapes: name in our layout -> shape in our layout, (out, in) for linear layers.
        read: returns the tensor of a name, in the shape given for it.
        source: the file or folder, for error messages.
        dtype: dtype of the model's weights.

    Raises:
        NanoinferError: a tensor is missing, has another shape or a dtype that holds no weights, or has no
            place in the model.
    """
    import torch

    from nanoinfer.models.gpt import GPT

    _check_sizes(config, shapes, source)
    with torch.device("meta"):
        model = GPT(config)
    wanted = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    shapes = dict(shapes)
    head = shapes.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    for name, shape in wanted.items():
        if name not in shapes:
            raise NanoinferError(f"{source}: tensor {name} {list(shape)} is missing")
        if tuple(shapes[name]) != shape:
            raise NanoinferError(
                f"{source}: tensor {name} is {list(shapes[name])}, but the config makes it {list(shape)}"
            )
    if extra := sorted(shapes.keys() - wanted.keys()):
        names = ", ".join(f"{name!r:.80}" for name in extra[:3])
        raise NanoinferError(f"{source}: {len(extra)} tensors have no place in the model: {names}")
    state = {name: _copy(read(name), dtype, f"{source}: tensor {name}") for name in wanted}
    if head is not None:
        wte = state["transformer.wte.weight"]
        what = f"{source}: tensor lm_head.weight"
        if tuple(head) != wte.shape or not torch.equal(_copy(read("lm_head.weight"), dtype, what), wte):
            raise NanoinferError(
                f"{source}: tie_word_embeddings=True, but lm_head.weight differs from wte.weight: set it to false"
            )
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _check_sizes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compare the numbers that decide how much we allocate with what the file holds."""
    layers = {int(m.group(1)) for name in shapes if (m := _LAYER.match(name))}
    if len(layers) != config.n_layer:
        raise NanoinferError(f"{source}: n_layer={config.n_layer}, but the weights hold {len(layers)} layers")
    for name, rows in (("wte", config.vocab_size), ("wpe", config.block_size)):
        shape = shapes.get(f"transformer.{name}.weight")
        if shape is None or tuple(shape) != (rows, config.n_embd):
            found = "missing" if shape is None else str(list(shape))
            raise NanoinferError(
                f"{source}: tensor {name}.weight is {found}, but the config makes it {[rows, config.n_embd]}"
            )


def _copy(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a copy in another dtype. `what` names the tensor in the error."""
    if (found := str(tensor.dtype).removeprefix("torch.")) not in _DTYPES:
        raise NanoinferError(f"{what} is {found}: weights must be one of {', '.join(_DTYPES)}")
    return tensor.to(dtype, copy=True)  # keeps the order in memory: the engine decides on it
