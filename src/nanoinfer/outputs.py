"""Results of generation and scoring: plain dataclasses with vLLM's names.

Those that are made for each token are not frozen, which would make creating one four times slower.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nanoinfer.errors import result_error


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position, under the model's raw distribution."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """Rank among all tokens; 1 is the most likely."""
    decoded_token: str | None
    """Text of this token alone; None without a tokenizer."""
    token_bytes: tuple[int, ...] | None = None
    """Bytes of a token that is not whole UTF-8, for which `decoded_token` has U+FFFD; None: those of the text."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a chat model wrote."""

    id: str
    """"call_" and random characters; a result names it as its tool_call_id."""
    name: str
    arguments: str
    """JSON text of an object; a prefix of one if the answer ended within the call."""

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are the JSON of an object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True)
class ChatMessage:
    """The answer of a chat model, by parts."""

    content: str | None
    """Text for the user; None if there are only calls."""
    reasoning: str | None = None
    """Text that the model wrote before its answer, within markers; None without any."""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def ends_in_call(self) -> bool:
        """Whether the answer ended within its last call, by a limit or a stop string."""
        return bool(self.tool_calls) and not self.tool_calls[-1].is_complete

    def as_message(self) -> dict[str, Any]:
        """Return it as a message for `LLM.chat`. A call that was cut off is left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        calls = [call for call in self.tool_calls if call.is_complete]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message if calls or self.content is not None else {**message, "content": ""}


@dataclass(frozen=True)
class ContentDelta:
    """New text of a message's content."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """New text of a message's reasoning."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """The beginning of a call, with id and name and without arguments; or more of its arguments."""

    index: int
    """Index of the call in the message."""
    id: str | None
    name: str | None
    arguments: str
    """JSON text, in pieces."""


AnswerDelta = ContentDelta | ReasoningDelta | CallDelta


@dataclass
class CompletionOutput:
    """One generated output of a request."""

    index: int
    """Index among the request's n outputs; with best_of > n and in beam search, the best is first."""
    text: str
    """Generated text; empty without a tokenizer."""
    token_ids: list[int]
    """All generated tokens, including an end token or the tokens of a stop string."""
    finish_reason: str | None
    """stop (end token or stop string), length (max_tokens or context length), abort, or error; None: not finished."""
    stop_reason: int | str | None = None
    """The token or string that ended the output, for finish_reason stop."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: token id -> Logprob, the sampled token first. None if not requested."""
    error: str | None = None
    """The error in one line, for finish_reason error."""
    cumulative_logprob: float | None = None
    """Sum of these tokens' log-probabilities; None without logprobs, best_of and beam search."""
    draft_accepted: list[bool] | None = field(default=None, compare=False)
    """For each token, whether a drafter proposed it and the model accepted it; None without a draft."""
    message: ChatMessage | None = field(default=None, compare=False)
    """Reasoning, content and tool calls of `text`; chats only. Deltas of `AsyncLLM` have it when they are the last."""
    message_deltas: list[AnswerDelta] | None = field(default=None, compare=False)
    """What `text` adds to the message, in deltas of `AsyncLLM`; None if it adds itself to the content."""
    num_reasoning_tokens: int | None = field(default=None, compare=False)
    """Tokens of the reasoning with its markers; None if the model writes none, and until the output is finished."""


@dataclass(frozen=True)
class SpeculationMetrics:
    """Statistics of speculative decoding for one request, over all n outputs."""

    num_proposed: int
    """Proposed tokens that a step verified."""
    num_accepted: int
    """Proposed tokens that were accepted."""
    num_rejected: int
    """Proposed tokens that were rejected, at most one in a verify step: the tokens after it are discarded."""
    num_verify_steps: int
    """Steps that verified a proposal. Each produces one token more than it accepts."""
    mean_accepted_length: float | None
    """num_accepted / num_verify_steps; None if nothing was proposed."""
    draft_share: float
    """Fraction of the time in drafter, engine and sampler that was spent in the drafter."""


