"""Rung 5, `compiled`: compile the step over static shapes (docs/rungs/compiled.md).

torch.compile fuses the operations between the matrix products of a block into few kernels. Shapes are rounded up to
buckets (static_shapes.py, buckets.py), so a new prompt length or batch size compiles nothing unless it needs a new
bucket. The approach is that of gpt-fast (PyTorch, 2023).

On a GPU the whole step is also captured as a CUDA graph (cuda_graph.py), because the checks before compiled code and
its launches, about ten a block, take longer than a small model's kernels.

    compiled       one block of a decode step (one new token a row) for each shape, shared by all layers
    not compiled   prompts and verification, whose time is spent in matrix products; the embedding; the output head
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from nanoinfer.engines.base import SampleSlots
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.static_shapes import StepTensors, run_block
from nanoinfer.errors import NanoinferError
from nanoinfer.models.layers import Rotation
from nanoinfer.models.transformer import Block

RunBlock = Callable[..., Tensor]


class CompiledEngine(CudaGraphEngine):
    """Runs decode steps with blocks that are compiled once for each shape. Other arguments: see `CudaGraphEngine`.

    A shape is compiled when it occurs for the first time and captured, on a GPU, at the second time.

    Args:
        backend: the backend of torch.compile.
    """

    min_context = 256  # fewer shapes to compile

    def __init__(self, *args: Any, backend: str | Callable[..., object] = "inductor", **options: Any) -> None:
        super().__init__(*args, **options)
        self._backend = backend
        self._compiled: dict[tuple[torch.Size, int, bool, bool, bool], RunBlock] = {}

    def warm_up(self, sample: SampleSlots) -> None:
        """Do nothing: to compile the blocks of all shapes takes minutes."""

    def _block(
        self, block: Block, x: Tensor, rotation: Rotation | None, k: Tensor, v: Tensor, step: StepTensors, mask: Tensor
    ) -> Tensor:
        arguments = (self.config, block, x, rotation, k, v, step.slots, step.pos, mask, step.dense)
        if x.shape[1] > 1:
            return run_block(*arguments)
        key = (x.shape, step.context, step.dense, rotation is None, self._has_adapters)
        if key in self._compiled:
            return self._compiled[key](*arguments)
        run = self._compile()
        try:
            y = run(*arguments)  # compiles
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise NanoinferError(
                f"engine='compiled' cannot run: torch.compile failed ({reason}): install a C++ compiler (CPU) or"
                " Triton (GPU), or use another engine"
            ) from error
        self._compiled[key] = run
        return y

    def _compile(self) -> RunBlock:
        """Return a copy of `run_block` to compile for one shape.

        torch.compile stops recompiling a code object after eight versions. A separate code object for each shape has
        one version only.
        """
        own = FunctionType(run_block.__code__.replace(), run_block.__globals__)
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)
