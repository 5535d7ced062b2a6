"""The engine's batch of a step, and which rows of its logits belong to which sequences.

logits   a row for each token that is drawn: one for each sequence, 1 + k for one with k proposals
sampled  its siblings sample from the row of the sequence that they are forked from
scored   rows that are read for scores; no token is sampled from them
beams    no token is sampled from the row of a beam: a beam search reads it (beams.py)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast

from nanoinfer.engines.base import PENDING, Handle, StepBatch
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.work import ScheduledSequence
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
    scored: dict[Sequence, slice] = field(default_factory=dict)
    """The rows of each scored sequence."""
    num_rows: int = 0


def batch_of(work: Seq[ScheduledSequence], done: SpecStep | None = None) -> StepBatch:
    """Return the engine's batch: for each sequence the tokens that are not cached, followed by its proposal."""
    batch = StepBatch()
    proposals = done.proposals if done is not None else ()
    for w in work:
        handle = Handle(cast(int, w.sequence.handle))
        if w.sequence in proposals:
            drafts = cast(SpecStep, done).drafts(w.sequence)
            batch.add(handle, [*w.token_ids, *drafts], num_logits=1 + len(drafts))
        else:
            token_ids = [*w.token_ids, PENDING] if w.pending else w.token_ids
            batch.add(handle, token_ids, num_logits=w.num_scored or int(w.draws))
    return batch


def rows_of(work: Seq[ScheduledSequence], done: SpecStep) -> StepRows:
    """Return the rows of a step with these proposals."""
    rows = StepRows()
    for w in work:
        if w.num_scored:
            rows.scored[w.sequence] = slice(rows.num_rows, rows.num_rows + w.num_scored)
            rows.num_rows += w.num_scored
        if not w.draws:
            continue
        count = 1 + len(done.drafts(w.sequence))
        if w.sequence.request.beams is not None:
            rows.beams[w.sequence] = rows.num_rows
        else:
            rows.groups.append((w.sequence, done.proposals.get(w.sequence)))
            rows.groups += [(s, None) for s in w.forks]
            rows.sampled += [*range(rows.num_rows, rows.num_rows + count), *[rows.num_rows] * len(w.forks)]
        rows.num_rows += count
    return rows
