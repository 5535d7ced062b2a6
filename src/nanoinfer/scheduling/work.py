"""The work of one step: which tokens of which sequences it processes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nanoinfer.scheduling.sequence import Sequence


@dataclass(slots=True)  # not frozen, which would make creating one three times slower
class ScheduledSequence:
    """One sequence's part of one step."""

    sequence: Sequence
    token_ids: list[int]
    """Tokens to process."""
    draws: bool
    """Whether to sample a token: no uncached tokens are left after these."""
    forks: list[Sequence] = field(default_factory=list)
    """Siblings to fork from this sequence, which sample from the same logits."""
    pending: bool = False
    """Whether one more token follows token_ids: the in-flight token that the previous step sampled."""
    num_scored: int = 0
    """Number of logits that are read, after the last of these tokens; no token is sampled then."""


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made."""

    num_prompt_tokens: int = 0
    """Tokens of admitted prompts."""
    num_shared_tokens: int = 0
    """Tokens of admitted prompts that were in the KV cache already."""
    num_output_tokens: int = 0
    """Tokens that were generated."""
    num_preempted: int = 0
    """Number of times that a sequence was preempted."""


class StepWork(list[ScheduledSequence]):
    """The work of one step, in the order of the batch. A step that repeats it has the same object (repeat.py)."""

    is_repeated = False
    """Whether it was the work of the step before, with other tokens."""
    _sequences: list[Sequence] | None = None  # no cached_property: all instances share its lock before Python 3.12

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that sample a token, as `drawing` returns them."""
        if self._sequences is None:
            self._sequences = drawing([*self])
        return self._sequences


def drawing(work: Seq[ScheduledSequence]) -> list[Sequence]:
    """Return the sequences that sample a token, in the order of the logits' rows: each followed by its forks."""
    if isinstance(work, StepWork):
        return work.sequences
    return [s for w in work if w.draws for s in ((w.sequence, *w.forks) if w.forks else (w.sequence,))]


def mark_scheduled(work: StepWork, now: float) -> None:
    """Note the time of the first step of each request."""
    if work.is_repeated:
        return
    for w in work:
        w.sequence.request.scheduled_sec = w.sequence.request.scheduled_sec or now


def mark_in_flight(work: StepWork) -> None:
    """Count the sampled tokens of this work as in flight, until they are read and passed to `Scheduler.postprocess`."""
    for sequence in work.sequences:
        sequence.num_inflight_tokens += 1
