"""Requests and their sequences: tokens, the window that the model attends to, and the conditions that end a sequence.

A request has n sequences (samples). The first processes the prompt; the others are forked from it afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from nanoinfer.config import EngineLimits
from nanoinfer.engines.base import Handle
from nanoinfer.errors import NanoinferError, too_long
from nanoinfer.outputs import Delta, Logprob, RequestOutput
from nanoinfer.sampling_params import BadWords, BeamSearchParams, SamplingParams
from nanoinfer.scheduling.text import OutputText
from nanoinfer.utils.arrays import Array

CacheKey = tuple[str | None, int]
"""The salt and the adapter of a request, which the keys and values of its tokens depend on."""


class TokenGrammar(Protocol):
    """What a sequence needs of the grammar that its output must match."""

    def push(self, token_id: int) -> bool:
        """Add a token; return whether the output is complete. Raises NanoinferError if it is not permitted."""


def window_start(num_tokens: int, block_size: int, stride: int) -> int:
    """Return the first token in the sliding window of a sequence of `num_tokens` tokens.

    It depends on the length only, so that a sequence continues in the same way whether its tokens were generated or
    given as a prompt. The window holds between block_size + 1 - stride and block_size tokens. Stride 1 is nanoGPT's
    crop to the last block_size tokens.

        block_size 4, stride 2:   4 tokens -> 0    5 -> 2    6 -> 2    7 -> 4
    """
    excess = max(0, num_tokens - block_size)
    return -(-excess // stride) * stride


@dataclass(eq=False)
class PromptReads:
    """The logits or the final hidden states of a prompt that a request reads.

    A request that reads them at every token of its prompt generates nothing: its sequence ends when they are read. One
    that has no target for the last token samples there.
    """

    target_ids: list[int]
    """The token that follows each token of the prompt, from the first on."""
    next: int
    """Position in the prompt of the next token whose logits are read."""
    read: Callable[[Array, list[int]], None]
    """Called for each part of the prompt, in order: with logits (M, V) or hidden states (M, C), and the tokens that
    follow."""
    hidden: bool = False
    """Whether hidden states are read, not logits."""

    @property
    def num_unread(self) -> int:
        """Number of positions that are not read yet."""
        return len(self.target_ids) - self.next

    def num_read(self, num_cached: int) -> int:
        """Return how many of them a step reads after which `num_cached` tokens are in the KV cache."""
        return max(0, min(num_cached, len(self.target_ids)) - self.next)


@dataclass
class SpecStats:
    """Statistics of speculative decoding for one request."""

    num_proposed: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_verify_steps: int = 0
    """Number of times that a sequence of the request was extended by proposals."""
    draft_sec: float = 0.0
    """Time of the drafter, including the time for other sequences in the batch."""
    step_sec: float = 0.0
    """Time of engine and sampler in the request's steps, including the time for other sequences in the batch."""


