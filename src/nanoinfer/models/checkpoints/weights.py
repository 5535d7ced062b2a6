"""Checked weights of a model, which an engine reads one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from nanoinfer.arrays import ITEM_BYTES, HostTensor
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.files import escaped
from nanoinfer.models.checkpoints.stored import StoredTensor
from nanoinfer.models.parameters import LAYER, shapes

# Hugging Face's GPT-2 stores these as Conv1D, (in, out): the transpose of a linear layer's (out, in).
CONV1D = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")


@dataclass(frozen=True)
class Weights:
    """Weights of a model that are not in memory yet: loaders create them, engines read them.

    Engine `native` packs each tensor as it is read, so memory never holds two copies of the model. The engines in
    PyTorch load all of them into a GPT (gpt_loading.py).
    """

    config: ModelConfig
    dtype: str
    """Dtype to compute in."""
    read: Callable[[], Iterator[tuple[str, HostTensor]]]
    """Return an iterator over the names and tensors of `parameters.shapes`, in its order and in any dtype. A tensor is
    read when it is yielded: release it before taking the next one."""

    def watched(self, update: Callable[[int, int], None]) -> Weights:
        """Return the same weights; `update(layer, n_layer)` is called as each tensor of a layer is read."""

        def read() -> Iterator[tuple[str, HostTensor]]:
            for name, tensor in self.read():
                yield name, tensor
                if found := LAYER.match(name):
                    update(int(found[1]), self.config.n_layer)

        return replace(self, read=read)


def check(config: ModelConfig, stored: Mapping[str, StoredTensor], source: str, dtype: str) -> Weights:
    """Check names, shapes and dtypes of stored tensors and return the weights of a model.

    Shapes are compared before any tensor is read, so that memory is allocated only for data that the file contains.

    Args:
        config: the model's shape.
        stored: name in our layout -> the tensor in our layout, (out, in) for linear layers.
        source: the file or folder, for error messages.
        dtype: dtype to compute in.

    Raises:
        NanoinferError: a tensor is missing or unexpected, or has a wrong shape or an unsupported dtype; or a tied head
            differs from the embedding.
    """
    _check_sizes(config, stored, source)
    wanted = shapes(config)
    for name, shape in wanted.items():
        if name not in stored:
            raise NanoinferError(f"{source}: tensor {name} {list(shape)} is missing")
        if stored[name].shape != shape:
            raise NanoinferError(
                f"{source}: tensor {name} is {list(stored[name].shape)}, but the config requires {list(shape)}"
            )
    head = stored.get("lm_head.weight") if config.tie_word_embeddings else None
    if extra := sorted(stored.keys() - wanted.keys() - ({"lm_head.weight"} if head else set())):
        names = ", ".join(f"{name!r:.80}" for name in extra[:3])
        raise NanoinferError(f"{source}: {len(extra)} tensors are not part of the model: {names}")
    for name, tensor in stored.items():
        if tensor.dtype not in ITEM_BYTES:
            found = escaped(tensor.dtype, 40)
            where = escaped(tensor.file.path)
            raise NanoinferError(f"{where}: tensor {name} is {found}: weights must be one of {', '.join(ITEM_BYTES)}")
    if head is not None and not _equal(head, stored["transformer.wte.weight"]):
        raise NanoinferError(
            f"{source}: tie_word_embeddings=True, but lm_head.weight differs from wte.weight: set it to false"
        )
    return Weights(config, dtype, lambda: ((name, stored[name].read()) for name in wanted))


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Return whether two tensors have equal values; torch.save stores a tied head once, under both names."""
    if a == b or a.shape != b.shape:
        return a == b
    values = b.read()
    return np.array_equal(a.read().to(values.dtype).values, values.values)


def _check_sizes(config: ModelConfig, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Compare the numbers in the config that determine memory use with the tensors in the file."""
    layers = {int(m.group(1)) for name in stored if (m := LAYER.match(name))}
    if len(layers) != config.n_layer:
        raise NanoinferError(f"{source}: n_layer={config.n_layer}, but the weights have {len(layers)} layers")
    for name, rows in (("wte", config.vocab_size), ("wpe", config.block_size)):
        tensor = stored.get(f"transformer.{name}.weight")
        if tensor is None or tensor.shape != (rows, config.n_embd):
            found = "missing" if tensor is None else str(list(tensor.shape))
            raise NanoinferError(
                f"{source}: tensor {name}.weight is {found}, but the config requires {[rows, config.n_embd]}"
            )
