"""The time of verifying several tokens in one step, in decode steps: the cost of speculation on an engine.

    ratio = time of extend by 5 tokens, logits after each / time of extend by 1 token

Weights are read once in either step, so the ratio is near 1 where reading them takes most of a step. Both steps start
from the same sequence length, alternate, and end when the logits are ready; their tokens are truncated again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import require_int

VERIFY_TOKENS = 5
ROUNDS = 20
WARM_UPS = 4  # of each step: code is compiled and graphs are captured at the first step of a length


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
