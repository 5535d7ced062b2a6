"""Rung `compiled`: compile the step over static shapes.

What changes from `static`: torch.compile writes a kernel for what lies between the matrix products of a block: layer
norms, bias, GELU, residuals, the write to the cache. They take one pass over memory together instead of one each. The
shapes are those of slots.py and buckets.py, so a new prompt length or batch size compiles nothing unless it needs a
new bucket.

    what is compiled   one block of a decode step (one new token a row), for each shape; all layers share it
    what is not        prompts and verification (their matrix products decide), embedding and output head

Why it helps: fewer passes over small tensors, and fewer launches. When it does not pay: a shape's first step takes
seconds, which a short run never earns back; and a C++ compiler (CPU) or Triton (GPU) must be there. gpt-fast (PyTorch,
2023) showed the way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.static_shapes import StaticShapeEngine, Step, run_block
from nanoinfer.errors import NanoinferError
from nanoinfer.models.gpt import GPT, Block

RunBlock = Callable[..., Tensor]


class CompiledEngine(StaticShapeEngine):
    """Blocks compiled for each shape.

    Args:
        model: the weights, on the device and in the dtype to compute in.
        limits: what the engine may hold.
        config: not used.
        backend: of torch.compile.

    Raises:
        NanoinferError: the keys and values do not fit the device.
    """

    min_context = 256  # fewer shapes to compile

    def __init__(
        self,
        model: GPT,
        limits: EngineLimits,
        config: EngineConfig = DEFAULTS,
        *,
        backend: str | Callable[..., object] = "inductor",
    ) -> None:
        super().__init__(model, limits, config)
        self._backend = backend
        self._compiled: dict[tuple[torch.Size, int, bool], RunBlock] = {}

    def _block(self, block: Block, x: Tensor, k: Tensor, v: Tensor, step: Step, mask: Tensor) -> Tensor:
        arguments = (block, x, k, v, step.slots, step.pos, mask, step.dense)
        if x.shape[1] > 1:
            return run_block(*arguments)
        key = (x.shape, step.context, step.dense)
        if key in self._compiled:
            return self._compiled[key](*arguments)
        run = self._compile()
        try:
            y = run(*arguments)  # compiles
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise NanoinferError(
                f"engine='compiled' cannot run: torch.compile failed ({reason}): it needs a C++ compiler on a CPU and"
                " Triton on a GPU; or use another engine"
            ) from error
        self._compiled[key] = run
        return y

    def _compile(self) -> RunBlock:
        """Return `run_block` for one shape.

        The compiler keeps a list of versions with each code object and gives up after eight. A shape gets a code object
        of its own, which has one version.
        """
        own = FunctionType(run_block.__code__.replace(), run_block.__globals__)
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)
