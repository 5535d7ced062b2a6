"""Which rows of a step's logits belong to which sequences.

logits   a row for each token that is drawn: one for each sequence, 1 + k for one with k proposals
sampled  its siblings sample from the row of the sequence that they are forked from
beams    no token is sampled from the row of a beam: a beam search reads it (beams.py)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.work import ScheduledSequence, drawing
from nanoinfer.speculative.speculator import SpecStep
from nanoinfer.speculative.verify import Group


@dataclass
class StepRows:
    """The rows of a step, by what is done with them."""

    groups: list[Group] = field(default_factory=list)
    """The sequences to sample, with their proposals."""
    sampled: list[int] = field(default_factory=list)
    """The rows of `groups`, in order."""
    beams: dict[Sequence, int] = field(default_factory=dict)
    """The row of each beam."""
    num_rows: int = 0


def rows_of(work: Seq[ScheduledSequence], done: SpecStep) -> StepRows:
    """Return the rows of a step with these proposals."""
    rows = StepRows()
    for w in (w for w in work if w.draws):
        proposal = done.proposals.get(w.sequence)
        count = 1 + (len(proposal.token_ids) if proposal is not None else 0)
        if w.sequence.request.beams is not None:
            rows.beams[w.sequence] = rows.num_rows
        else:
            rows.groups += [(s, done.proposals.get(s)) for s in drawing([w])]
            rows.sampled += [*range(rows.num_rows, rows.num_rows + count), *[rows.num_rows] * len(w.forks)]
        rows.num_rows += count
    return rows
