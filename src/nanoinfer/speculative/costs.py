"""What a step costs by the number of tokens in it: measured once at the start, before anything is speculated.

One token more in a step costs little as long as memory decides, and a whole token where arithmetic does. Where the
one turns into the other depends on engine, format, threads and machine, so it is measured and not assumed.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import cast

from nanoinfer.engines.base import Engine, StepBatch

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
RUNS = 3
DEVICE_WARM_UPS = 2
"""Runs of a size that say nothing on a GPU: in the first kernels are compiled or planned, in the second captured."""
BUDGET_SEC = 1.0


class StepTimes:
    """Seconds of a step of n tokens: linear between the sizes measured, a constant price a token beyond them.

    StepTimes({1: 0.010, 4: 0.013})(2)  ->  0.011
    """

    def __init__(self, measured: dict[int, float]) -> None:
        self._sizes = sorted(measured)
        # More tokens never cost less: what says so is noise.
        self._sec = [max(measured[m] for m in self._sizes if m <= n) for n in self._sizes]

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens` tokens, >= 1."""
        sizes, sec = self._sizes, self._sec
        if num_tokens >= sizes[-1]:
            return sec[-1] * num_tokens / sizes[-1]
        i = bisect_left(sizes, num_tokens)
        if sizes[i] == num_tokens or i == 0:
            return sec[i]
        share = (num_tokens - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return sec[i - 1] + share * (sec[i] - sec[i - 1])


def measure_steps(
    engine: Engine, max_tokens: int, *, clock: Callable[[], float] = time.perf_counter, budget_sec: float = BUDGET_SEC
) -> StepTimes:
    """Return what steps of an engine cost: logits for every token, the median of three runs of each size.

    Args:
        engine: with room for one more sequence, which is closed again.
        max_tokens: largest step of interest; fewer when the context or the time runs out.
        clock: seconds.
        budget_sec: no larger size is begun after this; what a GPU needs to warm up does not count.
    """
    handle = engine.open()
    measured: dict[int, float] = {}
    started, warming_sec = clock(), 0.0
    try:
        for n in SIZES:
            spent = clock() - started - warming_sec
            if measured and (n > min(max_tokens, engine.limits.block_size) or spent > budget_sec):
                break
            runs: list[float] = []
            warm_ups = int(n == 1)  # the very first one
            while len(runs) < warm_ups + RUNS:
                batch = StepBatch()
                batch.add(handle, [0] * n, num_logits=n)
                before = clock()
                if _wait(engine.extend(batch)):
                    warm_ups = DEVICE_WARM_UPS
                runs.append(clock() - before)
                engine.truncate(handle, 0)
            warming_sec += sum(runs[:warm_ups]) if warm_ups == DEVICE_WARM_UPS else 0.0
            measured[n] = statistics.median(runs[-RUNS:])
    finally:
        engine.close(handle)
    return StepTimes(measured)


def _wait(logits: object) -> bool:
    """Return when a device has computed what was asked of it; whether there is one."""
    if not getattr(logits, "is_cuda", False):
        return False
    import torch

    torch.cuda.synchronize(cast(torch.Tensor, logits).device)
    return True
