"""A request of `AsyncLLM`: shared by its iterator in an event loop, and by the engine thread.

The engine thread sends the deltas of each step. They are merged here until the iterator takes them: of a token, only
its count and its text are stored a second time, so a slow reader needs no more memory than the output has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanoinfer.core import output_processor as request_outputs
from nanoinfer.core.output_processor import Logprobs
from nanoinfer.outputs import CompletionOutput, Delta, RequestOutput
from nanoinfer.scheduling.sequence import Request, Sequence

CUMULATIVE, DELTA, FINAL_ONLY = OUTPUT_KINDS = ("cumulative", "delta", "final_only")


@dataclass
class _Received:
    """What the event loop has received of one output."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    text_taken: int = 0
    """Characters that the iterator has returned."""
    tokens_taken: int = 0
    """Tokens that the iterator has returned."""
    changed: bool = False
    """Whether a delta was received since the iterator took the output."""

    @classmethod
    def of(cls, s: Sequence) -> _Received:
        """Return what it is before the first delta: the tokens that the request gives, as taken."""
        text, count = s.text.text[: s.num_given_chars], s.num_given_tokens
        return cls(text, count, None, len(text), count)


class AsyncRequest:
    """The state of one request.

    Args:
        request_id: given by the caller, or made.
        output_kind: one of OUTPUT_KINDS.
        loop: the event loop of its iterator.
        wake: is called in the event loop when there is something to take, once for all requests that share it.
    """

    def __init__(
        self, request_id: str, output_kind: str, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]
    ) -> None:
        self.request_id, self.output_kind, self.loop, self.wake = request_id, output_kind, loop, wake
        self.request: Request | None = None  # until it is prepared
        self.dropped = False  # whether the iterator has ended; nothing is sent any more
        self.aborted = False  # whether `AsyncLLM.abort` was called; the output so far is sent
        self._received: list[_Received] = []
        self._end: RequestOutput | Exception | None = None
        self.ready = False
        """Whether there is something to take."""

    # In the thread of the event loop ---------------------------------------------------------------------

    def receive(self, item: Delta | RequestOutput | Exception) -> None:
        """Receive a delta, or the end of the request: its whole output, or an error."""
        if isinstance(item, Delta):
            self._merge(item)
        elif self._end is None:
            self._end = item
        self.ready = True

    def _merge(self, delta: Delta) -> None:
        assert self.request is not None
        if not self._received:
            self._received = [_Received.of(s) for s in self.request.sequences]
        received = self._received[delta.index]
        received.text += delta.text
        received.num_tokens += delta.num_tokens
        received.finish_reason = delta.finish_reason
        received.changed = True

    @property
    def ended(self) -> bool:
        """Whether the end of the request was received."""
        return self._end is not None

    def take(self, logprobs: Logprobs, clock: Callable[[], float]) -> RequestOutput:
        """Return what was received since the last call, in the form that `output_kind` says.

        Args:
            logprobs: of the core.
            clock: of the core.

        Raises:
            Exception: the request has failed.
        """
        self.ready = False
        end = self._end
        if isinstance(end, Exception):
            raise end
        if end is not None:
            outputs = end.outputs if self.output_kind != DELTA else self._rest(end)
            return replace(end, request_id=self.request_id, outputs=outputs)
        assert self.request is not None
        outputs, lengths = [], []
        for s, received in zip(self.request.sequences, self._received, strict=True):
            if received.changed or self.output_kind == CUMULATIVE:
                outputs.append(_completion(s, received, logprobs, self.output_kind))
                received.text_taken, received.tokens_taken = len(received.text), received.num_tokens
                received.changed = False
            lengths.append(received.num_tokens)
        return request_outputs.assemble(self.request, outputs, lengths, None, clock(), self.request_id)

    def _rest(self, end: RequestOutput) -> list[CompletionOutput]:
        """Return what the iterator has not returned yet of the whole output."""
        assert self.request is not None
        received = self._received or [_Received.of(self.request.sequences[o.index]) for o in end.outputs]
        given, rest = len(self.request.params.output_token_ids), []
        for o, r in zip(end.outputs, received, strict=True):
            if r.changed or r.finish_reason is None:
                logprobs = None if o.logprobs is None else o.logprobs[r.tokens_taken - given :]
                text, token_ids = o.text[r.text_taken :], o.token_ids[r.tokens_taken :]
                accepted = None if o.draft_accepted is None else o.draft_accepted[r.tokens_taken :]
                new = replace(o, text=text, token_ids=token_ids, logprobs=logprobs, draft_accepted=accepted)
                rest.append(new)
        return rest


def _completion(s: Sequence, received: _Received, logprobs: Logprobs, output_kind: str) -> CompletionOutput:
    """Return an output as far as it was received. The engine thread may have appended further tokens to `s`."""
    at, text = 0, received.text
    if output_kind == DELTA:
        at, text = received.tokens_taken, text[received.text_taken :]
    end, first, given = received.num_tokens, len(s.prompt_token_ids), s.num_given_tokens
    values, total = logprobs.of(s), None
    if values is not None:
        token_ids, values = s.token_ids[first + given : first + end], values[: end - given]
        total = sum(found[token].logprob for token, found in zip(token_ids, values, strict=True))
    return CompletionOutput(
        s.sample_index,
        text,
        s.token_ids[first + at : first + end],
        received.finish_reason,
        s.stop_reason if received.finish_reason is not None else None,
        None if values is None else values[max(0, at - given) :],
        cumulative_logprob=total,
        draft_accepted=request_outputs.accepted(s, at, end),
    )
