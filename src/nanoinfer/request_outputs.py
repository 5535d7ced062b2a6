"""From the state of a request to what the caller gets: deltas, outputs, log-probabilities, metrics."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from nanoinfer.models.tokenizers import decode
from nanoinfer.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from nanoinfer.sampling.sampler import Sampled
from nanoinfer.scheduling.sequence import Request, Sequence

if TYPE_CHECKING:
    from nanoinfer.models.tokenizers import Tokenizer
    from nanoinfer.speculative.speculator import SpecStats


class Logprobs:
    """Keeps the log-probabilities that were asked for, for as long as their sequences are kept."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._of: WeakKeyDictionary[Sequence, list[dict[int, Logprob]]] = WeakKeyDictionary()

    def add(self, sequence: Sequence, tokens: Seq[Sampled]) -> None:
        """Take note of the tokens that a sequence has drawn."""
        described = [describe(self._tokenizer, drawn.logprobs) for drawn in tokens if drawn.logprobs is not None]
        if described:
            self._of.setdefault(sequence, []).extend(described)

    def of(self, sequence: Sequence) -> list[dict[int, Logprob]] | None:
        """Return them for each output token; None where none were asked for."""
        if sequence.params.logprobs is None:
            return None
        return self._of.get(sequence, [])[: sequence.num_output_tokens]  # less tokens drawn past the output's end


def describe(tokenizer: Tokenizer | None, logprobs: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
    """Add each token's text to its log-probability and rank."""
    return {
        token: Logprob(value, rank, decode(tokenizer, [token]) if tokenizer else None)
        for token, (value, rank) in logprobs.items()
    }


def delta(s: Sequence, num_before: int) -> Delta:
    """Return what a sequence has gained since it had `num_before` output tokens."""
    text = s.text.take(finished=s.finish_reason is not None)
    num_tokens = s.num_output_tokens - num_before
    return Delta(s.request.request_id, s.sample_index, text, s.finish_reason, num_tokens, s.error)


def output(request: Request, logprobs: Logprobs, stats: SpecStats | None, now: float) -> RequestOutput:
    """Return what a request has produced so far (finish_reason None for sequences that are not finished).

    Args:
        request: in any state.
        logprobs: of its sequences.
        stats: what speculation did for it; None without a draft.
        now: seconds on the clock of its time stamps.
    """
    outputs = [
        CompletionOutput(
            s.sample_index,
            s.text.text,
            list(s.output_token_ids),
            s.finish_reason,
            s.stop_reason,
            logprobs.of(s),
            s.error,
        )
        for s in request.sequences
    ]
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        outputs,
        request.seed,
        request.num_dropped_tokens,
        _metrics(request, [len(o.token_ids) for o in outputs], stats, now),
        request.prompt_logprobs,
    )


def _metrics(request: Request, lengths: list[int], stats: SpecStats | None, now: float) -> RequestMetrics:
    now = request.finished_sec or now
    first = request.first_token_sec or now
    longest = max(lengths)
    return RequestMetrics(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=sum(lengths),
        ttft_sec=first - request.arrival_sec,
        tpot_sec=(now - first) / (longest - 1) if longest > 1 else None,
        total_sec=now - request.arrival_sec,
        speculation=None if stats is None else _speculation(stats),
    )


def _speculation(t: SpecStats) -> SpeculationMetrics:
    return SpeculationMetrics(
        num_proposed=t.num_proposed,
        num_accepted=t.num_accepted,
        num_rejected=t.num_rejected,
        num_verify_steps=t.num_verify_steps,
        mean_accepted_length=t.num_accepted / t.num_verify_steps if t.num_verify_steps else None,
        draft_share=t.draft_sec / (t.draft_sec + t.step_sec) if t.draft_sec + t.step_sec > 0 else 0.0,
    )
