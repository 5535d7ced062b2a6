"""Cutting: the first layers of a model under its own final norm and head.

A model that stops early says something like what the whole would say, at a share of the cost: a draft for it that
needs no training (the idea of early exit: Elhoushi et al., "LayerSkip", 2024, which trains for it). GPT-2's layers were
not trained to be read early, so expect little of it; a draft model of the same cost is better.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    from nanoinfer.models.gpt import GPT


def cut(gpt: GPT, n_layer: int) -> GPT:
    """Return a model of the first `n_layer` layers, which shares its weights with `gpt`.

    Raises:
        NanoinferError: n_layer is not from 1 to one less than the model has.
    """
    import torch

    from nanoinfer.models.gpt import GPT

    if not 1 <= n_layer < gpt.config.n_layer:
        raise NanoinferError(f"{n_layer} layers of a model of {gpt.config.n_layer}: use 1 to {gpt.config.n_layer - 1}")
    with torch.device("meta"):
        short = GPT(replace(gpt.config, n_layer=n_layer))
    state = gpt.state_dict()
    short.load_state_dict({name: state[name] for name in short.state_dict()}, assign=True)
    short.tie_weights()
    return short.requires_grad_(False).eval()
