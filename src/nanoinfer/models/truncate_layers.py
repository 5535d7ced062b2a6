"""Cutting: the first layers of a model under its own final norm and head.

A model that stops early says something like what the whole would say, at a share of the cost: a draft for it that
needs no training (the idea of early exit: Elhoushi et al., "LayerSkip", 2024, which trains for it). GPT-2's layers were
not trained to be read early, so expect little of it; a draft model of the same cost is better.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"transformer\.h\.(\d+)\.")


def truncate_layers(weights: Weights, n_layer: int) -> Weights:
    """Return the weights of a model's first `n_layer` layers, read from where the whole's are.

    Raises:
        NanoinferError: n_layer is not from 1 to one less than the model has.
    """
    config = weights.config
    if not 1 <= n_layer < config.n_layer:
        raise NanoinferError(f"{n_layer} layers of a model of {config.n_layer}: use 1 to {config.n_layer - 1}")

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.read():
            layer = _LAYER.match(name)
            if layer is None or int(layer[1]) < n_layer:
                yield name, tensor

    return replace(weights, config=replace(config, n_layer=n_layer), read=read)
