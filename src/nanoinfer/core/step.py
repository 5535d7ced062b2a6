"""One step of an engine, in the order in which it happens.

    propose    a drafter proposes tokens; the masks of structured outputs start to be computed
    extend     the engine appends the scheduled tokens and the proposals, and returns logits
    read       scores and beam searches read their rows; no token is sampled from these
    sample     the other rows are sampled, and proposals verified; siblings are forked before
    truncate   rejected proposals leave the KV cache
    learn      the speculator counts what was accepted

The rows of the logits:

    a sequence with k proposals      1 + k rows
    any other that samples           1 row, from which its siblings sample too
    a beam                           1 row
    a sequence that is scored        before these, a row for each position that is scored in this step

Faults are isolated. Drafter and sampler process all sequences of a step in one call, and raise if one of them is at
fault: its logits are not finite, or its parameters exclude every token. They are then called again for each sequence
alone. Rows do not depend on each other, so the other sequences get the same tokens as without the fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import cast

from nanoinfer.core.beam_search import BeamSearches
from nanoinfer.engines.base import PENDING, Engine, Handle, StepBatch
from nanoinfer.errors import one_line
from nanoinfer.sampling.sampler import Sampled, Sampler
from nanoinfer.scheduling.sequence import PromptReads, Sequence
from nanoinfer.scheduling.work import ScheduledSequence, sampling_sequences
from nanoinfer.speculative.speculator import Speculator, StepProposals, StepRow, drop_without_blocks
from nanoinfer.speculative.verify import Group, sample_and_verify
from nanoinfer.utils.arrays import Array

ENGINE = "engine"
SAMPLER = "sampler"


class Observer:
    """Observes the steps of a core, for profiling; this one does nothing.

    Set `core.observer` between two steps (`Core.between_steps`).
    """

    reads_logits = False
    """Whether `sampled` and `stepped` are to be called for every step: then no step is overlapped with the next one."""
    _nothing = nullcontext()

    def span(self, part: str) -> AbstractContextManager[object]:
        """Return a context manager that is entered before a call of `part` (ENGINE or SAMPLER), and exited after it."""
        return self._nothing

    def sampled(self, rows: Seq[StepRow], logits: Array, tokens: Seq[Seq[int]]) -> None:
        """Called after sampling: the sequences that sampled, the step's logits (M, V), and the tokens of each."""

    def stepped(self, seconds: float) -> None:
        """Called at the end of a step that is not overlapped, with its time."""


@dataclass
class Step:
    """The work of a step, and who proposes for it."""

    work: list[ScheduledSequence]
    speculator: Speculator | None = None
    proposed: StepProposals = field(default_factory=StepProposals)
    is_masked: bool = False
    """Whether a sequence has a grammar, which permits some tokens only."""
    faults: dict[object, str] = field(default_factory=dict)
    """Failed sequences, each with the reason in one line. They get no tokens."""

    @property
    def rule(self) -> str:
        """The rule of verification (speculative/verify.py)."""
        return self.speculator.rule if self.speculator is not None else "reproduce"

    @contextmanager
    def isolated(self, s: object) -> Iterator[None]:
        """Make an exception of the context a fault of one sequence."""
        try:
            yield
        except Exception as e:
            self.faults.setdefault(s, one_line(e))


class StepRunner:
    """Runs steps.

    Args:
        engine, sampler: see their interfaces.
        vocab_size: number of tokens that may be sampled.
        beams: reads the rows of beams.
        note: stores the log-probabilities of sampled tokens.
        clock: returns seconds.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        vocab_size: int,
        beams: BeamSearches,
        note: Callable[[Sequence, list[Sampled]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._sampler, self._vocab_size = engine, sampler, vocab_size
        self._beams, self._note, self._clock = beams, note, clock

    def run(self, step: Step, observer: Observer) -> list[list[int]]:
        """Run a step; return the tokens of each sequence that samples, none for those in `step.faults`.

        Raises:
            Exception: the engine failed.
        """
        propose(step)
        if step.proposed.proposals:
            drop_without_blocks(self._engine, step.work, step.proposed)
        rows = step.proposed.resolve(step.work)
        start = self._clock()
        batch = batch_of(step.work, step.proposed)
        batch.all_hidden = step.speculator is not None and step.speculator.reads_hidden
        with observer.span(ENGINE):
            logits = self._engine.extend(batch)
        if step.speculator is not None and batch.all_hidden:
            step.speculator.observe(step.work, self._engine, batch)
        with observer.span(SAMPLER):
            self._read_scores(step, batch, logits)
            sampled = self._sample(step, rows, logits[:, : self._vocab_size])
        tokens = [[some[0].token_id] if len(some) == 1 else [token.token_id for token in some] for some in sampled]
        observer.sampled(rows, logits, tokens)
        now = self._clock()
        for row, some in zip(rows, sampled, strict=True):
            request = row.sequence.request
            if not request.first_token_sec and (some or row.is_beam):
                request.first_token_sec = now
            if request.params.num_logprobs is not None:
                self._note(row.sequence, some)
        if step.speculator is not None:
            for row, token_ids in zip(rows, tokens, strict=True):
                self._keep_accepted(row, token_ids)
            step.speculator.learn(step.work, step.proposed, tokens, now - start)
        return tokens

    def _read_scores(self, step: Step, batch: StepBatch, logits: Array) -> None:
        """Pass the rows of scored positions to the requests that read them."""
        for i, (w, first) in enumerate(zip(step.work, step.proposed.first_rows, strict=True)):
            if w.num_scored:
                reads, rows = cast(PromptReads, w.sequence.request.prompt_reads), logits
                if reads.hidden and batch.all_hidden:
                    rows, first = self._engine.new_hidden(batch)[i][-batch.num_logits[i] :], 0
                elif reads.hidden:
                    rows = self._engine.hidden()
                read_scores(step, w, reads, rows[first : first + w.num_scored])

    def _sample(self, step: Step, rows: Seq[StepRow], logits: Array) -> list[list[Sampled]]:
        """Sample the rows, and return the tokens of each sequence that samples: none of a beam."""
        if step.proposed.in_order:  # a row of logits, or one and those of its proposal, for each sequence
            return sample(step, self._sampler, logits, [(row.sequence, row.proposal) for row in rows])
        beams = {row.sequence: row.first for row in rows if row.is_beam and row.sequence.handle is not None}
        if beams:
            step.faults |= self._beams.read(beams, logits)
        for w in step.work:
            for sibling in w.forks if w.sequence.request.beams is None else ():
                sibling.handle = self._engine.fork(cast(Handle, w.sequence.handle))
        groups: list[Group] = [(row.sequence, row.proposal) for row in rows if not row.is_beam]
        indices = [i for row in rows if not row.is_beam for i in range(row.first, row.first + 1 + len(row.drafts))]
        sampled = iter(sample(step, self._sampler, logits[indices], groups))
        return [[] if row.is_beam else next(sampled) for row in rows]

    def _keep_accepted(self, row: StepRow, token_ids: list[int]) -> None:
        """Note which of a sequence's new tokens were proposed, and remove rejected proposals from the KV cache.

        The last of the tokens was proposed only if the output is complete with it.
        """
        drafts, s = row.drafts, row.sequence
        s.draft_accepted += [i < len(drafts) and token == drafts[i] for i, token in enumerate(token_ids)]
        if drafts and (num_rejected := 1 + len(drafts) - len(token_ids)):
            handle = cast(Handle, s.handle)
            self._engine.truncate(handle, self._engine.length(handle) - num_rejected)


def batch_of(work: Seq[ScheduledSequence], proposed: StepProposals | None = None) -> StepBatch:
    """Return the engine's batch: for each sequence the tokens that are not cached, followed by its proposal."""
    batch, proposals = StepBatch(), {} if proposed is None else proposed.proposals
    for w in work:
        handle = w.sequence.handle
        assert handle is not None
        if proposals and w.sequence in proposals:
            drafts = proposals[w.sequence].token_ids
            batch.add(handle, [*w.token_ids, *drafts], num_logits=w.num_scored + 1 + len(drafts))
        else:
            token_ids = [*w.token_ids, PENDING] if w.pending else w.token_ids
            batch.add(handle, token_ids, num_logits=w.num_scored + w.samples)
    batch.hidden_only = not any(w.samples or (w.num_scored and not _reads_hidden(w.sequence)) for w in work)
    return batch


def _reads_hidden(s: Sequence) -> bool:
    """Return whether what is read of a prompt is hidden states."""
    return s.request.prompt_reads is not None and s.request.prompt_reads.hidden


def propose(step: Step) -> None:
    """Set the proposals of a step, and start to compute the masks of structured outputs."""
    if (speculator := step.speculator) is not None:
        try:
            step.proposed = speculator.propose(step.work)
        except Exception:
            for w in step.work:
                with step.isolated(w.sequence):
                    step.proposed.proposals.update(speculator.propose([w]).proposals)
    step.is_masked = any(w.sequence.grammar is not None for w in step.work)
    if step.is_masked:
        _masks().start(sampling_sequences(step.work), step.proposed, step.rule)


def read_scores(step: Step, w: ScheduledSequence, reads: PromptReads, rows: Array) -> None:
    """Give a scored sequence its rows of logits or hidden states. If they are refused, its siblings fail with it."""
    request = w.sequence.request
    first, reads.next = reads.next, reads.next + w.num_scored
    try:
        reads.read(rows, reads.target_ids[first : reads.next])
    except Exception as e:
        request.prompt_logprobs = None
        step.faults.update(dict.fromkeys(request.sequences, one_line(e)))


def sample(step: Step, sampler: Sampler, logits: Array, groups: Seq[Group]) -> list[list[Sampled]]:
    """Return the tokens of each group, as `sample_and_verify` does, and none of those that fail.

    Groups with a grammar get tokens that it permits.
    """
    if not step.is_masked:
        return _sample_isolated(step, sampler, logits, groups)
    masked = _masks().MaskedRows(logits, groups)
    tokens: list[list[Sampled]] = masked.finish(groups, _sample_isolated(step, sampler, masked.logits, groups))
    step.faults |= masked.errors
    return tokens


@cache
def _masks() -> ModuleType:
    """Return the module of masks. It is imported when it is needed, and not looked up in each step."""
    from nanoinfer.structured import masks

    return masks


def _sample_isolated(step: Step, sampler: Sampler, logits: Array, groups: Seq[Group]) -> list[list[Sampled]]:
    try:
        return sample_and_verify(sampler, logits, groups, rule=step.rule)
    except Exception:
        tokens: list[list[Sampled]] = []
        at = 0
        for row, proposal in groups:
            end = at + 1 + (len(proposal.token_ids) if proposal is not None else 0)
            tokens.append([])
            with step.isolated(row):
                tokens[-1:] = sample_and_verify(sampler, logits[at:end], [(row, proposal)], rule=step.rule)
            at = end
        return tokens
