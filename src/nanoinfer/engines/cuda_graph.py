"""Rung 6, `cuda_graph`: capture the step once, replay it.

The idea: a CUDA graph records the kernel launches of a step; replaying it is one launch instead of hundreds.

What changes from `compiled`: the kernels are PyTorch's own; only the time to launch them from Python is removed.
Tokens, positions, lengths and slots are on the device (static_shapes.py), and tokens are sampled there (`step`), so the
host launches the next step before it has read the tokens of this one (overlap scheduling).

    shapes     rows, new tokens and context are rounded up (buckets.py); a graph is captured when a shape occurs for
               the second time, as long as all graphs fit in graph_memory
    positions  are read from a tensor at each replay; the replay itself advances them
    padding    rows and tokens of padding write to a column of the cache that is never read

Why it helps: an H100 reads the weights of GPT-2 124M in less than 0.1 ms; launching the kernels of a step one by one
takes the host longer. When it does not help: for large batches and long prompts, whose kernels run longer than their
launches take. Each captured shape takes device memory and the time of one capture.
"""

from __future__ import annotations

from collections.abc import Callable

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.buckets import Bucket
from nanoinfer.engines.devices import free_memory
from nanoinfer.engines.graphs import CudaRecorder, Graphs, Recorder
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.static_shapes import StaticShapeEngine, StepOutput
from nanoinfer.models.gpt import GPT


class CudaGraphEngine(StaticShapeEngine):
    """Captures steps of static shapes as CUDA graphs and replays them.

    Args:
        model: the weights, on a CUDA device.
        limits: capacity of the engine.
        config: graph_memory is used; None: an eighth of the memory that is free when the engine starts.
        recorder: records the graphs; None: CudaRecorder.

    Raises:
        NanoinferError: the KV cache does not fit in the device's memory.
    """

    def __init__(
        self,
        model: GPT,
        limits: EngineLimits,
        config: EngineConfig = DEFAULTS,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, limits, config)
        graph_memory = config.graph_memory if config.graph_memory is not None else free_memory(str(self.device)) // 8
        self.graphs: Graphs[StepOutput] = Graphs(recorder or CudaRecorder(self.device), graph_memory)

    def _execute(self, key: tuple[Bucket, bool], compute: Callable[[], StepOutput]) -> StepOutput:
        return self.graphs.run(key, compute)
