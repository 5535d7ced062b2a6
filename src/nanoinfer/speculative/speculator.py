"""Speculation for the generation core: propose tokens before a step, learn from its result afterwards.

    propose   select the sequences that decode, limit their proposals, choose k (adaptive_k.py), call the drafter
    (core)    extend by 1 + k tokens, keep the tokens that verify.py accepts, truncate the rest
    learn     record the numbers of accepted tokens and the duration of the step

A sequence gets proposals if it needs exactly one token and its window does not move: not during prefill and not when
its window slides. Proposals never exceed max_tokens, the context length or the window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.scheduling import sequence as scheduling
from nanoinfer.scheduling.work import ScheduledSequence
from nanoinfer.speculative.adaptive_k import AdaptiveK, StepOutcome
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal
from nanoinfer.speculative.step_costs import StepCosts


class StepRow(NamedTuple):
    """A sequence that samples in a step."""

    sequence: scheduling.Sequence
    first: int
    """The first of its 1 + len(drafts) rows of the step's logits. A fork samples from the row of its sibling."""
    proposal: Proposal | None
    drafts: Sequence[int] = ()
    """The tokens that are proposed; empty if there are none."""

    @property
    def is_beam(self) -> bool:
        """Whether it is a beam, whose candidates are read instead of sampling a token."""
        return self.sequence.request.beams is not None


@dataclass
class StepProposals:
    """The proposals for one step."""

    proposals: dict[scheduling.Sequence, Proposal] = field(default_factory=dict)
    """Proposals that are not empty."""
    draft_sec: float = 0.0
    drafted: tuple[int, int, int] | None = None
    """Arguments of `Drafter.estimate_sec` for the requests to the drafter; None if there were none."""

    rows: list[StepRow] = field(default_factory=list)
    """The sequences that sample in the step, each followed by its forks (`resolve`)."""
    first_rows: list[int] = field(default_factory=list)
    """The first row of logits of each part of the step's work, whether it samples or not."""
    in_order: bool = True
    """Whether the rows of logits are those of `rows`, one after the other: none is scored, a beam's or shared."""

    def resolve(self, work: Sequence[ScheduledSequence]) -> list[StepRow]:
        """Set and return the rows, once the proposals of a step are final."""
        rows, first_rows, at, proposals = self.rows, self.first_rows, 0, self.proposals
        for w in work:
            s = w.sequence
            first_rows.append(at)
            if w.num_scored or w.forks or s.request.beams is not None:
                self.in_order = False
                at += w.num_scored
            if w.samples:
                proposal = proposals.get(s) if proposals else None
                drafts = proposal.token_ids if proposal is not None else ()
                rows.append(StepRow(s, at, proposal, drafts))
                rows += [StepRow(fork, at, None) for fork in w.forks]
                at += 1 + len(drafts)
        return rows


