"""The statistics of a benchmark: from arrival times of tokens to the figures that are reported.

No tensor library and no clock here: tests use plain numbers.

    a sequence's arrival times (seconds since the run began)   [0.50, 0.60, 0.70]
    ->  TTFT 0.50    token gaps [0.10, 0.10]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class RunTimes:
    """One timed run: when each token of each sequence arrived, in seconds since the run began."""

    num_prompt_tokens: int
    """Prompt tokens of all sequences together."""
    arrivals: list[list[float]]
    """For each sequence, the arrival time of each of its tokens; not empty."""
    waited_sec: float | None = None
    """Time that the threads of the backend's process waited for cores, in total; None: not known."""

    @property
    def ttft_sec(self) -> float:
        """Median time to first token over the sequences."""
        return statistics.median(times[0] for times in self.arrivals)

    @property
    def total_sec(self) -> float:
        """When the last token arrived."""
        return max(times[-1] for times in self.arrivals)

    @property
    def gaps_sec(self) -> list[float]:
        """Times between consecutive tokens of a sequence, all sequences pooled."""
        return [b - a for times in self.arrivals for a, b in pairwise(times)]

    @property
    def worst_gap_sec(self) -> float | None:
        """The longest time between consecutive tokens of a sequence."""
        return max(self.gaps_sec, default=None)

    @property
    def output_tokens_per_sec(self) -> float:
        """Tokens of all sequences by wall time, prefill included."""
        return sum(map(len, self.arrivals)) / self.total_sec

    @property
    def decode_tokens_per_sec(self) -> float | None:
        """Tokens per second of all sequences together while all of them decode; None if they never do.

        From the last sequence's first token to the first sequence's end: before, prompts of others share the steps;
        after, the batch is smaller.
        """
        start = max(times[0] for times in self.arrivals)
        end = min(times[-1] for times in self.arrivals)
        if end <= start:
            return None
        return sum(_tokens_by(times, end) - _tokens_by(times, start) for times in self.arrivals) / (end - start)

    @property
    def prefill_tokens_per_sec(self) -> float:
        """Prompt tokens per second until every sequence had its first token."""
        return self.num_prompt_tokens / max(times[0] for times in self.arrivals)


def _tokens_by(times: Sequence[float], now: float) -> float:
    """Return how many tokens had arrived, in fractions between two: _tokens_by([1.0, 2.0, 4.0], 3.0) -> 2.5.

    The sequences of a step arrive microseconds apart: whole tokens would count up to a step too much or too little.
    """
    import numpy as np  # here and below: `nanoinfer --help` imports this module

    return float(np.interp(now, times, range(1, len(times) + 1), left=0.0))


@dataclass(frozen=True)
class Figures:
    """The figures of a case: medians over its rounds of what `RunTimes` computes, and their spread."""

    rounds: int
    ttft_sec: float
    tpot_sec: float | None
    """Median time per output token; with p90 and p99 over all gaps of all rounds. None for one token."""
    tpot_p90_sec: float | None
    tpot_p99_sec: float | None
    decode_tokens_per_sec: float | None
    prefill_tokens_per_sec: float
    output_tokens_per_sec: float
    total_sec: float
    spread_percent: float
    """(max - min) / median of the rounds' total time."""
    worst_gap_sec: float | None = None


def summarize(runs: Sequence[RunTimes]) -> Figures:
    """Return the figures of a case's rounds, at least one."""
    import numpy as np

    gaps = [gap for run in runs for gap in run.gaps_sec]
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99)).tolist() if gaps else (None, None, None)
    medians: dict[str, Any] = {}
    rates = (f"{kind}_tokens_per_sec" for kind in ("decode", "prefill", "output"))
    for name in ("ttft_sec", "worst_gap_sec", *rates, "total_sec"):
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        medians[name] = statistics.median(values) if values else None
    totals = [run.total_sec for run in runs]
    spread = 100 * (max(totals) - min(totals)) / medians["total_sec"]
    return Figures(len(runs), tpot_sec=p50, tpot_p90_sec=p90, tpot_p99_sec=p99, spread_percent=spread, **medians)


def is_steady(seconds: Sequence[float], tolerance: float = 0.1) -> bool:
    """Return whether the last two of some warm-up times differ by at most `tolerance`: [3.0, 1.1, 1.0] -> True."""
    return len(seconds) >= 2 and abs(seconds[-1] - seconds[-2]) <= tolerance * seconds[-2]


def naive_token_times(
    step_sec: Callable[[int], float], prompt_tokens: int, output_tokens: int, block_size: int, num_lengths: int
) -> list[float]:
    """Return the time of each token of a generation without a cache, from measurements at a few lengths.

    The token after p tokens takes step_sec(p), the time to first token of a prompt of p tokens. It is measured at
    num_lengths lengths, and linear between them; beyond block_size, to which contexts are cropped, it is constant.
    """
    import numpy as np

    lengths = [min(prompt_tokens + i, block_size) for i in range(output_tokens)]
    first, last = lengths[0], lengths[-1]
    measured = sorted({round(n) for n in np.linspace(first, last, min(num_lengths, last - first + 1))})
    return [float(sec) for sec in np.interp(lengths, measured, [step_sec(n) for n in measured])]
