"""Linear layers with LoRA adapters for the engines in PyTorch: each row of a step has the adapter of its sequence.

    y = W x + b + B A x          with the factors of the row's adapter; without, A and B are 0

`AdaptedLinear` adds the products of the rows of each adapter, one adapter after the other. `StackedLinear` gathers the
factors of each row from one tensor of all adapters: its shapes do not depend on which adapters a step has, so it is for
steps of static shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.errors import NanoinferError
from nanoinfer.models.transformer import Transformer


@dataclass
class StepAdapters:
    """The adapters of the rows of a step, which all layers read. A row is an index of the first dimension of x."""

    groups: list[tuple[int, Tensor]] = field(default_factory=list)
    """Adapters, from 1 on, and the rows of each, int64."""
    index: Tensor | None = None
    """(rows,) int64: the adapter of each row, 0: none. None: no row has one."""


class AdaptedLinear(nn.Linear):
    """A linear layer with adapters, which has the parameters of another one.

    Args:
        linear: the layer.
        step: of the engine; changed at each step.
    """

    def __init__(self, linear: nn.Linear, step: StepAdapters) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.step = linear.weight, linear.bias, step
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}

    def load(self, adapter: int, a: Tensor, b: Tensor) -> None:
        """Set the factors of an adapter: a, (r, in), and b, (out, r), on the device and in the dtype of the layer."""
        self.factors[adapter] = a, b

    def unload(self, adapter: int) -> None:
        """Remove the factors of an adapter, if it has some."""
        self.factors.pop(adapter, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output of x, (rows, ..., in): (rows, ..., out)."""
        y = super().forward(x)
        for adapter, rows in self.step.groups:
            if (factors := self.factors.get(adapter)) is not None:
                y[rows] += F.linear(F.linear(x[rows], factors[0]), factors[1])
        return y


class StackedLinear(AdaptedLinear):
    """A linear layer with adapters whose factors are in two tensors, padded with zeros to the greatest rank.

    Args:
        linear, step: as those of `AdaptedLinear`.
        count: the greatest number of adapters.
        rank: the greatest sum of the ranks of an adapter's factors.
    """

    a: Tensor
    b: Tensor

    def __init__(self, linear: nn.Linear, step: StepAdapters, count: int, rank: int) -> None:
        super().__init__(linear, step)
        self.register_buffer("a", linear.weight.new_zeros(count + 1, rank, self.in_features), persistent=False)
        self.register_buffer("b", linear.weight.new_zeros(count + 1, self.out_features, rank), persistent=False)

    def load(self, adapter: int, a: Tensor, b: Tensor) -> None:
        """Set the factors of an adapter."""
        self.unload(adapter)
        if len(a) > self.a.shape[1]:
            raise NanoinferError(f"an adapter has updates of rank {len(a)} together, the limit is {self.a.shape[1]}")
        self.a[adapter, : len(a)] = a
        self.b[adapter, :, : len(a)] = b

    def unload(self, adapter: int) -> None:
        """Remove the factors of an adapter."""
        self.a[adapter] = 0.0
        self.b[adapter] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output of x, (rows, n, in): (rows, n, out)."""
        y = F.linear(x, self.weight, self.bias)
        index = self.step.index
        return y if index is None else y + x @ self.a[index].mT @ self.b[index].mT


def adapt(model: Transformer, targets: tuple[str, ...], stack: tuple[int, int] | None = None) -> StepAdapters:
    """Replace the linear layers of a model that adapters may update, and return what they read at each step.

    Args:
        model: changed; its parameters stay the same.
        targets: their names in a block; a block may lack some.
        stack: the greatest number of adapters and the greatest rank; None: `AdaptedLinear` instead of `StackedLinear`.
    """
    step = StepAdapters()
    for block in model.blocks:
        modules = dict(block.named_modules())
        for name in targets:
            if isinstance(linear := modules.get(name), nn.Linear):
                parent, _, last = name.rpartition(".")
                if stack is None:
                    setattr(modules[parent], last, AdaptedLinear(linear, step))
                else:
                    # Queries, keys and values may have factors of their own; so have the parts of recurrent layers.
                    parts = 1 if name != "attn.c_attn" else 3 if model.config.recurrence is None else 6
                    setattr(modules[parent], last, StackedLinear(linear, step, stack[0], parts * stack[1]))
    return step
