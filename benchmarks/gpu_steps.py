"""Estimate of a decode step on a GPU: the time of its bytes, and a time for each kernel that it runs.

    seconds = bytes / bandwidth + kernels x KERNEL_SEC

A step is a graph of kernels that follow one another. Each costs time in which little is read: it starts, waits for the
one before, fills the multiprocessors and empties them. With programmatic launches (`triton`) a part of that is hidden.
`seconds_per_kernel` reads this term off a measurement, so that the estimate says which of its terms was wrong.

KERNEL_SEC is an assumption: no GPU has been measured (docs/gpu-first-run.md). The numbers of kernels are counted by
tests/gpu/test_triton_step.py and tests/engines/test_static_shapes.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.config import ModelConfig
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import WeightFormat
from nanoinfer.roofline.report import predict

KERNEL_SEC = {"triton": 2.0e-6, "cuda_graph": 2.5e-6}
NUM_KERNELS = {
    ("triton", "gpt2"): (5, 4),
    ("triton", "llama"): (7, 11),
    ("triton", "qwen3"): (7, 11),
    ("triton, several sequences", "gpt2"): (7, 5),
    ("triton, several sequences", "llama"): (9, 12),
    ("triton, several sequences", "qwen3"): (9, 12),
    ("cuda_graph", "gpt2"): (12, 18),
    ("cuda_graph", "llama"): (18, 25),
    ("cuda_graph", "qwen3"): (20, 25),
}
"""Engine and family -> kernels of a layer, and others, in a step that samples on the device."""
FUSED_TOKENS = {"float32": 16, "bfloat16": 256, "float16": 256}
"""Weights -> sequences of the largest step of `triton` that runs its own products (kernels/triton/tiles.py). Others
always run them."""


@dataclass(frozen=True)
class GpuStep:
    """The terms of an estimate."""

    engine: str
    num_kernels: int
    bytes_sec: float
    """Seconds to read the bytes."""
    kernels_sec: float
    """Seconds for the kernels."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.bytes_sec + self.kernels_sec

    def seconds_per_kernel(self, measured_sec: float) -> float:
        """Return the time of a kernel that a measured step has beside its bytes; below 0, the bytes took less."""
        return (measured_sec - self.bytes_sec) / self.num_kernels


def estimate(engine: str, config: ModelConfig, fmt: WeightFormat, ceiling: Ceiling, B: int, N: int) -> GpuStep | None:
    """Return the estimate of a decode step; None for engines and families whose kernels are not counted.

    Args:
        engine: triton or cuda_graph.
        config, fmt: the model and its weights.
        ceiling: the GPU.
        B: sequences.
        N: tokens that the newest token of each sequence attends to.
    """
    if engine == "triton" and FUSED_TOKENS.get(fmt.name, B) < B:
        return None
    counted = NUM_KERNELS.get(("triton, several sequences" if engine == "triton" and B > 1 else engine, config.family))
    if counted is None:
        return None
    num_kernels = counted[0] * config.n_layer + counted[1]
    bytes_sec = predict(decode(config, fmt).model, ceiling, fmt, B, N).seconds
    return GpuStep(engine, num_kernels, bytes_sec, num_kernels * KERNEL_SEC[engine])