@dataclass
class RequestMetrics:
    """Token counts and latencies of one request, in seconds of wall time."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens of all outputs, including those that best_of generates and does not return."""
    ttft_sec: float
    """Time to first token from the request's arrival, including the time in the queue."""
    tpot_sec: float | None
    """Mean time per output token after the first, in the longest output; None for a single token."""
    total_sec: float
    speculation: SpeculationMetrics | None = None
    """Statistics of speculative decoding; None without a draft."""
    queue_sec: float = 0.0
    """Time from the request's arrival to the first step that it is part of."""


@dataclass
class RequestOutput:
    """The result of one request."""

    request_id: int | str
    """Number of the request; in `AsyncLLM`, the string that the caller gave or that was made."""
    prompt: str | None
    """Text of the prompt; None if token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    """Seed of the request. The same seed, model and parameters produce the same outputs again."""
    num_dropped_tokens: int
    """Tokens at the start of the prompt that were outside the sliding window when generation began."""
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token: token id -> Logprob, the prompt's token first; None for the first token, which has no
    context. None if not requested."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache already, because an earlier request begins with them."""

    @property
    def finished(self) -> bool:
        """Whether all outputs are finished."""
        return all(o.finish_reason is not None for o in self.outputs)

    def check(self) -> RequestOutput:
        """Return this output. Raises ResultError if one of its sequences failed."""
        for o in self.outputs:
            if o.error is not None:
                raise result_error(o.error)
        return self


@dataclass(frozen=True)
class BeamSearchSequence:
    """One finished output of a beam search."""

    token_ids: list[int]
    """All generated tokens, including an end token."""
    cum_logprob: float
    """Sum of their log-probabilities."""
    score: float
    """cum_logprob / (number of tokens ** length_penalty), by which the outputs are ordered."""
    text: str
    """Generated text; empty without a tokenizer."""
    finish_reason: str | None
    """stop (end token) or length (max_tokens or context length)."""
    stop_reason: int | str | None = None
    """The end token, for finish_reason stop."""


@dataclass(frozen=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt."""

    sequences: list[BeamSearchSequence]
    """beam_width outputs, the one with the highest score first; none if the search failed."""
    error: str | None = None
    """Why the search failed, in one line."""


@dataclass(slots=True)
class Delta:
    """The tokens and text that one step added to one output."""

    request_id: int
    index: int
    text: str
    """New text that later tokens cannot change; may be empty."""
    finish_reason: str | None
    """Set if the output is finished, else None."""
    num_tokens: int = 1
    """Tokens that the step added: several if proposals were accepted."""
    error: str | None = None
    """The error in one line, for finish_reason error."""


@dataclass(frozen=True)
class PerplexityOutput:
    """Perplexity of a text under a model."""

    num_tokens: int
    """Scored tokens: all but the first, which has no context."""
    num_characters: int | None
    """Characters of the scored text; None if token ids were given."""
    log_likelihood: float
    """Sum of the tokens' log-probabilities, in nats."""
    perplexity: float
    """exp(-log_likelihood / num_tokens)."""


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """Log-likelihood of a continuation given its context."""

    token_ids: list[int]
    """Tokens of the continuation."""
    token_logprobs: list[float]
    """Log-probability of each token, given the context and the tokens before it."""
    log_likelihood: float
    """Sum of token_logprobs, in nats."""
    is_greedy: bool
    """Whether each token is the most likely one, so that greedy decoding of the context produces the continuation."""
    num_tokens: int
    """Tokens of the continuation."""
    num_dropped_tokens: int
    """Tokens at the start of the context that were dropped to fit the context length."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding."""

    values: array[float]
    """Its values in float32, of type code "f"."""

    @property
    def embedding(self) -> list[float]:
        """The values as a list."""
        return self.values.tolist()

    @property
    def hidden_size(self) -> int:
        """Number of values."""
        return len(self.values)


@dataclass(frozen=True)
class ScoringOutput:
    """The score of a document for a query."""

    score: float
    """The cosine of the embeddings of query and document."""


T = TypeVar("T")


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T]):
    """What a request that generates nothing results in."""

    request_id: int | str
    outputs: T
    prompt_token_ids: list[int]
    """Tokens of the input, with those that the tokenizer adds; of a score those of query and document."""
    num_cached_tokens: int = 0
    """Tokens of them that were in the KV cache already."""
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The embedding of one input."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The score of one pair of query and document."""
