"""Builds deltas, outputs, log-probabilities and metrics from the state of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from nanoinfer.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput, SpeculationMetrics
from nanoinfer.sampling.sampler import Sampled
from nanoinfer.scheduling.sequence import Request, Sequence, SpecStats
from nanoinfer.tokenizers.tokenizer import MISSING, Tokenizer, decode


def logprobs_of(s: Sequence) -> list[dict[int, Logprob]] | None:
    """Return the log-probabilities of each token, without those sampled past the end; None if not requested."""
    return None if s.params.logprobs is None else s.logprobs[: s.num_output_tokens]


def _cumulative(s: Sequence) -> float | None:
    """Return the sum of the log-probabilities of these tokens; None if they were not computed."""
    if s.cumulative_logprob is not None or s.params.num_logprobs is None:
        return s.cumulative_logprob
    return sum(s.sampled_logprobs[: s.num_output_tokens], 0.0)


def describe(tokenizer: Tokenizer | None, logprobs: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
    """Return each token's log-probability and rank with its text, and its bytes where the text has U+FFFD for them."""
    described = {}
    for token, (value, rank) in logprobs.items():
        text, data = None, None
        if tokenizer is not None and MISSING in (text := decode(tokenizer, [token])):
            data = tuple(tokenizer.token_bytes(token))
        described[token] = Logprob(value, rank, text, data)
    return described


class OutputProcessor:
    """Turns what a step has appended into deltas, and ended requests into outputs.

    A request gets its output (`Request.output`), however it ended. One with a queue (`Request.queue`) gets its deltas
    there, and its output as the last item; after an interrupt the output may be queued twice.

    Args:
        tokenizer: decodes the tokens of log-probabilities; None: they have no text.
        clock: the core's.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._open: dict[Request, None] = {}
        """Requests that have not got their output."""

    def add(self, request: Request) -> None:
        """Note a request that is queued for execution."""
        self._open[request] = None

    def add_logprobs(self, s: Sequence, tokens: Seq[Sampled]) -> None:
        """Store the log-probabilities of a sequence's sampled tokens."""
        for token_id, logprobs in tokens:
            if logprobs is not None:
                s.sampled_logprobs.append(logprobs[token_id][0])
                if s.params.logprobs is not None:
                    s.logprobs.append(describe(self._tokenizer if s.params.detokenize else None, logprobs))

    def delta(self, s: Sequence, num_before: int) -> Delta:
        """Return the delta of a sequence since prompt and output had `num_before` tokens, and queue it."""
        request, reason = s.request, s.finish_reason
        text = s.text.take(finished=reason is not None)
        delta = Delta(request.request_id, s.sample_index, text, reason, len(s.token_ids) - num_before, s.error)
        if request.queue is not None:
            request.queue.append(delta)
        return delta

    def end(self, requests: Iterable[Request] | None = None) -> None:
        """Make the outputs of those requests that have finished. None: look at all, after an interrupt."""
        for request in list(self._open) if requests is None else requests:
            if request in self._open and request.finished:
                request.output = self.output(request)
                if request.queue is not None:
                    request.queue.append(request.output)
                del self._open[request]

    def output(self, request: Request) -> RequestOutput:
        """Return a request's output so far; finish_reason is None for unfinished sequences."""
        outputs = [
            CompletionOutput(
                i,
                s.text.text,
                list(s.output_token_ids),
                s.finish_reason,
                s.stop_reason,
                logprobs_of(s),
                s.error,
                _cumulative(s),
                accepted(s, 0, s.num_output_tokens),
            )
            for i, s in enumerate(_returned(request))
        ]
        lengths = [s.num_output_tokens for s in request.sequences]
        return assemble(request, outputs, lengths, request.speculation, self._clock())


def accepted(s: Sequence, first: int, end: int) -> list[bool] | None:
    """Return which of the output tokens `first` to `end` a drafter proposed; None without a draft."""
    return s.draft_accepted[first:end] if s.draft_accepted else None


def assemble(
    request: Request,
    outputs: list[CompletionOutput],
    lengths: Seq[int],
    stats: SpecStats | None,
    now: float | None,
    request_id: str | None = None,
) -> RequestOutput:
    """Return the output of a request from those of its sequences, some of which may be left out.

    Args:
        request: in any state.
        outputs: of its sequences.
        lengths: number of tokens that each of its sequences has generated.
        stats: its statistics of speculative decoding; None without a draft.
        now: current time in seconds, on the clock of its time stamps; None: its metrics are not computed.
        request_id: the id in the output; None: that of the request.
    """
    return RequestOutput(
        request.request_id if request_id is None else request_id,
        request.prompt,
        request.prompt_token_ids,
        outputs,
        request.seed,
        request.num_dropped_tokens,
        _NO_METRICS if now is None else _metrics(request, lengths, stats, now),
        request.prompt_logprobs,
        request.num_cached_tokens,
    )


def _returned(request: Request) -> list[Sequence]:
    """Return the request's sequences; with best_of > n, the n of the highest log-probability per token, best first."""
    if request.params.num_sequences == request.params.n:
        return request.sequences

    def mean(s: Sequence) -> float:
        total = _cumulative(s)
        return total / s.num_output_tokens if total is not None and s.num_output_tokens and not s.error else -math.inf

    return sorted(request.sequences, key=mean, reverse=True)[: request.params.n]


_NO_METRICS = RequestMetrics(0, 0, 0.0, None, 0.0)


def _metrics(request: Request, lengths: Seq[int], stats: SpecStats | None, now: float) -> RequestMetrics:
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
        queue_sec=(request.scheduled_sec or now) - request.arrival_sec,
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
