"""Speculation as the generation core sees it: propose before a step, learn after it.

    propose   which sequences decode, how many tokens each may use (room), how many pay (pace.py) -> the drafter
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
from nanoinfer.speculative.base import Ask, Drafter, Proposal, SeesHidden
from nanoinfer.speculative.pace import Outcome, Pace, Trust, Wish

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.sampling.sampler import SamplerRow
    from nanoinfer.scheduling import sequence as scheduling
    from nanoinfer.speculative.costs import StepTimes


@dataclass
class Tally:
    """What speculation did for one request."""

    num_proposed: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_verify_steps: int = 0
    """Times that a sequence of it was extended by proposals."""
    draft_sec: float = 0.0
    """In the drafter, company included."""
    step_sec: float = 0.0
    """In engine and sampler, in the steps that decoded it, company included."""


@dataclass
class Round:
    """What was proposed for one step."""

    proposals: dict[scheduling.Sequence, Proposal] = field(default_factory=dict)
    """Only those that are not empty."""
    draft_sec: float = 0.0
    expected_draft_sec: float = 0.0


class Speculator:
    """Proposes tokens for the sequences that decode.

    Args:
        drafter: who proposes.
        rule: reproduce or reject (verify.py).
        speculate_k: proposals at a time; None: decided as it goes.
        times: seconds of the target's steps; needed when speculate_k is None.
        clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        rule: str = "reproduce",
        speculate_k: int | None = None,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter, self.rule = drafter, rule
        self._fixed_k = speculate_k
        self._clock = clock
        self._pace = Pace(times, drafter.estimate_sec) if times is not None else None
        assert (speculate_k is None) != (times is None)
        self._trust: dict[scheduling.Sequence, Trust] = {}
        self._tallies: WeakKeyDictionary[scheduling.Request, Tally] = WeakKeyDictionary()

    def propose(self, work: Sequence[Work]) -> Round:
        """Return proposals for those sequences of a step that can use some."""
        wanted = [(w.sequence, room) for w in work if _decodes(w) and (room := _room(w)) > 0]
        if not wanted:
            return Round()
        if self._pace is None:
            asks = [self._ask(s, min(room, cast(int, self._fixed_k))) for s, room in wanted]
        elif all(_decodes(w) for w in work):
            asks = self._paced(self._pace, [self._ask(w.sequence, max(0, _room(w))) for w in work])
        else:
            return Round()  # a prompt is in the step: what it costs says nothing
        if not asks:
            return Round()
        behind = sum(map(self.drafter.num_behind, asks))
        expected = self.drafter.estimate_sec(len(asks), max(a.num_tokens for a in asks), behind)
        start = self._clock()
        proposals = self.drafter.propose(asks)
        made = {cast("scheduling.Sequence", a.row): p for a, p in zip(asks, proposals, strict=True) if p.token_ids}
        return Round(made, self._clock() - start, expected)

    def _paced(self, pace: Pace, asks: list[Ask]) -> list[Ask]:
        """Return the asks that pay, each for as many tokens as pay."""
        wishes = []
        for ask in asks:
            s = cast("scheduling.Sequence", ask.row)
            to_come = s.params.max_tokens - s.num_output_tokens
            wishes.append(Wish(self._trust_in(s), ask.num_tokens, to_come, self.drafter.num_behind(ask)))
        return [replace(a, num_tokens=k) for a, k in zip(asks, pace.choose(wishes), strict=True) if k > 0]

    def _ask(self, s: scheduling.Sequence, num_tokens: int) -> Ask:
        return Ask(cast("SamplerRow", s), s.token_ids, s.start, num_tokens, self.rule == "reject")

    def _trust_in(self, sequence: scheduling.Sequence) -> Trust:
        if (trust := self._trust.get(sequence)) is None:
            trust = self._trust[sequence] = Trust()
        return trust

    def learn(
        self,
        work: Sequence[Work],
        done: Round,
        tokens: Sequence[Sequence[int]],
        step_sec: float,
        hidden: Callable[[], Tensor],
    ) -> None:
        """Take note of how a step went.

        Args:
            work: of the step.
            done: what was proposed.
            tokens: what was kept, for each sequence that drew.
            step_sec: time in engine and sampler.
            hidden: `Engine.hidden`, called where the drafter wants it.
        """
        if isinstance(self.drafter, SeesHidden) and tokens:
            rows = [cast("SamplerRow", s) for s in drawing(list(work))]
            self.drafter.see(rows, hidden()[_newest_rows(work, done, tokens)])
        texts = []
        for s, kept in zip(drawing(list(work)), tokens, strict=True):
            proposal = done.proposals.get(s)
            proposed, accepted = (len(proposal.token_ids), max(0, len(kept) - 1)) if proposal is not None else (0, 0)
            texts.append((self._trust_in(s), proposed, accepted))
            tally = self.tally(s.request)
            tally.num_proposed += proposed
            tally.num_accepted += accepted
            tally.num_rejected += accepted < proposed
            tally.num_verify_steps += proposed > 0
        for request in {w.sequence.request: None for w in work}:
            tally = self.tally(request)
            tally.draft_sec += done.draft_sec
            tally.step_sec += step_sec
        if self._pace is not None and all(map(_decodes, work)):
            self._pace.learn(Outcome(texts, step_sec, done.draft_sec, done.expected_draft_sec))

    def tally(self, request: scheduling.Request) -> Tally:
        """Return what was done for a request so far."""
        return self._tallies.setdefault(request, Tally())

    def forget(self, sequence: scheduling.Sequence) -> None:
        """Free what is kept for a sequence."""
        self._trust.pop(sequence, None)
        self.drafter.forget(cast("SamplerRow", sequence))

    def reset(self) -> None:
        """Free what is kept for all sequences, also where an exception came in the middle of a call."""
        self._trust.clear()
        self.drafter.reset()


def _newest_rows(work: Sequence[Work], done: Round, tokens: Sequence[Sequence[int]]) -> list[int]:
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
    to_come = s.params.max_tokens - s.num_output_tokens - 1
    return min(to_come, s.block_size - (len(s.token_ids) - s.start))
