"""PyTorch's modules in the steps of engine `triton`: their matrix products are its kernels.

Mixtures of experts and recurrent layers run as the reference model's modules. `fuse` replaces their matrices, so that
they have the formats of all other weights.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.engines.triton_layers import Pack, frozen, take
from nanoinfer.kernels.triton.epilogue import Epilogue
from nanoinfer.kernels.triton.experts import BLOCK, expert_product
from nanoinfer.kernels.triton.products import product
from nanoinfer.kernels.triton.quantize import Weight
from nanoinfer.models.experts import ExpertMLP, Stack
from nanoinfer.models.recurrent import Recurrent
from nanoinfer.models.transformer import Transformer


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


class FusedStack(Stack):
    """The matrices of one of the products of all experts, packed.

    Args:
        count: number of experts.
        packed: (count * rows, columns).
        bias: (count * rows,), or None.
    """

    def __init__(self, count: int, packed: Weight, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.count, self.packed = count, packed
        self.bias = None if bias is None else frozen(bias)
        self.weight = frozen(packed.data if packed.scale is None else packed.data.new_empty(0))

    def gathered(self, chosen: Tensor, x: Tensor) -> Tensor:
        """Return the products of the experts `chosen`, (N, k, rows, 1), for x, (N, k or 1, columns, 1)."""
        out = self._empty(chosen.numel(), x)
        inputs = x.flatten(0, 1).squeeze(-1).contiguous()
        expert_product(inputs, self.packed, self.count, chosen.flatten(), None, out, self.bias)
        return out.view(*chosen.shape, -1, 1)

    def all(self, x: Tensor) -> Tensor:
        """Return the products of all experts, (E, N, rows), for x, (N, columns) or (E, N, columns)."""
        if self.packed.scale is None:
            return super().all(x)
        E, N = self.count, x.shape[-2]
        expert, token = torch.arange(E, device=x.device), torch.arange(-(-N // BLOCK) * BLOCK, device=x.device)
        places = (token * E + expert[:, None]).masked_fill(token >= N, N * E).view(-1, BLOCK)  # (E * blocks, BLOCK)
        inputs = x if x.dim() == 2 else x.transpose(0, 1).flatten(0, 1)  # those of a token one after the other
        out = self._empty(N * E, x)
        experts = expert[:, None].expand(E, len(places) // E).flatten()
        expert_product(inputs.contiguous(), self.packed, E, experts, places, out, self.bias)
        return out.view(N, E, -1).transpose(0, 1)

    def _empty(self, rows: int, x: Tensor) -> Tensor:
        return torch.empty(rows, self.packed.num_outputs // self.count, dtype=self.packed.operand, device=x.device)


def fuse(model: Transformer, pack: Pack, most: float) -> None:
    """Replace the matrices in the modules of a model that engine `triton` runs as they are.

    Args:
        model: the model.
        pack: makes their weights.
        most: of `FusedLinear`.
    """

    def replace(module: nn.Module, *names: str) -> None:
        for name in names:
            linear = cast(nn.Linear, module.get_submodule(name))
            bias = None if linear.bias is None else linear.bias.detach()
            setattr(module, name, FusedLinear(take(linear, pack, keep=False), bias, most))

    for cell in [module for module in model.modules() if isinstance(module, Recurrent)]:
        replace(cell, "c_attn", "c_proj")
    for mlp in [module for module in model.modules() if isinstance(module, ExpertMLP)]:
        if mlp.config.shared_width or mlp.config.beside:  # routers keep the model's dtype
            replace(mlp.shared, "c_gate", "c_fc", "c_proj")
        for name, stack in mlp.experts.items():
            bias = None if stack.bias is None else cast(Tensor, stack.bias).detach()
            mlp.experts[name] = FusedStack(mlp.config.count, take(stack, pack, keep=False), bias)
