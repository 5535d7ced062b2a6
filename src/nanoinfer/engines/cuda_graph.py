"""Rung 6, `cuda_graph`: capture the step once, replay it (docs/rungs/cuda_graph.md).

A CUDA graph records the kernel launches of a step; replaying it is one launch instead of hundreds. Tokens, positions,
lengths and slots are on the device (static_shapes.py), and tokens are sampled there (`step`), so the host launches the
next step before it has read the tokens of this one (overlap scheduling).

Shapes are rounded up (buckets.py). Decode steps are captured at the start (`warm_up`), other shapes when they occur for
the second time, as long as all graphs fit in graph_memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import DEFAULTS, SampleSlots, StepBatch
from nanoinfer.engines.buckets import Bucket, SubBatch, warm_buckets
from nanoinfer.engines.devices import free_memory
from nanoinfer.engines.graphs import CudaRecorder, Graphs, out_of_memory
from nanoinfer.engines.static_shapes import HEAD_TOKENS, StaticShapeEngine, StepOutput
from nanoinfer.models.transformer import Transformer

log = logging.getLogger("nanoinfer")


class CudaGraphEngine(StaticShapeEngine):
    """Captures steps of static shapes as CUDA graphs and replays them. Other arguments: see `StaticShapeEngine`.

    On a CPU, nothing is captured (for `compiled`, which runs there too).

    Args:
        config: graph_memory is used; None: an eighth of the memory that is free when the engine starts.
        recorder: records the graphs; None: CudaRecorder on a GPU.
    """

    def __init__(
        self,
        model: Transformer,
        limits: EngineLimits,
        config: EngineConfig = DEFAULTS,
        *,
        recorder: CudaRecorder | None = None,
    ) -> None:
        super().__init__(model, limits, config)
        graph_memory = config.graph_memory if config.graph_memory is not None else free_memory(str(self.device)) // 8
        if recorder is None and self.device.type == "cuda":
            recorder = CudaRecorder(self.device)
        self.graphs: Graphs[StepOutput] = Graphs(recorder, graph_memory)
        self._warm_memory = graph_memory // 2

    @torch.inference_mode()
    def warm_up(self, sample: SampleSlots) -> None:
        """Capture the decode steps that sample with `sample`, until half of graph_memory is used. No sequence changes.

        Steps of one row with several tokens run once: they compile kernels for the other alignments of their inputs.
        """
        start = time.perf_counter()
        several = (1 << i for i in range(1, HEAD_TOKENS.bit_length()))
        once = [Bucket(1, n, self._bucket_limits.context(n), dense=True) for n in several]
        decodes = warm_buckets(self._bucket_limits)
        for bucket in (*once, *decodes, *decodes):
            if self.graphs.num_bytes >= self._warm_memory:
                break
            try:
                self._run(SubBatch(bucket, [], []), StepBatch(), sample)  # all rows are padding
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                log.warning(
                    "steps of %d sequences do not fit in the device's memory: lower kv_cache_memory", bucket.rows
                )
                break
        log.info("captured %d CUDA graphs in %.1f s", len(self.graphs), time.perf_counter() - start)

    def _execute(self, key: tuple[Bucket, bool, bool], compute: Callable[[], StepOutput]) -> StepOutput:
        return self.graphs.run(key, compute)
