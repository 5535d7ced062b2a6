"""The work of one step: which tokens of which sequences it processes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanoinfer.scheduling.sequence import Sequence

MIN_PREFILL = 16
"""Prompt tokens that a step may always process, so that prompts progress on every machine."""
MAX_SCORED = 128
"""Positions of a step whose logits are read for scores: 26 MB with GPT-2's vocabulary."""


@dataclass(slots=True)  # not frozen, which would make creating one three times slower
class ScheduledSequence:
    """One sequence's part of one step."""

    sequence: Sequence
    token_ids: list[int]
    """Tokens to process."""
    samples: bool
    """Whether to sample a token: no uncached tokens are left after these."""
    forks: Seq[Sequence] = ()
    """Siblings to fork from this sequence, which sample from the same logits."""
    pending: bool = False
    """Whether one more token follows token_ids: the in-flight token that the previous step sampled."""
    num_scored: int = 0
    """Number of logits that are read: after the last of these tokens, or before the one that is sampled from."""


class PrefillLimit:
    """How many prompt tokens a step may process while streamed requests decode: what fits into a target time.

    The time of a step with p prompt tokens is about b + c * p: b for the sequences that decode, c for one token. Both
    are unknown, and change with the batch and the context. After a step with p tokens in t seconds, the limit becomes
    p * target / t. Repeated, this approaches the p whose step takes the target time, if b is below the target.

    The limit begins small and changes by at most a factor of 2 a step, so that one slow step (a page fault, another
    process, a capture) and one fast step (a short context) change little. Steps with fewer than MIN_PREFILL prompt
    tokens do not change it, and neither do failed and interrupted steps, which the core does not report.

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


class StepBudget:
    """What is left of a step: tokens of prefills, and positions whose logits are read."""

    def __init__(self, num_prefill: int) -> None:
        self.num_prefill, self.num_scored = num_prefill, MAX_SCORED

    def fit(self, s: Sequence, uncached: int) -> int:
        """Return how many of a sequence's uncached tokens the step can process."""
        count = min(uncached, self.num_prefill) if uncached > 1 else 1
        if (reads := s.request.prompt_reads) is not None and reads.num_unread > self.num_scored:
            count = min(count, max(0, reads.next - s.num_cached) + self.num_scored)
        return count

    def take(self, s: Sequence, count: int, uncached: int) -> None:
        """Subtract `count` tokens of a sequence, before they are counted as cached."""
        if uncached > 1:
            self.num_prefill -= count
        if (reads := s.request.prompt_reads) is not None:
            self.num_scored -= reads.num_read(s.num_cached + count)


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made. Metrics read a copy (`Core.published`)."""

    num_prompt_tokens: int = 0
    """Tokens of admitted prompts."""
    num_shared_tokens: int = 0
    """Tokens of admitted prompts that were in the KV cache already."""
    num_output_tokens: int = 0
    """Tokens that were generated."""
    num_preempted: int = 0
    """Number of times that a sequence was preempted."""
    num_running: int = 0
    """Requests of which a sequence runs; set in copies."""
    num_free_blocks: int = 0
    """Blocks of the KV cache that no sequence used after the last operation of the core."""


def num_prefill(work: Seq[ScheduledSequence]) -> int:
    """Return the number of tokens of prompts and of windows that slid."""
    return sum([num for w in work if (num := len(w.token_ids)) > 1])


def sampling_sequences(work: Seq[ScheduledSequence]) -> list[Sequence]:
    """Return the sequences that sample a token, in the order of the logits' rows: each followed by its forks."""
    return [s for w in work if w.samples for s in ((w.sequence, *w.forks) if w.forks else (w.sequence,))]
