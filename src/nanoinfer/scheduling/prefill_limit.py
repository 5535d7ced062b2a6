"""How many prompt tokens a step may process while streamed requests decode: what fits into a target time.

The time of a step with p prompt tokens is about b + c * p: b for the sequences that decode, c for one token. Both are
unknown, and change with the batch and the context. After a step with p tokens in t seconds, the limit becomes
p * target / t. Repeated, this approaches the p whose step takes the target time, if b is below the target.

The limit begins small and changes by at most a factor of 2 a step, so that one slow step (a page fault, another
process, a capture) and one fast step (a short context) change little. Steps with fewer than MIN_PREFILL prompt tokens
do not change it, and neither do failed and interrupted steps, which the core does not report.
"""

from __future__ import annotations

MIN_PREFILL = 16
"""Prompt tokens that a step may always process, so that prompts progress on every machine."""


class PrefillLimit:
    """The limit of prompt tokens beside sequences that decode, from the times of past steps.

    Args:
        target_ms: time of a step in milliseconds; None or 0: no limit.
    """

    def __init__(self, target_ms: int | None) -> None:
        self._target_sec = (target_ms or 0) / 1000
        self._limit = MIN_PREFILL

    def apply(self, num_prefill: int) -> int:
        """Return the prompt tokens, `num_prefill` at most, that the next step may process."""
        return min(num_prefill, self._limit) if self._target_sec else num_prefill

    def note(self, num_prefill: int, step_sec: float) -> None:
        """Note the prompt tokens of a step that has ended, and its time in seconds."""
        if num_prefill < MIN_PREFILL:
            return
        fits = int(num_prefill * self._target_sec / max(step_sec, 1e-6))
        if step_sec <= self._target_sec:  # fewer tokens than the limit fitted: more of them were not tried
            fits = max(fits, self._limit)
        self._limit = max(MIN_PREFILL, self._limit // 2, min(fits, 2 * self._limit))
