"""A model's weights on their way from where they are kept into an engine, one tensor at a time, checked first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanoinfer.models.gpt import GPT

# Hugging Face's GPT-2 stores these as Conv1D, (in, out): the transpose of a linear layer's (out, in).
CONV1D = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_LAYER = re.compile(r"^transformer\.h\.([0-9]{1,9})\.")
_DTYPES = ("float32", "bfloat16", "float16", "float64")  # 8 bits and fewer mean nothing without their scales


@dataclass(frozen=True)
class Weights:
    """A model's weights, not in memory yet: the loaders make them, an engine takes them.

    An engine with a format of its own packs each tensor as it comes, so that no two copies of a model meet in
    memory. The others take `gpt`.
    """

    config: ModelConfig
    dtype: torch.dtype
    """Of the tensors that are handed out."""
    read: Callable[[], Iterator[tuple[str, Tensor]]]
    """Begin a pass over the names and tensors of `GPT.named_parameters`, in its order and in any dtype."""
    mapped: bool = False
    """Whether the tensors are part of a mapped file."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Hand out each name and tensor; it may be part of a mapped file, so use it before the next, and drop it."""
        for name, tensor in self.read():
            yield name, tensor.to(self.dtype)

    def gpt(self, device: torch.device | str = "cpu") -> GPT:
        """Return a GPT in eval mode with these weights on a device.

        Those of a mapped file are copied: they would change, or end the process, when a trainer writes its next
        checkpoint over it. All keep their order in memory: the engine decides on it.
        """
        model = empty_gpt(self.config)
        state = {name: tensor.to(device, self.dtype, copy=self.mapped) for name, tensor in self.read()}
        if self.config.tie_word_embeddings:
            state["lm_head.weight"] = state["transformer.wte.weight"]
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        return model.requires_grad_(False).eval()


def empty_gpt(config: ModelConfig) -> GPT:
    """Return a GPT without memory for its weights: their names and shapes."""
    import torch

    from nanoinfer.models.gpt import GPT

    with torch.device("meta"):
        return GPT(config)


def check(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    source: str,
    dtype: torch.dtype,
) -> Weights:
    """Return the weights of a model, their names and shapes checked.

    Shapes are compared before any tensor is read, so that a file cannot make us allocate what its config
    claims but its tensors do not hold.

    Args:
        config: the model's shape.
        shapes: name in our layout -> shape in our layout, (out, in) for linear layers.
        read: returns the tensor of a name, in the shape given for it; best as part of a mapped file, which takes
            no memory before it is used.
        source: the file or folder, for error messages.
        dtype: dtype of the weights in memory.

    Raises:
        NanoinferError: a tensor is missing, has another shape or a dtype that holds no weights, or has no
            place in the model; or a tied head differs from the embedding.
    """
    _check_sizes(config, shapes, source)
    wanted = {name: tuple(p.shape) for name, p in empty_gpt(config).named_parameters()}  # a tied head is named once
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
    for name in shapes if head is None else (*shapes, "lm_head.weight"):
        if (found := str(read(name).dtype).removeprefix("torch.")) not in _DTYPES:
            raise NanoinferError(f"{source}: tensor {name} is {found}: weights must be one of {', '.join(_DTYPES)}")
    if head is not None:
        wte = read("transformer.wte.weight").to(dtype)
        if tuple(head) != wte.shape or not read("lm_head.weight").to(dtype).equal(wte):
            raise NanoinferError(
                f"{source}: tie_word_embeddings=True, but lm_head.weight differs from wte.weight: set it to false"
            )
    return Weights(config, dtype, lambda: ((name, read(name)) for name in wanted), mapped=True)


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
