"""PyTorch's modules in the steps of engine `triton`: their matrix products are its kernels.

What few families have (latent attention, per-layer embeddings) runs as the reference model's module. `fuse` replaces
the linear layers in it, so that they have the formats of all other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.engines.triton_layers import Pack, take
from nanoinfer.kernels.triton.epilogue import Epilogue
from nanoinfer.kernels.triton.products import product
from nanoinfer.kernels.triton.quantize import Weight
from nanoinfer.models.gpt import GPT


class FusedLinear(nn.Module):
    """A linear layer as one kernel for up to `most` rows; for more, which dense weights alone have, PyTorch's."""

    def __init__(self, weight: Weight, bias: Tensor | None, most: float) -> None:
        super().__init__()
        self.weight, self.bias, self._most = weight, bias, most

    def forward(self, x: Tensor) -> Tensor:
        """Return the products of x, (..., K), (..., N) in the dtype of the model."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > self._most:
            return F.linear(x, self.weight.data, self.bias)
        out = torch.empty(len(rows), self.weight.num_outputs, dtype=self.weight.operand, device=x.device)
        product(rows.contiguous(), self.weight, out, None, Epilogue(self.bias))
        return out.view(*x.shape[:-1], -1)


def fuse(model: GPT, pack: Pack, most: float) -> None:
    """Replace linear layers in the modules of a model that engine `triton` runs as they are.

    Args:
        model: the model.
        pack: makes their weights.
        most: of `FusedLinear`.
    """
    for parent, name in _linears(model):
        linear = cast(nn.Linear, parent.get_submodule(name))
        bias = None if linear.bias is None else linear.bias.detach()
        setattr(parent, name, FusedLinear(take(linear, pack, keep=False), bias, most))


def _linears(model: GPT) -> Iterator[tuple[nn.Module, str]]:
    """Return the modules that have such layers, and the names in them."""
    if model.config.per_layer_dim:
        yield model.transformer["per_layer"], "c_in"
    if (latent := model.config.latent) is not None:
        for block in model.blocks:
            yield from ((block.attn, name) for name in ("c_attn", *["q_b"] * (latent.query_rank > 0), "c_proj"))
