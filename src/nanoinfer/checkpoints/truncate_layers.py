"""Early exit: keep the first layers of a model, its final layer norm and its output head.

The truncated model approximates the full model's output at a fraction of its cost, so it can serve as a draft that
needs no training. Elhoushi et al., "LayerSkip", 2024, train models for early exit. GPT-2 was not trained for it, so the
acceptance rate is low; a separate draft model of the same cost is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.parameters import LAYER
from nanoinfer.utils.arrays import HostTensor

PER_LAYER = {"transformer.per_layer.wte.weight": True, "transformer.per_layer.c_in.weight": False}
"""Matrices whose rows are those of all layers -> whether a layer has one row (for each token), or per_layer_dim."""


def truncate_layers(weights: Weights, n_layer: int) -> Weights:
    """Return the weights of a model with only its first `n_layer` layers, read from the same source.

    Raises:
        NanoinferError: n_layer is not in [1, config.n_layer - 1].
    """
    config = weights.config
    if not 1 <= n_layer < config.n_layer:
        raise NanoinferError(f"{n_layer} layers of a model of {config.n_layer}: use 1 to {config.n_layer - 1}")

    def read() -> Iterator[tuple[str, HostTensor]]:
        for name, tensor in weights.read():
            layer = LAYER.match(name)
            if layer is None or int(layer[1]) < n_layer:
                yield name, _first_layers(tensor, config, n_layer, PER_LAYER[name]) if name in PER_LAYER else tensor

    return replace(weights, config=replace(config, n_layer=n_layer, layers=config.layers[:n_layer]), read=read)


def _first_layers(tensor: HostTensor, config: ModelConfig, n_layer: int, one: bool) -> HostTensor:
    """Return the rows of the first `n_layer` layers of a matrix of PER_LAYER."""
    dense = tensor.dense()
    rows, columns = 1 if one else config.per_layer_dim, dense.shape[1]
    kept = dense.values.reshape(-1, config.n_layer, rows, columns)[:, :n_layer]
    return replace(dense, values=kept.reshape(-1, columns))
