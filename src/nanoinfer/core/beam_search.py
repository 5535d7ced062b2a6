"""Beam search in the generation core: one request whose sequences are the beams (the rule: sampling/beams.py).

    prompt   is processed once, by the first sequence
    step     each beam gets its row of logits, as any sequence does, and keeps its candidates
    advance  once all beams of a request have candidates, the search selects the next beams: beams that are not extended
             are closed, one that several extend is forked, and each appends its token
    end      the sequences become the finished outputs, the best first

All of a beam is in its tokens and its log-probability. The beams of a request need not run in the same step, and one
that was closed in between is computed again from its tokens. A request never has more than beam_width open sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from nanoinfer.sampling.beams import BeamSearch, Candidates, find_candidates, score_of
from nanoinfer.sampling_params import BeamSearchParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.work import ScheduledSequence
from nanoinfer.utils.arrays import Array, to_numpy


@dataclass
class _Progress:
    """The search of one request. It names sequences by their sample_index: it must not keep its request alive."""

    search: BeamSearch
    live: list[int]
    """The beams, the best first; at the beginning the prompt alone."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Of the beams that have run since the last choice."""


class BeamSearches:
    """The beam searches of a core.

    Args:
        scheduler: of the core.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._of: WeakKeyDictionary[Request, _Progress] = WeakKeyDictionary()

    def read(self, rows: Mapping[Sequence, int], logits: Array) -> dict[object, str]:
        """Find the candidates of beams. Return the sequences of requests that fail, each with the reason.

        Args:
            rows: the row of each beam.
            logits: (R, V) float32.
        """
        faults: dict[object, str] = {}
        if not rows:
            return faults
        for s, row in zip(rows, to_numpy(logits[list(rows.values())]), strict=True):
            progress, params = self._progress(s.request), cast(BeamSearchParams, s.request.beams)
            try:
                candidates = find_candidates(row, progress.search.num_candidates, params.temperature)
                progress.candidates[s.sample_index] = candidates
            except Exception as e:
                faults.update(dict.fromkeys(s.request.sequences, one_line(e)))
        return faults

    def advance(self, work: Seq[ScheduledSequence]) -> list[Sequence]:
        """Continue the searches whose beams all have candidates; return the sequences of those that have ended."""
        ended: list[Sequence] = []
        for request in dict.fromkeys([w.sequence.request for w in work if w.samples and w.sequence.request.beams]):
            progress = self._progress(request)
            if not request.finished and len(progress.candidates) == len(progress.live):
                chosen = progress.search.advance([progress.candidates[i] for i in progress.live])
                progress.candidates.clear()
                if progress.search.finished:
                    self._end(request, progress.search)
                else:
                    progress.live = self._extend(request.sequences, progress.live, chosen)
                    self._scheduler.requeue(request)
            if request.finished:
                ended += request.sequences
        return ended

    def _progress(self, request: Request) -> _Progress:
        """Return the search of a request; a new one at its first step."""
        if request not in self._of:
            first = request.sequences[0]
            limit = min(first.max_tokens, first.block_size + 1 - len(request.prompt_token_ids))
            search = BeamSearch(cast(BeamSearchParams, request.beams), request.end_token_ids, limit)
            self._of[request] = _Progress(search, [0])
        return self._of[request]

    def _extend(self, sequences: Seq[Sequence], live: list[int], chosen: Seq[tuple[int, int]]) -> list[int]:
        """Make the sequences the beams of the next step, and return their order.

        Args:
            sequences: of the request.
            live: the beams of this step.
            chosen: (index into `live`, token) of each beam of the next step.
        """
        parents = [live[at] for at, _ in chosen]
        unused = [s.sample_index for s in sequences if s.sample_index not in parents]
        for i in unused:  # before the forks, which need their slots
            self._drop(sequences[i])
        beams: list[int] = []
        for parent in parents:
            beams.append(parent if parent not in beams else unused.pop())
            if beams[-1] != parent:
                sequences[beams[-1]].token_ids = list(sequences[parent].token_ids)
                self._fork(sequences[parent], sequences[beams[-1]])
        for i, (_, token) in zip(beams, chosen, strict=True):
            sequences[i].token_ids.append(token)
        return beams

    def _drop(self, s: Sequence) -> None:
        """Close the engine's sequence of a beam that is not continued, if it has one."""
        if s.handle is not None:
            self._scheduler.cache.detach(s)
            self._scheduler.cache.engine.close(s.handle)
        s.handle, s.num_cached = None, 0

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a dropped beam go on from another one. Without its KV cache if one of them was preempted."""
        child.start, child.last_sampled_step = parent.start, parent.last_sampled_step
        if parent.handle is not None and child in self._scheduler.running:
            child.handle = self._scheduler.cache.engine.fork(parent.handle)
            child.num_cached = parent.num_cached

    def _end(self, request: Request, search: BeamSearch) -> None:
        """Make the sequences of a request its finished outputs."""
        for s, result in zip(request.sequences, search.results(), strict=True):
            self._drop(s)
            s.token_ids = list(request.prompt_token_ids)
            s.cumulative_logprob = result.cum_logprob
            try:
                for token in result.token_ids:
                    s.append(token)
            except NanoinferError as e:  # the tokenizer cannot decode the token
                s.abort(str(e))
            assert s.finish_reason is not None


def check(params: BeamSearchParams, vocab_size: int, end_token_ids: Collection[int]) -> None:
    """Raise NanoinferError if a vocabulary has too few tokens for the beams of a search.

    Args:
        params: of the search.
        vocab_size: number of tokens that may be generated.
        end_token_ids: those that end an output.
    """
    num_tokens = vocab_size - (0 if params.ignore_eos else len(set(end_token_ids)))
    if params.beam_width > num_tokens:
        raise NanoinferError(
            f"beam_width={params.beam_width} is more than the {num_tokens} tokens of the vocabulary that do not end an"
            " output: lower it"
        )


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, end_text: Callable[[int], str]
) -> BeamSearchOutput:
    """Return the output of a beam search in vLLM's form.

    Args:
        output: of the request, which is finished.
        params: of the search.
        end_text: returns the text of an end token; called if the output includes it.
    """
    if (error := next((o.error for o in output.outputs if o.error is not None), None)) is not None:
        return BeamSearchOutput([], error)
    sequences = []
    for o in output.outputs:
        if o.cumulative_logprob is None:
            return BeamSearchOutput([], "the request was aborted: another call was interrupted")
        score = score_of(o.cumulative_logprob, len(o.token_ids), params.length_penalty)
        text = o.text
        if params.include_stop_str_in_output and isinstance(o.stop_reason, int):
            text += end_text(o.stop_reason)
        sequences.append(
            BeamSearchSequence(o.token_ids, o.cumulative_logprob, score, text, o.finish_reason, o.stop_reason)
        )
    return BeamSearchOutput(sequences)
