"""Fault isolation: a fault of one sequence ends that sequence and no other sequences in the batch.

Drafter and sampler process all sequences of a step in one call, and raise if one of them is at fault: its logits are
not finite, or its parameters exclude every token. In that case they are called again for each sequence separately. Rows
do not depend on each other, so the other sequences get the same tokens as without the fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import cast

from nanoinfer.arrays import Array
from nanoinfer.errors import one_line
from nanoinfer.sampling.sampler import Sampled, Sampler
from nanoinfer.scheduling.sequence import Scores, Sequence
from nanoinfer.scheduling.work import ScheduledSequence, drawing
from nanoinfer.speculative.speculator import SpecStep, Speculator
from nanoinfer.speculative.verify import Group, draw
from nanoinfer.structured import masks

Faults = dict[object, str]
"""Failed sequences, each with the reason in one line."""


def prepare(speculator: Speculator | None, work: list[ScheduledSequence], faults: Faults) -> SpecStep:
    """Return the proposals for a step, and start computing the masks of structured outputs."""
    done = _propose(speculator, work, faults) if speculator is not None else SpecStep()
    if any(w.sequence.grammar is not None for w in work):
        masks.start(drawing(work), done, speculator.rule if speculator is not None else "reproduce")
    return done


def _propose(speculator: Speculator, work: list[ScheduledSequence], faults: Faults) -> SpecStep:
    """Return the proposals for a step. Sequences that the drafter refuses get none and are added to `faults`."""
    try:
        return speculator.propose(work)
    except Exception:
        done = SpecStep()
        for w in work:
            try:
                done.proposals.update(speculator.propose([w]).proposals)
            except Exception as e:
                faults[w.sequence] = one_line(e)
        return done


def read_scores(scored: Mapping[Sequence, slice], logits: Array, faults: Faults) -> None:
    """Give each scored sequence its rows of the logits. Sequences whose rows are refused are added to `faults`."""
    for s, rows in scored.items():
        scores = cast(Scores, s.request.scores)
        end = scores.next + rows.stop - rows.start
        try:
            scores.read(logits[rows], scores.target_ids[scores.next : end])
        except Exception as e:
            faults[s] = one_line(e)
        scores.next = end


def draw_tokens(sampler: Sampler, logits: Array, groups: Seq[Group], rule: str, faults: Faults) -> list[list[Sampled]]:
    """Return the tokens of each group, as `verify.draw` does. Failed groups get none and are added to `faults`.

    Groups with a grammar get tokens that it permits.
    """
    if not any(cast(Sequence, row).grammar is not None for row, _ in groups):
        return _draw_tokens(sampler, logits, groups, rule, faults)
    masked = masks.MaskedRows(logits, groups)
    kept = masked.finish(groups, _draw_tokens(sampler, masked.logits, groups, rule, faults))
    faults.update(masked.errors)
    return kept


def _draw_tokens(sampler: Sampler, logits: Array, groups: Seq[Group], rule: str, faults: Faults) -> list[list[Sampled]]:
    try:
        return draw(sampler, logits, groups, rule=rule)
    except Exception:
        kept: list[list[Sampled]] = []
        at = 0
        for row, proposal in groups:
            end = at + 1 + (len(proposal.token_ids) if proposal is not None else 0)
            try:
                kept += draw(sampler, logits[at:end], [(row, proposal)], rule=rule)
            except Exception as e:
                faults[row] = one_line(e)
                kept.append([])
            at = end
        return kept
