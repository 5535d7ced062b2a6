"""Rules of the scheduler for beam searches, whose beams depend on each other (core/beam_search.py runs them).

The beams of a search need not run in the same step, but the search continues only when the logits of all are read. So
a beam that was preempted may take the place of a request of its own priority: the other beams wait for it and hold
memory. A beam whose logits were read is idle until then, and may be preempted for another one of its search.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from nanoinfer.scheduling.sequence import Sequence


def may_preempt_equals(s: Sequence) -> bool:
    """Return whether sequences of the same priority may be preempted for a waiting one."""
    return s.admitted and s.request.beams is not None


def awaits_search(s: Sequence) -> bool:
    """Return whether a sequence that is being preempted waits for the other beams: its logits were read."""
    return s.request.beams is not None and not s.num_uncached


def find_idle_beam(running: Seq[Sequence], winner: Sequence, planned: Collection[Sequence]) -> Sequence | None:
    """Return a beam of the search of `winner` whose logits were read and that is not planned for the step, or None."""
    for s in running:
        if s.request is winner.request and s.handle is not None and not s.num_uncached and s not in planned:
            return s
    return None
