"""What a generation returns: plain dataclasses, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import ResultError


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, under the model's raw distribution."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """Its text on its own; None without a tokenizer."""


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text."""

    index: int
    """Which of the request's n texts."""
    text: str
    """Empty without a tokenizer."""
    token_ids: list[int]
    """All generated tokens; an end token or the tokens of a stop string are among them."""
    finish_reason: str | None
    """stop (end token or stop string), length (max_tokens or context), abort, or error; None: not finished."""
    stop_reason: int | str | None = None
    """The token or string that ended it, for finish_reason stop."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: token id -> Logprob, the drawn one first. None unless asked for."""
    error: str | None = None
    """What went wrong, in one line, for finish_reason error."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the generated tokens' log-probabilities; None where logprobs were not asked for."""
        if self.logprobs is None:
            return None
        return sum(found[t].logprob for t, found in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True)
class SpeculationMetrics:
    """What speculation did for one request, over all n texts."""

    num_proposed: int
    """Tokens that the drafter proposed and the model looked at."""
    num_accepted: int
    """Proposals that the model agreed with."""
    num_rejected: int
    """Proposals that it contradicted, one a verify step at most: those behind one were never judged."""
    num_verify_steps: int
    """Times that proposals were looked at; each of them gives one token more than it accepts."""
    mean_accepted_length: float | None
    """num_accepted / num_verify_steps; None when nothing was proposed."""
    draft_share: float
    """Time in the drafter, as a share of all time in drafter, engine and sampler."""


@dataclass(frozen=True)
class RequestMetrics:
    """What one request took, in seconds of wall time."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Over all n texts."""
    ttft_sec: float
    """Time to first token: from the request's arrival, waiting included."""
    tpot_sec: float | None
    """Time per output token after the first, averaged over the longest text; None for a single token."""
    total_sec: float
    speculation: SpeculationMetrics | None = None
    """None without a drafter."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything that came of one request."""

    request_id: int
    prompt: str | None
    """The prompt's text; None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    """With the same seed, model and parameters the request gives the same texts again."""
    num_dropped_tokens: int
    """Prompt tokens that did not fit the sliding window when generation began."""
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token: token id -> Logprob, the prompt's own first; None for the first token, which has no
    context. None unless asked for."""

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(o.finish_reason is not None for o in self.outputs)

    def check(self) -> RequestOutput:
        """Return this output. Raises ResultError where one of its sequences has failed."""
        for o in self.outputs:
            if o.error is not None:
                raise ResultError(o.error)
        return self


@dataclass(frozen=True)
class Delta:
    """What one step added to one text."""

    request_id: int
    index: int
    text: str
    """Newly certain text; may be empty."""
    finish_reason: str | None
    """Set when the text has ended."""
    num_tokens: int = 1
    """Tokens of the text that the step added: several where proposals were accepted."""
    error: str | None = None
    """What went wrong, in one line, for finish_reason error."""


@dataclass(frozen=True)
class PerplexityOutput:
    """How likely a model finds a text."""

    num_tokens: int
    """Tokens scored: all but the first, which has no context."""
    num_characters: int | None
    """Characters of the scored text; None where token ids were given."""
    log_likelihood: float
    """Sum over the tokens, in nats."""
    perplexity: float
    """exp(-log_likelihood / num_tokens)."""


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """How likely a model finds a continuation after its context."""

    token_ids: list[int]
    """Tokens of the continuation."""
    token_logprobs: list[float]
    """Log-probability of each of them, given the context and those before it."""
    log_likelihood: float
    """Sum of token_logprobs, in nats."""
    is_greedy: bool
    """Whether each token is the most likely one: greedy decoding of the context gives the continuation."""
    num_tokens: int
    """Tokens of the continuation."""
    num_dropped_tokens: int
    """Tokens at the context's start that did not fit the context length."""