class Speculator:
    """Proposes tokens for the sequences that decode.

    Args:
        rule: reproduce or reject (verify.py).
        speculate_k: number of proposed tokens; None: AdaptiveK chooses it for each step.
        costs: seconds of the target's steps; required if speculate_k is None.
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
        self.reads_hidden = type(drafter).observe is not Drafter.observe
        self._fixed_k = speculate_k
        self._clock = clock
        self._adaptive = AdaptiveK(costs, drafter.estimate_sec) if costs is not None else None

    def propose(self, work: Sequence[ScheduledSequence]) -> StepProposals:
        """Return proposals for the sequences of a step that can use them."""
        if self._adaptive is None:
            limits = [(w.sequence, min(_max_proposals(w), cast(int, self._fixed_k))) for w in work if _decodes(w)]
            requests = [self._request(s, limit) for s, limit in limits if limit > 0]
        elif all(map(_decodes, work)) and not self._adaptive.waits():
            requests = self._chosen(self._adaptive, [self._request(w.sequence, _max_proposals(w)) for w in work])
        else:
            return StepProposals()  # AdaptiveK estimates costs only for steps without prefill
        if not requests:
            return StepProposals()
        behind = sum(self.drafter.num_behind(r) or 0 for r in requests)
        start = self._clock()
        proposals = self.drafter.propose(requests)
        draft_sec = self._clock() - start
        of = {cast("scheduling.Sequence", r.row): p for r, p in zip(requests, proposals, strict=True) if p.token_ids}
        return StepProposals(of, draft_sec, (len(requests), max(r.num_tokens for r in requests), behind))

    def observe(self, work: Sequence[ScheduledSequence], engine: Engine, batch: StepBatch) -> None:
        """Let a drafter that reads hidden states read those of a step's new tokens."""
        for w, rows in zip(work, engine.new_hidden(batch), strict=True):
            if not w.sequence.request.samples:
                continue
            first = w.sequence.start + engine.length(cast(Handle, w.sequence.handle)) - len(rows)
            self.drafter.observe([w.sequence, *w.forks], first, rows)

    def _chosen(self, adaptive: AdaptiveK, requests: list[DraftRequest]) -> list[DraftRequest]:
        """Return the requests with k > 0, with the numbers of tokens that AdaptiveK chooses."""
        behind = [self.drafter.num_behind(r) if r.num_tokens > 0 else None for r in requests]
        if behind.count(None) == len(behind):  # choosing k takes longer than this test, at every step
            return []
        limits = [0 if n is None else r.num_tokens for r, n in zip(requests, behind, strict=True)]
        chosen = adaptive.choose(limits, [n or 0 for n in behind])
        return [replace(r, num_tokens=k) for r, k in zip(requests, chosen, strict=True) if k > 0]

    def _request(self, s: scheduling.Sequence, num_tokens: int) -> DraftRequest:
        return DraftRequest(s, s.token_ids, s.start, num_tokens, s.request.salt, s.handle, self.rule == "reject")

    def learn(
        self,
        work: Sequence[ScheduledSequence],
        done: StepProposals,
        tokens: Sequence[Sequence[int]],
        step_sec: float,
    ) -> None:
        """Update the statistics with the result of a step.

        Args:
            work: of the step.
            done: the proposals of the step, with its rows.
            tokens: the tokens kept for each sequence that sampled.
            step_sec: time of engine and sampler.
        """
        rounds = []
        for row, kept in zip(done.rows, tokens, strict=True):
            proposed = len(row.drafts)
            accepted = max(0, len(kept) - 1) if proposed else 0
            rounds.append((proposed, accepted))
            if row.is_beam:
                continue
            stats = _stats(row.sequence.request)
            stats.num_proposed += proposed
            stats.num_accepted += accepted
            stats.num_rejected += accepted < proposed
            stats.num_verify_steps += proposed > 0
        for request in {w.sequence.request for w in work if w.sequence.request.samples}:
            stats = _stats(request)
            stats.draft_sec += done.draft_sec
            stats.step_sec += step_sec
        if self._adaptive is not None and rounds and all(map(_decodes, work)):
            self._adaptive.learn(StepOutcome(rounds, step_sec, done.draft_sec, done.drafted))


def drop_without_blocks(engine: Engine, work: Sequence[ScheduledSequence], done: StepProposals) -> None:
    """Drop the proposals for which the KV cache has no free blocks. No sequence is preempted for a proposal."""
    need = engine.blocks_needed
    counts = [(w, cast(Handle, w.sequence.handle), len(w.token_ids)) for w in work]
    free = engine.num_free_blocks - sum(need(handle, count) for _, handle, count in counts)
    for w, handle, count in counts:
        if (proposal := done.proposals.get(w.sequence)) is not None:
            more = need(handle, count + len(proposal.token_ids)) - need(handle, count)
            if more > free:
                del done.proposals[w.sequence]
            else:
                free -= more


def _stats(request: scheduling.Request) -> scheduling.SpecStats:
    """Return the statistics of a request."""
    request.speculation = request.speculation or scheduling.SpecStats()
    return request.speculation


def _decodes(work: ScheduledSequence) -> bool:
    """Return whether a sequence only decodes its next token in this step, and is no beam."""
    return work.samples and len(work.token_ids) == 1 and not work.forks and work.sequence.request.beams is None


def _max_proposals(work: ScheduledSequence) -> int:
    """Return the maximum number of proposals for a sequence: all may be accepted, and one more token is sampled.

    The window must contain all of them without sliding.
    """
    s = work.sequence
    to_come = s.max_tokens - s.num_output_tokens - 1
    return min(to_come, s.block_size - (len(s.token_ids) - s.start))
