"""Logits of our engines after given tokens, compared with those in float32: the check of rows in reduced precision.

The limits are several times the Kullback-Leibler divergence in docs/quality.md (`shakespeare`, in nats per token:
bfloat16 0.00001, int8 of `triton` 0.00004, its int4 0.007), which random:gpt2 has too (0.00002, 0.00009, 0.011).
Random logits of another context differ by 0.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.arrays import to_numpy

NUM_SEQUENCES = 2  # whose logits are compared; the whole batch runs
NUM_STEPS = 4  # the second step of a shape is captured, and the later ones are replayed
MAX_NATS = {"bfloat16": 0.001, "float16": 0.001, "int8": 0.002, "int4": 0.05}


def decode_logits(engine: Engine, prompts: list[list[int]]) -> NDArray[np.float64]:
    """Return logits at the last NUM_STEPS tokens of the first prompts, decoded with all: (n, NUM_STEPS, V)."""
    handles = [engine.open() for _ in prompts]
    found = []
    try:
        for handle, prompt in zip(handles, prompts, strict=True):
            engine.extend(StepBatch([handle], prompt[:-NUM_STEPS], [len(prompt) - NUM_STEPS], [0]))
        for i in range(-NUM_STEPS, 0):
            ones = [1] * len(prompts)
            logits = engine.extend(StepBatch(handles, [prompt[i] for prompt in prompts], ones, ones))
            found.append(np.array(to_numpy(logits[:NUM_SEQUENCES]), np.float64))  # a copy: steps overwrite it
    finally:
        for handle in handles:
            engine.close(handle)
    return np.stack(found, axis=1)


def require_close(logits: NDArray[np.float64], expected: NDArray[np.float64], format: str) -> None:
    """Raise NanoinferError if the mean divergence from the expected logits exceeds the limit of a weight format."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (expected[: len(logits)], logits))
    nats = float((np.exp(p) * (p - q)).sum(-1).mean())
    if not nats <= MAX_NATS[format]:  # or not a number
        raise NanoinferError(
            f"not timed: its logits differ from float32's by {nats:.2g} nats per token, the limit is {MAX_NATS[format]}"
        )
