"""Rung `cuda_graph`: capture the step once, replay it.

What changes from `static`: a step is one launch instead of hundreds. The kernels are torch's own; what launched them
one by one, Python and the driver, is left out. Tokens, positions, lengths and slots live on the device (slots.py), and
so does the draw (`step`): the next step is launched before the host has read the token of this one.

    shapes     rows, new tokens and context are rounded up (buckets.py); a graph is made when a shape comes a second
               time, within graph_memory
    positions  are read from a tensor at each replay, and the replay itself moves them on
    padding    rows and tokens of padding write to a column of the cache that nobody reads

Why it helps: reading GPT-2 124M's weights once takes an H100 less than 0.1 ms; launching a step's kernels one by one
takes the host longer. When it does not pay: large batches and long prompts, whose kernels are longer than their
launches; and every shape's graph takes device memory and, once, the time of a capture.
"""

from __future__ import annotations

from collections.abc import Callable

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.buckets import Bucket
from nanoinfer.engines.devices import free_memory
from nanoinfer.engines.graphs import CudaRecorder, Graphs, Recorder
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.static_shapes import Output, StaticShapeEngine
from nanoinfer.models.gpt import GPT


class CudaGraphEngine(StaticShapeEngine):
    """Steps of static shapes, captured and replayed.

    Args:
        model: the weights, on a CUDA device.
        limits: what the engine may hold.
        config: graph_memory is used; None: an eighth of what is free when the engine starts.
        recorder: makes graphs; None: CUDA's own.

    Raises:
        NanoinferError: the keys and values do not fit the device.
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
        graph_memory = config.graph_memory if config.graph_memory is not None else free_memory(self.device) // 8
        self.graphs: Graphs[Output] = Graphs(recorder or CudaRecorder(self.device), graph_memory)

    def _execute(self, key: tuple[Bucket, bool], compute: Callable[[], Output]) -> Output:
        return self.graphs.run(key, compute)
