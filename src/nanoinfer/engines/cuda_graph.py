"""Rung 6, `cuda_graph`: capture the step once, replay it (docs/rungs/cuda_graph.md).

A CUDA graph records the kernel launches of a step; replaying it is one launch instead of hundreds. Tokens, positions,
lengths and slots are on the device (static_shapes.py), and tokens are sampled there (`step`), so the host launches the
next step before it has read the tokens of this one (overlap scheduling).

Shapes are rounded up (buckets.py); a graph is captured when a shape occurs for the second time, as long as all graphs
fit in graph_memory.
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
    """Captures steps of static shapes as CUDA graphs and replays them. Other arguments: see `StaticShapeEngine`.

    On a CPU, nothing is captured (for `compiled`, which runs there too).

    Args:
        config: graph_memory is used; None: an eighth of the memory that is free when the engine starts.
        recorder: records the graphs; None: CudaRecorder on a GPU.
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
        if recorder is None and self.device.type == "cuda":
            recorder = CudaRecorder(self.device)
        self.graphs: Graphs[StepOutput] = Graphs(recorder, graph_memory)

    def _execute(self, key: tuple[Bucket, bool], compute: Callable[[], StepOutput]) -> StepOutput:
        return self.graphs.run(key, compute)