@dataclass(eq=False, repr=False)
class Request:
    """One prompt with its parameters and sequences."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence: the model's end-of-text tokens (unless ignored) and the stop tokens."""
    bad_words: BadWords | None = None
    """The tokens of its parameters' bad_words; None: there are none."""
    sequences: list[Sequence] = field(default_factory=list)
    num_dropped_tokens: int = 0
    """Tokens at the start of the prompt that are outside the sliding window of the first generated token."""
    arrival_sec: float = 0.0
    """Time when the request was made, on the core's clock."""
    scheduled_sec: float = 0.0
    """Time when it was first part of a step, on the core's clock; 0 before."""
    first_token_sec: float = 0.0
    """Time when its first token was sampled, on the core's clock; 0 before."""
    finished_sec: float = 0.0
    """Time when its last sequence finished, on the core's clock; 0 before."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities of the prompt's tokens, None for the first; None if not requested."""
    queue: deque[Delta | RequestOutput] | None = None
    """Gets its deltas, and its output at the end. Several requests may share it. None: the request is not streamed."""
    output: RequestOutput | None = None
    """Its output, from the end of the step that ended it."""
    priority: int = 0
    """Requests of smaller priority are admitted first."""
    salt: str | None = None
    """Only requests of the same salt share prefixes."""
    adapter: int = 0
    """The engine's number of the adapter that processes its sequences; 0: none does."""
    beams: BeamSearchParams | None = None
    """Parameters of a beam search, whose beams are the sequences; None: the sequences are sampled."""
    prompt_reads: PromptReads | None = None
    """The logits of the prompt that are read; None: none."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache when the request was first admitted."""
    speculation: SpecStats | None = None
    """None: no step of it had a drafter."""

    @property
    def width(self) -> tuple[str, int]:
        """The parameter that sets the number of its sequences, and the number: ("n", 4)."""
        name = "beam_width" if self.beams is not None else "n" if self.params.best_of is None else "best_of"
        return name, self.params.num_sequences

    @property
    def cache_key(self) -> CacheKey:
        """Only requests of the same key share prefixes."""
        return self.salt, self.adapter

    @property
    def prompt_only(self) -> bool:
        """Whether it generates nothing: the logits of all tokens of its prompt are read."""
        return self.prompt_reads is not None and len(self.prompt_reads.target_ids) == len(self.prompt_token_ids)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: it is neither a beam search nor only scored."""
        return self.beams is None and not self.prompt_only

    @property
    def finished(self) -> bool:
        """Whether all its sequences are finished."""
        return all(s.finish_reason is not None for s in self.sequences)

    def check(self, limits: EngineLimits) -> None:
        """Raise NanoinferError if it can never be admitted, or if its prompt exceeds the context length."""
        params, (name, width) = self.params, self.width
        if width > limits.max_num_seqs:
            raise NanoinferError(
                f"{name}={width} is more than max_num_seqs={limits.max_num_seqs}: raise it, or lower {name}"
            )
        if params.slide_stride is not None and params.slide_stride > limits.block_size:
            raise NanoinferError(
                f"slide_stride={params.slide_stride} is more than the context length {limits.block_size}: lower it"
            )
        num_prompt = len(self.prompt_token_ids)
        if num_prompt < 1:
            raise NanoinferError("the prompt has no tokens: pass at least one")
        if num_prompt > limits.block_size and params.overflow != "slide":
            raise too_long(f"{num_prompt}", limits.block_size)
        need = min(num_prompt + self.sequences[0].max_tokens - 1, limits.block_size)
        if need > limits.max_num_cached_tokens:
            raise NanoinferError(
                f"the request may grow to {need} cached tokens, the KV cache holds {limits.max_num_cached_tokens}:"
                " raise kv_cache_memory, or lower max_tokens"
            )


@dataclass(eq=False, repr=False)
class Sequence:
    """One sequence of a request: prompt and generated tokens."""

    request: Request
    sample_index: int
    text: OutputText
    block_size: int
    token_ids: list[int]
    """Tokens of prompt and output."""
    handle: Handle | None = None
    """Handle of the engine's sequence, while it is open."""
    start: int = 0
    """First token of the window in the KV cache."""
    num_cached: int = 0
    """Tokens of the window that are in the KV cache or in the scheduled step."""
    admitted: bool = False
    """Whether it has been running; it waits again if it was preempted."""
    awaits_beams: bool = False
    """Whether it is a beam that was preempted after its logits were read: it waits for those of the other beams."""
    num_inflight_tokens: int = 0
    """Sampled tokens that have not been read from the device: 1 with overlap scheduling, else 0."""
    last_sampled_step: int = 0
    """The step that last sampled a token for it, read its logits, or admitted it. The smallest has priority for
    prefill."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the generated tokens, if it is the result of a beam search."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Log-probabilities of each sampled token, if they were requested. It may have more items than there are tokens."""
    sampled_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each sampled token, if it is computed. It may have more items than there are tokens."""
    draft_accepted: list[bool] = field(default_factory=list)
    """With a draft: for each generated token whether it was proposed. It may have more items than there are tokens."""
    grammar: TokenGrammar | None = None
    """State of the grammar that the output must match; None: it may be anything."""
    finish_reason: str | None = None
    """stop, length, abort or error; None: not finished."""
    stop_reason: int | str | None = None
    """The token or string that ended it, for finish_reason stop."""
    error: str | None = None
    """The error in one line, for finish_reason error."""

    params: SamplingParams = field(init=False)
    """The request's parameters."""
    seed: int = field(init=False)
    """The request's seed."""
    end_token_ids: tuple[int, ...] = field(init=False)
    """Tokens that end the sequence."""
    prompt_token_ids: list[int] = field(init=False)
    """Tokens of the prompt."""
    max_tokens: int = field(init=False)
    """Maximum number of tokens to generate: params.max_tokens, or up to the context length if that is None."""
    slides: bool = field(init=False)
    """Whether its window slides past the context length; else the sequence ends there."""

    def __post_init__(self) -> None:
        request = self.request
        self.params, self.seed, self.end_token_ids = request.params, request.seed, request.end_token_ids
        self.prompt_token_ids, params = request.prompt_token_ids, request.params
        num_prompt = len(self.prompt_token_ids)
        self.max_tokens = max(1, self.block_size + 1 - num_prompt, params.min_tokens)
        if params.max_tokens is not None:
            self.max_tokens = params.max_tokens
        self.slides = params.overflow == "slide"
        self._stops_from = num_prompt + params.min_tokens
        limit = num_prompt + self.max_tokens  # tokens of prompt and output that end it
        self._ends_at = limit if self.slides else min(limit, self.block_size + 1)

    @property
    def bad_words(self) -> BadWords | None:
        """The request's bad words."""
        return self.request.bad_words

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> Seq[int]:
        """The tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output, including in-flight tokens."""
        return len(self.token_ids) + self.num_inflight_tokens

    @property
    def ends_in_flight(self) -> bool:
        """Whether its in-flight tokens are the last, whatever their values."""
        if not self.num_inflight_tokens:
            return False
        return self.num_tokens >= self._ends_at

    @property
    def next_start(self) -> int:
        """First token of the window that the next token is sampled from."""
        if not self.slides:
            return 0
        stride = self.params.slide_stride or max(1, self.block_size // 2)
        return window_start(self.num_tokens, self.block_size, stride)

    @property
    def num_uncached(self) -> int:
        """Number of tokens in its window that are not in the KV cache."""
        if not self.slides:
            return len(self.token_ids) + self.num_inflight_tokens - self.num_cached
        start = self.next_start
        return self.num_tokens - start - (self.num_cached if start == self.start else 0)

    @property
    def awaits_fork(self) -> bool:
        """Whether it waits for its first sibling to process the prompt."""
        return self.sample_index > 0 and self.handle is None and not self.num_output_tokens

    def append(self, token_id: int) -> None:
        """Append a generated token and check whether it ends the sequence.

        The conditions are checked in this order: end token, stop string, complete by its grammar or a repeated call,
        max_tokens, context length.
        """
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        length = len(self.token_ids)
        may_stop = length >= self._stops_from
        if may_stop and token_id in self.end_token_ids:
            if self.params.include_stop_str_in_output:
                self.text.push(token_id, may_stop=False)
            self.text.flush(may_stop=False)
            return self._finish("stop", token_id)
        complete = self.grammar is not None and self.grammar.push(token_id)
        stop = self.text.push(token_id, may_stop=may_stop)
        ends = complete or length >= self._ends_at
        if stop is None and ends:
            stop = self.text.flush(may_stop=may_stop)
        if stop is not None or complete:
            self._finish("stop", stop)
        elif ends:
            self._finish("length", None)

    def finish_if_scored(self) -> None:
        """End the sequence if its request generates nothing, and all logits that it reads were read."""
        reads = self.request.prompt_reads
        if reads is not None and not reads.num_unread and self.request.prompt_only and self.finish_reason is None:
            self._finish("stop", None)

    def abort(self, error: str | None = None) -> None:
        """End the sequence now: finish_reason is error if one is given, else abort.

        An exception may have left the text half-updated; its remaining bytes are added only if they can be decoded.
        """
        if self.finish_reason is None:
            self.error = error
            self._finish("abort" if error is None else "error", None)
            with suppress(NanoinferError):
                self.text.flush(may_stop=False)

    def _finish(self, reason: str, stop: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop
