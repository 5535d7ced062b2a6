"""Models made of a model: its first layers, and the same function in a larger shape.

`truncate_layers` keeps the first layers, the final layer norm and the output head (early exit): a draft that needs no
training. `widen` builds a larger model that computes the same function (Net2Net, Chen et al. 2016, arXiv:1511.05641):

    width    every value of the residual stream is repeated r times: x -> (x, x, ..., x). The mean and variance in a
             layer norm do not change. A linear layer sums r copies of each input, so its weights are divided by r.
    heads    whole attention heads are copied, so head_dim and the attention scale do not change. MLP units are copied.
    head     an untied output head is divided by r as well. A tied head is also the embedding and cannot be divided;
             the weight and bias of ln_f are divided by r instead, which gives the same logits.
    depth    the output projections (c_proj, weight and bias) of an added layer are zero, so it adds nothing to the
             residual. Its other weights are copied from a layer of the model, so that it costs as much as one.

In exact arithmetic the logits are equal; in float32 they differ by rounding. What figures of a widened model show is in
docs/builtin-models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.parameters import LAYER, shapes
from nanoinfer.utils.arrays import HostTensor
from nanoinfer.utils.checks import require_int


def truncate_layers(weights: Weights, n_layer: int) -> Weights:
    """Return the weights of a model with only its first `n_layer` layers, read from the same source.

    Raises:
        NanoinferError: n_layer is not in [1, config.n_layer - 1], or the model has per-layer embeddings.
    """
    config = weights.config
    if config.per_layer_dim:
        raise NanoinferError("a model with per-layer embeddings has no first layers of its own: use another draft")
    if not 1 <= n_layer < config.n_layer:
        raise NanoinferError(f"{n_layer} layers of a model of {config.n_layer}: use 1 to {config.n_layer - 1}")

    def read() -> Iterator[tuple[str, HostTensor]]:
        for name, tensor in weights.read():
            layer = LAYER.match(name)
            if layer is None or int(layer[1]) < n_layer:
                yield name, tensor

    return replace(weights, config=replace(config, n_layer=n_layer, layers=config.layers[:n_layer]), read=read)


def widened(config: ModelConfig, *, n_embd: int, n_layer: int) -> ModelConfig:
    """Return the config of a model after widening.

    widened(256 wide, 4 heads, 6 layers; n_embd=768, n_layer=12)  ->  768 wide, 12 heads, 12 layers

    Raises:
        NanoinferError: n_embd is not a multiple of the model's, or n_layer is less than the model's; or the model is
            not of GPT-2's family.
    """
    if not config.is_gpt2:
        raise NanoinferError(f"a model of family {config.family} cannot be widened: only those of gpt2 can")
    require_int("n_embd", n_embd, 1, 2**31 - 1)
    require_int("n_layer", n_layer, 1, 2**31 - 1)
    if n_embd % config.n_embd:
        raise NanoinferError(
            f"n_embd={n_embd} is not a multiple of the model's {config.n_embd}: widening copies whole channels"
        )
    if n_layer < config.n_layer:
        raise NanoinferError(f"n_layer={n_layer} is less than the model's {config.n_layer}: widening only adds layers")
    r = n_embd // config.n_embd
    inner = None if config.n_inner is None else r * config.n_inner
    return replace(config, n_embd=n_embd, n_layer=n_layer, n_head=r * config.n_head, n_inner=inner)


def widen(weights: Weights, *, n_embd: int, n_layer: int) -> Weights:
    """Return the weights of a wider and deeper model that computes the same function.

    Args:
        weights: of the model. They are read once, into memory; the tensors of the result are computed when they are
            read.
        n_embd: the new width, r times the model's; the result has r times the heads and MLP units.
        n_layer: the new depth, at least the model's.

    Returns:
        the weights, in float32: dividing by r rounds unless r is a power of two.

    Raises:
        NanoinferError: n_embd is not a multiple of the model's, or n_layer is less than the model's.
    """
    config = widened(weights.config, n_embd=n_embd, n_layer=n_layer)
    r, layers = n_embd // weights.config.n_embd, weights.config.n_layer
    source = {name: tensor.float32() for name, tensor in weights.read()}

    def read() -> Iterator[tuple[str, HostTensor]]:
        for name in shapes(config):
            copied = LAYER.sub(lambda m: f"transformer.h.{int(m[1]) % layers}.", name)  # an added layer is a copy
            values = _copy(name, source[copied], r, tied=config.tie_word_embeddings)
            added = copied != name
            yield name, HostTensor(np.zeros_like(values) if added and ".c_proj." in name else values, "float32")

    return Weights(config, weights.dtype, read)


def _copy(name: str, w: NDArray[np.float32], r: int, *, tied: bool) -> NDArray[np.float32]:
    """Repeat a parameter r times along each widened dimension; divide it by r where r copies are summed."""
    ratio = np.float32(r)
    if "ln_" in name:
        return np.tile(w / ratio if "ln_f" in name and tied else w, r)
    if w.ndim == 1:  # a bias; c_attn's is q, k, v concatenated
        return np.tile(w.reshape(3, -1), (1, r)).reshape(-1) if "c_attn" in name else np.tile(w, r)
    if name.endswith(("wte.weight", "wpe.weight")):  # (V, C), (positions, C)
        return np.tile(w, (1, r))
    if name == "lm_head.weight":
        return np.tile(w / ratio, (1, r))
    if "c_attn" in name:  # (3 C, C)
        return np.tile((w / ratio).reshape(3, -1, w.shape[1]), (1, r, r)).reshape(r * w.shape[0], -1)
    return np.tile(w / ratio, (r, r))
