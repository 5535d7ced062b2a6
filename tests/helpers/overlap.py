"""A core with overlap scheduling, and a sampler on the device, where there is no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.engines import V
from helpers.models import make_limits
from helpers.recorded import FakeRecorder
from nanoinfer.config import EngineConfig, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.core.overlap import OverlapScheduler
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.static_shapes import StaticShapeEngine
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.rng import uniform
from nanoinfer.sampling.sampler import SamplerRow, sample
from nanoinfer.scheduling.scheduler import Scheduler


class TorchSampler:
    """Greedy, or the inverse transform at a temperature, in operations of torch alone: a slot is a row of tensors."""

    num_slots = 4
    most = 200

    def __init__(self) -> None:
        self.temperature = torch.zeros(self.num_slots, dtype=torch.float64)
        self.position = torch.zeros(self.num_slots, dtype=torch.int64)
        self.uniforms = torch.zeros(self.num_slots, self.most, dtype=torch.float64)
        self.num_assigned = 0

    def covers(self, row: SamplerRow) -> str | None:
        return "logit_bias" if row.params.logit_bias else None

    def assign(self, slot: int, row: SamplerRow) -> None:
        self.num_assigned += 1
        self.temperature[slot] = row.params.temperature
        self.position[slot] = row.num_output_tokens
        u = [uniform(seed=row.seed, sample=row.sample_index, position=i) for i in range(self.most)]
        self.uniforms[slot] = torch.tensor(u, dtype=torch.float64)

    def sample_slots(self, logits: Tensor, slots: Tensor, wanted: Tensor, last: Tensor, owners: Tensor) -> Tensor:
        largest = logits.max(-1, keepdim=True)
        t = self.temperature[slots][:, None]
        weights = ((logits.double() - largest.values) / t.masked_fill(t == 0, 1.0)).exp()
        u = self.uniforms[slots, self.position[slots].clamp(max=self.most - 1)][:, None]
        running = weights.cumsum(-1)
        chosen = (running > u * running[:, -1:]).byte().argmax(-1)
        drawn = torch.where(t[:, 0] > 0, chosen, largest.indices[:, 0])
        self.position.index_add_(0, slots, wanted)
        tokens = drawn.masked_fill(~largest.values[:, 0].isfinite(), -1)
        last[owners.masked_fill(wanted == 0, len(last) - 1)] = tokens.clamp(min=0)
        return tokens


def make_core(
    gpt: Transformer,
    *,
    recorded: bool = True,
    overlap: bool = True,
    chunk: int = 2048,
    target_step_ms: int | None = None,
    **options: Any,
) -> Core:
    limits = make_limits(gpt.config, 4)
    recorder = FakeRecorder()
    engine: StaticShapeEngine = (
        CudaGraphEngine(gpt, limits, EngineConfig(graph_memory=2**30, **options), recorder=recorder)
        if recorded
        else StaticShapeEngine(gpt, limits, EngineConfig(**options))
    )
    return Core(
        engine,
        Scheduler(engine, SchedulerConfig(chunk, target_step_ms=target_step_ms)),
        sample,
        None,
        V,
        overlap=OverlapScheduler(engine, TorchSampler()) if overlap else None,
    )
