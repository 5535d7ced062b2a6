"""Duration of an engine's step as a function of its number of tokens: measured at the start, corrected by every step.

An additional token adds little time while a step is memory-bound, and its full share of the arithmetic when it is
compute-bound. The transition depends on engine, weight format, threads and machine, so it is measured.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.engines.base import Engine, StepBatch

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALWAYS = 8  # sizes up to this are measured at least once, even beyond the budget
RUNS = 9
DEVICE_WARM_UPS = 2
"""Unmeasured runs of each size on a GPU: the first compiles kernels, the second captures them."""
BUDGET_SEC = 1.0
LEVEL_RATE = 0.25  # learning rate of the level, which scales all sizes
CELL_RATE = 0.05  # learning rate of the ratio between two kinds of steps
SHARE = 0.2  # share of a correction's difference by which neighbouring kinds of steps follow it
FIRST_STEPS = 8  # weight of the measurement at the start, in steps
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


@dataclass
class LatencyCorrection:
    """Ratio of actual to expected duration, learned from steps."""

    log_ratio: float = 0.0
    num_updates: int = 0

    @property
    def ratio(self) -> float:
        """Actual over expected seconds."""
        return math.exp(self.log_ratio)

    def move(self, log_error: float, rate: float) -> None:
        """Move by `rate` times an error. The error is clipped to limit the effect of one disturbed step."""
        self.log_ratio += rate * max(-MAX_LOG_ERROR, min(log_error, MAX_LOG_ERROR))
        self.num_updates += 1


class StepCosts:
    """Current estimate of a step's seconds: StepTimes x a level of the machine x a correction for each kind of step.

    A kind of step is a range of batch sizes and a number of tokens per sequence. Every step moves the level. The
    corrections move only when two steps of different kinds follow each other; otherwise a machine that slows down
    during steps of one kind would make that kind seem expensive. Kinds that are not chosen follow their neighbours, so
    that a wrong measurement does not exclude them permanently.

    Args:
        times: measured at the start.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.level = LatencyCorrection()
        self._cells: dict[int, dict[int, LatencyCorrection]] = {}
        """Bucket of batch sizes -> tokens per sequence -> correction."""
        self._last: tuple[LatencyCorrection, float] | None = None
        """Correction of the last step, and the logarithm of the level that its duration implies."""

    def __call__(self, num_seqs: int, num_tokens: int) -> float:
        """Return the seconds of a step of `num_seqs` sequences with `num_tokens` tokens in total."""
        sec = self._unlevelled(num_seqs, num_tokens)
        if num_tokens > num_seqs:  # a step with more tokens is never estimated faster
            sec = max(sec, self._unlevelled(num_seqs, num_seqs))
        return sec * self.level.ratio

    def plain(self, num_seqs: int) -> LatencyCorrection | None:
        """Return the correction of plain steps of about `num_seqs` sequences; None before the first such step."""
        return self._cells.get(num_seqs.bit_length(), {}).get(1)

    def learn(self, num_seqs: int, num_tokens: int, sec: float) -> None:
        """Update level and corrections with a step's duration."""
        showed = math.log(sec / self._unlevelled(num_seqs, num_tokens))
        row, per_seq = self._cells.setdefault(num_seqs.bit_length(), {}), round(num_tokens / num_seqs)
        if per_seq not in row:
            row[per_seq] = LatencyCorrection(_nearest(row, per_seq))
        cell = row[per_seq]
        if self._last is not None and self._last[0] is not cell:
            before, showed_before = self._last
            for one, log_error in ((cell, showed - showed_before), (before, showed_before - showed)):
                one.move(log_error, max(CELL_RATE, 1 / (FIRST_STEPS + one.num_updates)))
            for other, neighbour in row.items():
                if other != per_seq and min(other, per_seq) > 1:
                    neighbour.log_ratio += SHARE * (cell.log_ratio - neighbour.log_ratio) / abs(other - per_seq)
        self._last = cell, showed
        self.level.move(showed - self.level.log_ratio, LEVEL_RATE)

    def _unlevelled(self, num_seqs: int, num_tokens: int) -> float:
        row, per_seq = self._cells.get(num_seqs.bit_length(), {}), round(num_tokens / num_seqs)
        cell = row.get(per_seq)
        return self._times(num_tokens) * math.exp(cell.log_ratio if cell is not None else _nearest(row, per_seq))


def _nearest(row: dict[int, LatencyCorrection], per_seq: int) -> float:
    """Return the logarithm of the correction of the nearest kind of step that was timed, or 0.0 if there is none."""
    return row[min(row, key=lambda other: abs(other - per_seq))].log_ratio if row else 0.0


def measure_steps(
    engine: Engine,
    max_tokens: int,
    *,
    sizes: Sequence[int] = SIZES,
    clock: Callable[[], float] = time.perf_counter,
    budget_sec: float = BUDGET_SEC,
) -> StepTimes:
    """Return the seconds of an engine's steps, with logits for every token: the median over rounds.

    Each round runs all sizes, so that a change in the machine's speed affects all of them.

    Args:
        engine: with room for one more sequence, which is closed afterwards.
        max_tokens: largest step to measure; the context length is a limit too.
        sizes: numbers of tokens of the steps to measure, ascending.
        clock: seconds.
        budget_sec: time after which only the first run of each small size (ALWAYS) is done. Warm-up on a GPU does not
            count.
    """
    most = min(max_tokens, engine.limits.block_size)
    sizes = [n for n in sizes if n <= most] or [sizes[0]]
    handle = engine.open()

    def timed(n: int) -> tuple[float, bool]:
        batch = StepBatch()
        batch.add(handle, [0] * n, num_logits=n)
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
    return StepTimes({n: statistics.median(sec) for n, sec in runs.items()})


def _wait(logits: Any) -> bool:
    """Wait until a GPU has computed the logits; return whether they are on a GPU."""
    if not getattr(logits, "is_cuda", False):
        return False
    import torch

    torch.cuda.synchronize(logits.device)
    return True
