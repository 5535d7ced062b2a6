"""Duration of an engine's step as a function of its number of tokens: measured at the start, corrected by every step.

An additional token adds little time while a step is memory-bound, and its full share of the arithmetic when it is
compute-bound. The transition depends on engine, weight format, threads and machine, so it is measured.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanoinfer.engines.base import Engine, StepBatch

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_LOGITS = 1 << 30
ALWAYS = 8  # sizes up to this are measured at least once, even beyond the budget
RUNS = 9
DEVICE_WARM_UPS = 2
"""Unmeasured runs of each size on a GPU: the first compiles kernels, the second captures them."""
BUDGET_SEC = 1.0
LEVEL_RATE = 0.25  # learning rate of the level, which scales all sizes
PROPOSING_RATE = 0.1  # learning rate of the ratio of steps with proposals to plain ones
MAX_LOG_ERROR = 0.7  # limit of an error: a step that took more than twice the expected time was disturbed


class StepTimes:
    """Seconds of a step of n tokens: linear between the measured sizes, proportional to n beyond them.

    StepTimes({1: 0.010, 4: 0.013})(2)  ->  0.011
    """

    def __init__(self, measured: dict[int, float]) -> None:
        self.sizes = sorted(measured)
        # Make the times monotonic: a larger step that measures faster is noise.
        self._sec = [max(measured[m] for m in self.sizes if m <= n) for n in self.sizes]

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens` tokens, >= 1."""
        sizes, sec = self.sizes, self._sec
        if num_tokens >= sizes[-1]:
            return sec[-1] * num_tokens / sizes[-1]
        i = bisect_left(sizes, num_tokens)
        if sizes[i] == num_tokens or i == 0:
            return sec[i]
        share = (num_tokens - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return sec[i - 1] + share * (sec[i] - sec[i - 1])


class DecayedRatio:
    """Ratio of actual to expected duration: a decayed mean of its logarithm."""

    ratio = 1.0
    """Actual over expected seconds."""

    def __init__(self, rate: float = 0.2) -> None:
        self._rate, self._log, self._num = rate, 0.0, 0

    def learn(self, ratio: float) -> None:
        """Add a ratio. The difference from the mean is clipped to limit the effect of one disturbed step."""
        self._num += 1
        error = max(-MAX_LOG_ERROR, min(math.log(ratio) - self._log, MAX_LOG_ERROR))
        self._log += error * max(self._rate, 1 / self._num)
        self.ratio = math.exp(self._log)


class StepCosts:
    """Current estimate of a step's seconds: StepTimes x the level of the machine x, with proposals, their ratio.

    Every step moves the level. The ratio of steps with proposals to plain ones moves only when two steps of different
    kinds follow each other; otherwise a machine that slows down while all steps propose would make proposals seem
    expensive.

    Args:
        times: measured at the start.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.level, self._proposing = DecayedRatio(LEVEL_RATE), DecayedRatio(PROPOSING_RATE)
        self._last: tuple[bool, float] | None = None
        """Of the last step: whether it had proposals, and its duration over the measured one."""

    def __call__(self, num_seqs: int, num_tokens: int) -> float:
        """Return the seconds of a step of `num_seqs` sequences with `num_tokens` tokens in total."""
        sec = self._times(num_seqs)
        if num_tokens > num_seqs:  # a step with more tokens is never estimated faster
            sec = max(sec, self._times(num_tokens) * self._proposing.ratio)
        return sec * self.level.ratio

    def learn(self, num_seqs: int, num_tokens: int, sec: float) -> None:
        """Update level and ratio with a step's duration."""
        proposes, ratio = num_tokens > num_seqs, sec / self._times(num_tokens)
        if self._last is not None and self._last[0] != proposes:
            self._proposing.learn(ratio / self._last[1] if proposes else self._last[1] / ratio)
        self._last = proposes, ratio
        self.level.learn(ratio / self._proposing.ratio if proposes else ratio)


def measure_steps(
    engine: Engine,
    max_tokens: int,
    *,
    sizes: Sequence[int] = SIZES,
    max_logits: int = MAX_LOGITS,
    clock: Callable[[], float] = time.perf_counter,
    budget_sec: float = BUDGET_SEC,
) -> StepTimes:
    """Return the seconds of an engine's steps, with logits for every token or `max_logits`: the median over rounds.

    Each round runs all sizes, so that a change in the machine's speed affects all of them.

    Args:
        engine: with room for one more sequence, which is closed afterwards.
        max_tokens: largest step to measure; the context length is a limit too.
        sizes: numbers of tokens of the steps to measure, ascending.
        max_logits: rows of logits of a step, at most.
        clock: seconds.
        budget_sec: time after which only the first run of each small size (ALWAYS) is done. Warm-up on a GPU does not
            count.
    """
    limit = min(max_tokens, engine.limits.block_size)
    sizes = [n for n in sizes if n <= limit] or [sizes[0]]
    handle = engine.open()

    def timed(n: int) -> tuple[float, bool]:
        previous = np.zeros((n, engine.config.n_embd), np.float32) if engine.config.mtp else None
        batch = StepBatch(previous=previous)
        batch.add(handle, [0] * n, num_logits=min(n, max_logits))
        start = clock()
        on_device = _wait(engine.extend(batch))
        sec = clock() - start
        engine.truncate(handle, 0)
        return sec, on_device

    runs: dict[int, list[float]] = {}
    try:
        _, on_device = timed(sizes[0])
        for n in sizes if on_device else ():
            for _ in range(DEVICE_WARM_UPS):
                timed(n)
        started = clock()
        for n in [n for _ in range(RUNS) for n in sizes]:
            if (n > ALWAYS or n in runs) and clock() - started > budget_sec:
                break
            runs.setdefault(n, []).append(timed(n)[0])
    finally:
        engine.close(handle)
    return StepTimes({n: float(np.median(sec)) for n, sec in runs.items()})


def _wait(logits: Any) -> bool:
    """Wait until a GPU has computed the logits; return whether they are on a GPU."""
    if not getattr(logits, "is_cuda", False):
        return False
    import torch

    torch.cuda.synchronize(logits.device)
    return True
