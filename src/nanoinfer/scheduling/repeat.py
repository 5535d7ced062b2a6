"""Repeated work: while the same sequences decode one token each, a step has the work of the step before.

In a long generation, almost all steps differ from the step before in nothing but their tokens. The scheduler then
returns the same `StepWork` object again, for a known number of steps: until a sequence reaches max_tokens, the context
length or the end of its window. What the callers derive from that object stays valid too (`OverlapScheduler.launch`).
"""

from __future__ import annotations

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.work import ScheduledSequence, StepWork


class RepeatedWork:
    """The work that the next steps may repeat."""

    def __init__(self) -> None:
        self._work = StepWork()
        self._running: list[Sequence] = []
        self._num_inflight = 0
        self._left = 0
        """Number of steps that may repeat the work."""

    def note(self, work: StepWork, running: list[Sequence]) -> None:
        """Note the work of a step and all running sequences. It may be repeated if the step before had the same."""
        self._left, self._work = 0, work
        if running != self._running:
            self._running = running.copy()
        elif work and work.sequences == running and len({s.num_inflight_tokens for s in running}) == 1:
            self._num_inflight = running[0].num_inflight_tokens
            self._left = min(map(_num_repeats, work))

    def clear(self) -> None:
        """Do not repeat the work: the running sequences changed, or one got another number of tokens than one."""
        self._work, self._running, self._left = StepWork(), [], 0  # keeps no sequence that has ended

    def next(self, running: list[Sequence], step: int) -> StepWork | None:
        """Return the work if step number `step` repeats it, and count its tokens as cached.

        Args:
            running: all running sequences.
            step: number of the step.
        """
        work = self._work
        if self._left <= 0 or running != self._running or running[0].num_inflight_tokens != self._num_inflight:
            return None
        self._left -= 1
        work.is_repeated = True
        for s in running:
            s.num_cached += 1
            s.last_sampled_step = step
        if not self._num_inflight:
            for w in work:
                w.token_ids = w.sequence.token_ids[-1:]
        return work


def _num_repeats(w: ScheduledSequence) -> int:
    """Return the number of steps after this one in which a sequence decodes one token of the same window."""
    s = w.sequence
    if not w.samples or w.forks or s.request.beams is not None or len(w.token_ids) + w.pending != 1:
        return 0
    to_come = s.max_tokens - s.num_output_tokens - s.num_inflight_tokens - 1
    return min(to_come, s.block_size - (s.num_tokens - s.start))
