"""BitNet's linear layers, whose inputs are rounded to 8 bits (Ma et al. 2024, arXiv 2402.17764).

    s = 127 / max |x|      of a token, with max |x| at least 1e-5
    x -> round(s x) / s    ties to even

The weights are -1, 0 or 1 times a scale of the matrix, and the models are trained with both roundings. Only that of
inputs is here: the weights are as they are stored. Source: transformers, integrations/bitnet.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LEAST = 1e-5


def rounded(x: Tensor) -> Tensor:
    """Round x, (..., n), to multiples of its row's largest magnitude / 127."""
    wide = x.float()
    scale = 127.0 / wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return (torch.round(wide * scale) / scale).to(x.dtype)


def round_inputs(module: nn.Module) -> None:
    """Make the linear layers in a module round their inputs."""

    def hook(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(inputs[0]),)

    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(hook)
