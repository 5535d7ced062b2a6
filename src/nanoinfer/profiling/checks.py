"""Checks of an engine by its steps: the cost of verifying several tokens, and the distance of its logits from float32.

    ratio = time of extend by 5 tokens, logits after each / time of extend by 1 token

is the cost of speculation on an engine. Weights are read once in either step, so the ratio is near 1 where reading them
takes most of a step. Both steps start from the same sequence length, alternate, and end when the logits are ready;
their tokens are truncated again.

Logits in reduced precision are compared after the same tokens. The limits are several times the Kullback-Leibler
divergence in docs/quality.md (`shakespeare`, in nats per token: bfloat16 0.00001, int8 of `triton` 0.00004, its int4
0.007), which random:gpt2 has too (0.00002, 0.00009, 0.011). Random logits of another context differ by 0.3.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.arrays import to_numpy
from nanoinfer.utils.checks import require_int

VERIFY_TOKENS = 5
ROUNDS = 20
WARM_UPS = 4  # of each step: code is compiled and graphs are captured at the first step of a length
NUM_SEQUENCES = 2  # whose logits are compared; the whole batch runs
NUM_STEPS = 4  # the second step of a shape is captured, and the later ones are replayed
MAX_NATS = {"bfloat16": 0.001, "float16": 0.001, "int8": 0.002, "int4": 0.05}


def verify_ratio(
    engine: Engine, token_ids: list[int], device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median time of a step of VERIFY_TOKENS over that of a step of one token, after `token_ids`.

    Raises NanoinferError if the sequence is shorter than VERIFY_TOKENS, or the clock does not advance.
    """
    require_int("prompt_tokens", len(token_ids), VERIFY_TOKENS)
    handle = engine.open()

    def extend(tokens: list[int], num_logits: int) -> float:
        start = clock()
        engine.extend(StepBatch([handle], list(tokens), [len(tokens)], [num_logits]))
        synchronize(device)
        return clock() - start

    seconds: dict[int, list[float]] = {1: [], VERIFY_TOKENS: []}
    try:
        extend(token_ids, 0)
        for _ in range(WARM_UPS + ROUNDS):
            for n, times in seconds.items():
                times.append(extend(token_ids[:n], n))
                engine.truncate(handle, len(token_ids))
    finally:
        engine.close(handle)
    one, several = (statistics.median(times[WARM_UPS:]) for times in seconds.values())
    if one <= 0:
        raise NanoinferError(f"a decode step took {one} s by the clock: verifying cannot be compared with it")
    return several / one


def synchronize(device: str) -> None:
    """Wait until a device has finished all work that was launched; a CPU has none."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def decode_logits(engine: Engine, prompts: list[list[int]]) -> NDArray[np.float64]:
    """Return logits at the last NUM_STEPS tokens of the first prompts, decoded with all: (n, NUM_STEPS, V)."""
    handles = [engine.open() for _ in prompts]
    logits_of_steps = []
    try:
        for handle, prompt in zip(handles, prompts, strict=True):
            engine.extend(StepBatch([handle], prompt[:-NUM_STEPS], [len(prompt) - NUM_STEPS], [0]))
        for i in range(-NUM_STEPS, 0):
            ones = [1] * len(prompts)
            logits = engine.extend(StepBatch(handles, [prompt[i] for prompt in prompts], ones, ones))
            logits_of_steps.append(np.array(to_numpy(logits[:NUM_SEQUENCES]), np.float64))  # a copy: steps overwrite it
    finally:
        for handle in handles:
            engine.close(handle)
    return np.stack(logits_of_steps, axis=1)


def require_close(logits: NDArray[np.float64], expected: NDArray[np.float64], format: str) -> None:
    """Raise NanoinferError if the mean divergence from the expected logits exceeds the limit of a weight format."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (expected[: len(logits)], logits))
    nats = float((np.exp(p) * (p - q)).sum(-1).mean())
    if not nats <= MAX_NATS[format]:  # or not a number
        raise NanoinferError(
            f"not timed: its logits differ from float32's by {nats:.2g} nats per token, the limit is {MAX_NATS[format]}"
        )
