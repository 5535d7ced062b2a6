"""What a step of an engine costs by the number of tokens in it: measured at the start, corrected by every step.

One more token in a step costs little as long as memory bandwidth is the limit, and a whole token's share where
arithmetic is. Where one turns into the other depends on engine, format, threads and machine, so it is measured.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from nanoinfer.engines.base import Engine, StepBatch

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALWAYS = 8  # sizes up to this are measured at least once
RUNS = 9
DEVICE_WARM_UPS = 2
"""Runs of a size that are not measured on a GPU: kernels are compiled in the first and captured in the second."""
BUDGET_SEC = 1.0
LEVEL_RATE = 0.25  # share of a step's deviation that moves the level of all sizes
CELL_RATE = 0.05  # share of the deviation between two steps of different sizes that moves their ratio
SHARE = 0.2  # share by which the corrections of neighbouring sizes follow one that is learned
FIRST_STEPS = 8  # weight of the measurement at the start, in steps
MAX_LOG_ERROR = 0.7  # a step that took more than twice the expected time was disturbed


class StepTimes:
    """Seconds of a step of n tokens: linear between the sizes measured, a constant price per token beyond them.

    StepTimes({1: 0.010, 4: 0.013})(2)  ->  0.011
    """

    def __init__(self, measured: dict[int, float]) -> None:
        self.sizes = sorted(measured)
        # More tokens never cost less: a measurement that shows it is noise.
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
    """By what factor something takes longer than was measured at the start."""

    log_ratio: float = 0.0
    num_updates: int = 0

    @property
    def ratio(self) -> float:
        """Return actual over expected seconds."""
        return math.exp(self.log_ratio)

    def move(self, log_error: float, rate: float) -> None:
        """Move by a share of an error, which is clipped: one disturbed step says nothing about the next."""
        self.log_ratio += rate * max(-MAX_LOG_ERROR, min(log_error, MAX_LOG_ERROR))
        self.num_updates += 1


class StepCosts:
    """Seconds of a step, kept current: StepTimes x a level of the whole machine x a correction for each kind of step.

    Every step moves the level. The corrections move only when two steps of different kinds follow one another, so
    that a machine that becomes slower while all steps are of one kind does not make that kind look expensive. Kinds
    that are not chosen follow their neighbours, so that a wrong measurement does not exclude them for ever.

    Args:
        times: measured at the start.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.level = LatencyCorrection()
        self._cells: dict[int, dict[int, LatencyCorrection]] = {}
        """Bucket of batch sizes -> tokens per sequence -> correction."""
        self._last: tuple[LatencyCorrection, float] | None = None
        """Correction of the last step, and the logarithm of the level that it showed."""

    def __call__(self, num_seqs: int, num_tokens: int) -> float:
        """Return the seconds of a step of `num_seqs` sequences with `num_tokens` tokens in total."""
        sec = self._unlevelled(num_seqs, num_tokens)
        if num_tokens > num_seqs:  # more tokens never cost less
            sec = max(sec, self._unlevelled(num_seqs, num_seqs))
        return sec * self.level.ratio

    def plain(self, num_seqs: int) -> LatencyCorrection | None:
        """Return the correction of plain steps of about as many sequences; None before the first of them."""
        return self._cells.get(num_seqs.bit_length(), {}).get(1)

    def learn(self, num_seqs: int, num_tokens: int, sec: float) -> None:
        """Take a step's time into account."""
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
    """Return the logarithm of the correction for the nearest kind of step that was timed; 0.0 without any."""
    return row[min(row, key=lambda other: abs(other - per_seq))].log_ratio if row else 0.0


def measure_steps(
    engine: Engine,
    max_tokens: int,
    *,
    sizes: Sequence[int] = SIZES,
    clock: Callable[[], float] = time.perf_counter,
    budget_sec: float = BUDGET_SEC,
) -> StepTimes:
    """Return what steps of an engine cost: logits for every token, the median over rounds of all sizes.

    All sizes are run in turn, then all again: a machine that becomes slower in between changes all of them.

    Args:
        engine: with room for one more sequence, which is closed again.
        max_tokens: largest step of interest; the context length limits it too.
        sizes: number of tokens of the steps to measure, ascending.
        clock: seconds.
        budget_sec: after this no step is run except one of each small size. A GPU's warm-up does not count.
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


def _wait(logits: object) -> bool:
    """Return when a device has computed what was asked of it; whether there is one."""
    if not getattr(logits, "is_cuda", False):
        return False
    import torch

    torch.cuda.synchronize(cast(torch.Tensor, logits).device)
    return True
