"""A fault of one sequence ends that sequence, not those beside it.

Drafter and sampler work on all sequences of a step at once, and raise where one of them is at fault: its logits are not
finite, or its parameters exclude every token. Then they are called for each sequence alone. Rows do not depend on each
other, so the others get the tokens that they would have got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoinfer.errors import one_line
from nanoinfer.sampling.sampler import Sampled, Sampler
from nanoinfer.scheduling.scheduler import Work
from nanoinfer.speculative.speculator import SpecStep, Speculator
from nanoinfer.speculative.verify import Group, draw

if TYPE_CHECKING:
    from torch import Tensor

Faults = dict[object, str]
"""Sequences that cannot go on, with the reason in one line."""


def propose(speculator: Speculator, work: list[Work], faults: Faults) -> SpecStep:
    """Return the proposals for a step; sequences that the drafter refuses get none and are added to `faults`."""
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


def draw_tokens(
    sampler: Sampler, logits: Tensor, groups: Sequence[Group], rule: str, faults: Faults
) -> list[list[Sampled]]:
    """Return the tokens of each group, as `verify.draw` does; none where it is at fault, which `faults` then says."""
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
