"""Speculation as the generation core sees it: propose before a step, learn after it.

    propose   which sequences decode, how many tokens each may use (room) and should use (adaptive_k.py) -> the drafter
    (core)    extend by 1 + k tokens, keep what verify.py keeps, truncate the rest
    learn     what was accepted and how long it took

A sequence is speculated on when it needs exactly one token and continues its window: not while a prompt is read, not
when its window slides, and never past what it may still get: max_tokens, the context, the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from nanoinfer.scheduling.scheduler import Work, drawing
from nanoinfer.speculative.adaptive_k import AcceptanceStats, AdaptiveK, DraftBudget, StepOutcome
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal, UsesHidden

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.scheduling import sequence as scheduling
    from nanoinfer.speculative.step_costs import StepCosts


@dataclass
class SpecStats:
    """What speculation did for one request."""

    num_proposed: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_verify_steps: int = 0
    """Times that a sequence of it was extended by proposals."""
    draft_sec: float = 0.0
    """In the drafter, including the time for other sequences of the batch."""
    step_sec: float = 0.0
    """In engine and sampler, in the steps that decoded it, including the time for other sequences of the batch."""


@dataclass
class SpecStep:
    """What was proposed for one step."""

    proposals: dict[scheduling.Sequence, Proposal] = field(default_factory=dict)
    """Only those that are not empty."""
    draft_sec: float = 0.0
    drafted: tuple[int, int, int] | None = None
    """What the drafter was asked for: sequences, tokens for each at most, tokens to read first; None: nothing."""


class Speculator:
    """Proposes tokens for the sequences that decode.

    Args:
        drafter: makes the proposals.
        rule: reproduce or reject (verify.py).
        speculate_k: proposals at a time; None: chosen for each step.
        costs: seconds of the target's steps; needed when speculate_k is None.
        clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        rule: str = "reproduce",
        speculate_k: int | None = None,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert (speculate_k is None) != (costs is None)
        self.drafter, self.rule = drafter, rule
        self._fixed_k = speculate_k
        self._clock = clock
        self._adaptive = AdaptiveK(costs, drafter.estimate_sec) if costs is not None else None
        self._acceptance: dict[scheduling.Sequence, AcceptanceStats] = {}
        self._stats: WeakKeyDictionary[scheduling.Request, SpecStats] = WeakKeyDictionary()

    def propose(self, work: Sequence[Work]) -> SpecStep:
        """Return proposals for those sequences of a step that can use some."""
        if self._adaptive is None:
            rooms = [(w.sequence, min(_room(w), cast(int, self._fixed_k))) for w in work if _decodes(w)]
            requests = [self._request(s, room) for s, room in rooms if room > 0]
        elif all(map(_decodes, work)) and not self._adaptive.waits():
            requests = self._chosen(self._adaptive, [self._request(w.sequence, _room(w)) for w in work])
        else:
            return SpecStep()  # a step that also reads a prompt says nothing about costs
        if not requests:
            return SpecStep()
        behind = sum(map(self.drafter.num_behind, requests))
        start = self._clock()
        proposals = self.drafter.propose(requests)
        draft_sec = self._clock() - start
        made = {cast("scheduling.Sequence", r.row): p for r, p in zip(requests, proposals, strict=True) if p.token_ids}
        return SpecStep(made, draft_sec, (len(requests), max(r.num_tokens for r in requests), behind))

    def _chosen(self, adaptive: AdaptiveK, requests: list[DraftRequest]) -> list[DraftRequest]:
        """Return the requests that are worth their time, each for as many tokens as are."""
        budgets = []
        for r in requests:
            s = cast("scheduling.Sequence", r.row)
            if s not in self._acceptance:
                self._acceptance[s] = AcceptanceStats(adaptive.acceptance)
            to_come = s.max_tokens - s.num_output_tokens
            budgets.append(DraftBudget(self._acceptance[s], r.num_tokens, to_come, self.drafter.num_behind(r)))
        return [replace(r, num_tokens=k) for r, k in zip(requests, adaptive.choose(budgets), strict=True) if k > 0]

    def _request(self, s: scheduling.Sequence, num_tokens: int) -> DraftRequest:
        return DraftRequest(s, s.token_ids, s.start, num_tokens, self.rule == "reject")

    def learn(
        self,
        work: Sequence[Work],
        done: SpecStep,
        tokens: Sequence[Sequence[int]],
        step_sec: float,
        hidden: Callable[[], Tensor],
    ) -> None:
        """Take the outcome of a step into account.

        Args:
            work: of the step.
            done: what was proposed.
            tokens: what was kept, for each sequence that drew.
            step_sec: time in engine and sampler.
            hidden: `Engine.hidden`, called where the drafter wants it.
        """
        rounds = []
        for s, kept in zip(drawing(list(work)), tokens, strict=True):
            proposal = done.proposals.get(s)
            proposed, accepted = (len(proposal.token_ids), max(0, len(kept) - 1)) if proposal is not None else (0, 0)
            rounds.append((self._acceptance.get(s), proposed, accepted))
            stats = self.stats(s.request)
            stats.num_proposed += proposed
            stats.num_accepted += accepted
            stats.num_rejected += accepted < proposed
            stats.num_verify_steps += proposed > 0
        for request in {w.sequence.request: None for w in work}:
            stats = self.stats(request)
            stats.draft_sec += done.draft_sec
            stats.step_sec += step_sec
        if self._adaptive is not None and rounds and all(map(_decodes, work)):
            self._adaptive.learn(StepOutcome(rounds, step_sec, done.draft_sec, done.drafted))
        if isinstance(self.drafter, UsesHidden) and tokens:
            if self._adaptive is not None and self._adaptive.next_is_plain:
                return  # the states of the step after this one will replace these before any is used
            rows = drawing(list(work))
            self.drafter.update_hidden(rows, hidden()[_newest_rows(work, done, tokens)])

    def stats(self, request: scheduling.Request) -> SpecStats:
        """Return what was done for a request so far."""
        return self._stats.setdefault(request, SpecStats())

    def forget(self, sequence: scheduling.Sequence) -> None:
        """Free what is kept for a sequence."""
        self._acceptance.pop(sequence, None)
        self.drafter.forget(sequence)

    def reset(self) -> None:
        """Free what is kept for all sequences, also where an exception came in the middle of a call."""
        self._acceptance.clear()
        self.drafter.reset()


def _newest_rows(work: Sequence[Work], done: SpecStep, tokens: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each sequence that drew, the row of the step's logits that its newest token was drawn from.

    Two sequences, of which the first has kept 2 of 3 proposals and one more token: rows 0 1 2 3 | 4  ->  [2, 4]
    """
    rows, at, kept = [], 0, iter(tokens)
    for w in work:
        if w.draws:
            proposal = done.proposals.get(w.sequence)
            rows += [at + len(next(kept)) - 1 for _ in (w.sequence, *w.forks)]  # siblings draw from the same row
            at += 1 + (len(proposal.token_ids) if proposal is not None else 0)
    return rows


def _decodes(work: Work) -> bool:
    """Return whether a sequence just needs its next token."""
    return work.draws and not work.restart and len(work.token_ids) == 1 and not work.forks


def _room(work: Work) -> int:
    """Return the most proposals that a sequence can use: all may be accepted, and one token is drawn beside them.

    What is drawn after i of them needs the window to begin where it does now, and to hold them.
    """
    s = work.sequence
    to_come = s.max_tokens - s.num_output_tokens - 1
    return min(to_come, s.block_size - (len(s.token_ids) - s.start))
