"""Requests and their sequences: token lists, the window that the model sees, and when a text ends.

One request makes n sequences (samples). The first is fed the prompt; its siblings fork it afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.text import OutputText

if TYPE_CHECKING:
    from nanoinfer.outputs import Delta, Logprob


def window_start(num_tokens: int, block_size: int, stride: int) -> int:
    """Return the first token that the model sees of a text of `num_tokens`, when the window slides.

    A function of the length alone, so that a text continues the same whether it was generated here or
    given as a prompt. The window holds between block_size + 1 - stride and block_size tokens; stride 1 is
    nanoGPT's crop to the last block_size tokens.

        block_size 4, stride 2:   4 tokens -> 0    5 -> 2    6 -> 2    7 -> 4
    """
    excess = max(0, num_tokens - block_size)
    return -(-excess // stride) * stride


@dataclass(eq=False)
class Request:
    """One prompt with its parameters."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...] = ()
    """Tokens that end a text: the model's end of text (unless ignored) and the stop tokens."""
    sequences: list[Sequence] = field(default_factory=list)
    num_dropped_tokens: int = 0
    """Tokens of the prompt that no token is drawn from, because the window began after them."""
    arrival_sec: float = 0.0
    """When it came, on the caller's clock."""
    first_token_sec: float = 0.0
    """When its first token was drawn, on the caller's clock; 0 before."""
    finished_sec: float = 0.0
    """When its last text ended, on the caller's clock; 0 before."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities of the prompt's tokens, None for the first; None where none were asked for."""
    deltas: deque[Delta] | None = None
    """Queue of what its sequences have produced and the caller has not read; None: the caller does not stream."""

    @property
    def finished(self) -> bool:
        """Whether all of its texts have ended."""
        return all(s.finish_reason is not None for s in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One text in the making."""

    request: Request
    sample_index: int
    text: OutputText
    block_size: int
    token_ids: list[int]
    """Prompt and output."""
    handle: int | None = None
    """The engine's name for it, while it is open."""
    start: int = 0
    """First token of the window that the engine holds."""
    num_cached: int = 0
    """Tokens of the window that the engine holds, or is about to."""
    num_inflight_tokens: int = 0
    """Tokens drawn for it that are still on the device: 1 while the engine runs ahead, else 0."""
    last_draw_step: int = 0
    """The step that last drew a token for it, or admitted it: the longest-waiting goes first."""
    finish_reason: str | None = None
    """stop, length, abort or error, once it has ended."""
    stop_reason: int | str | None = None
    """The token or string that ended it, for finish_reason stop."""
    error: str | None = None
    """What went wrong, for finish_reason error."""

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.request.params

    @property
    def seed(self) -> int:
        """The request's seed."""
        return self.request.seed

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the text."""
        return self.request.end_token_ids

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.request.prompt_token_ids

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate: as many as the context holds where the parameters leave it open."""
        if self.params.max_tokens is not None:
            return self.params.max_tokens
        return max(1, self.block_size + 1 - len(self.prompt_token_ids), self.params.min_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> Seq[int]:
        """The tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_tokens(self) -> int:
        """Prompt and output, tokens that have not been read yet included."""
        return len(self.token_ids) + self.num_inflight_tokens

    @property
    def ends_when_read(self) -> bool:
        """Whether the tokens that have not been read yet are certain to be its last."""
        if not self.num_inflight_tokens:
            return False
        full = self.params.overflow != "slide" and self.num_tokens > self.block_size
        return full or self.num_output_tokens + self.num_inflight_tokens >= self.max_tokens

    @property
    def wanted_start(self) -> int:
        """First token of the window that the model must see to draw the next token."""
        if self.params.overflow != "slide":
            return 0
        stride = self.params.slide_stride or max(1, self.block_size // 2)
        return window_start(self.num_tokens, self.block_size, stride)

    def append(self, token_id: int) -> None:
        """Add a generated token and decide whether the text ends with it.

        The order of reasons: end token, stop string, max_tokens, context.
        """
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        may_stop = self.num_output_tokens >= self.params.min_tokens
        if may_stop and token_id in self.end_token_ids:
            self.text.flush(may_stop=False)
            return self._finish("stop", token_id)
        stop = self.text.push(token_id, may_stop=may_stop)
        full = self.params.overflow != "slide" and len(self.token_ids) > self.block_size
        ends = self.num_output_tokens >= self.max_tokens or full
        if stop is None and ends:
            stop = self.text.flush(may_stop=may_stop)
        if stop is not None:
            self._finish("stop", stop)
        elif ends:
            self._finish("length", None)

    def abort(self, error: str | None = None) -> None:
        """End the output where it is: finish_reason is abort, or error where one is given.

        An exception may have left the text half-updated, so its end is taken where it can still be decoded.
        """
        if self.finish_reason is None:
            self.error = error
            self._finish("abort" if error is None else "error", None)
            with suppress(NanoinferError):
                self.text.flush(may_stop=False)

    def _finish(self, reason: str, stop: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop
