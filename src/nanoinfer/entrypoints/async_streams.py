"""The requests of `AsyncLLM` in an event loop: the iterator over one request's outputs, and over those of several.

The engine thread (async_engine.py) sends the deltas of each step to an `AsyncRequest`. They are merged there until the
iterator takes them: of a token, only its count and its text are stored a second time, so a slow reader needs no more
memory than the output has. A stream owns its request: if it is left or deleted, the request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from nanoinfer.core import output_processor as request_outputs
from nanoinfer.entrypoints.chat import AnswerReader
from nanoinfer.inputs.prompts import numbered
from nanoinfer.outputs import CompletionOutput, Delta, RequestOutput
from nanoinfer.scheduling.sequence import Request
from nanoinfer.scheduling.sequence import Sequence as Text
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    from nanoinfer.entrypoints.async_engine import AsyncEngine

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
    def of(cls, s: Text) -> _Received:
        """Return what it is before the first delta: the tokens that the request gives, as taken."""
        text, count = s.text.text[: s.num_given_chars], s.num_given_tokens
        return cls(text, count, None, len(text), count)


class AsyncRequest:
    """The state of one request, which event loop and engine thread share.

    Args:
        request_id: given by the caller, or made.
        output_kind: one of OUTPUT_KINDS.
    """

    loop: asyncio.AbstractEventLoop
    """The event loop of its iterator."""
    wake: Callable[[], None]
    """Called in the event loop when there is something to take, once for all requests that share it."""
    request: Request | None = None
    """The core's; None until it is prepared."""
    dropped = False
    """Whether the iterator has ended; nothing is sent any more."""
    aborted = False
    """Whether `AsyncLLM.abort` was called; the output so far is sent."""
    ready = False
    """Whether there is something to take."""

    def __init__(self, request_id: str, output_kind: str) -> None:
        self.request_id, self.output_kind = request_id, output_kind
        self._received: list[_Received] = []
        self._end: RequestOutput | Exception | None = None

    # In the thread of the event loop ---------------------------------------------------------------------

    def receive(self, item: Delta | RequestOutput | Exception) -> None:
        """Receive a delta, or the end of the request: its whole output, or an error."""
        self.ready = True
        if not isinstance(item, Delta):
            self._end = self._end or item
            return
        assert self.request is not None
        if not self._received:
            self._received = [_Received.of(s) for s in self.request.sequences]
        received = self._received[item.index]
        received.text += item.text
        received.num_tokens += item.num_tokens
        received.finish_reason = item.finish_reason
        received.changed = True

    @property
    def ended(self) -> bool:
        """Whether the end of the request was received."""
        return self._end is not None

    def take(self, now: float) -> RequestOutput:
        """Return what was received since the last call, in the form that `output_kind` says.

        Args:
            now: seconds on the core's clock.

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
                outputs.append(_completion(s, received, self.output_kind))
                received.text_taken, received.tokens_taken = len(received.text), received.num_tokens
                received.changed = False
            lengths.append(received.num_tokens)
        return request_outputs.assemble(self.request, outputs, lengths, None, now, self.request_id)

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


def _completion(s: Text, received: _Received, output_kind: str) -> CompletionOutput:
    """Return an output as far as it was received. The engine thread may have appended further tokens to `s`."""
    at, text = 0, received.text
    if output_kind == DELTA:
        at, text = received.tokens_taken, text[received.text_taken :]
    end, first, given = received.num_tokens, len(s.prompt_token_ids), s.num_given_tokens
    values, total = request_outputs.logprobs_of(s), None
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


class AsyncOutputStream(AsyncIterator[RequestOutput]):
    """Yields the outputs of one request, which it owns. Use it in one task at a time.

    Args:
        request: not registered yet.
        engine: returns what runs the steps.
        making: makes the core's request; yields the workers that run the next part.
        reader: reads the messages of a chat.
        reading: returns the workers that read what takes more than a few milliseconds.
    """

    finished = False
    """Whether the iterator yields nothing more."""
    unread = False
    """Whether the output that was taken last is still to be read."""
    _engine: AsyncEngine | None = None  # until the first iteration

    def __init__(
        self,
        request: AsyncRequest,
        engine: Callable[[], AsyncEngine],
        making: Generator[Workers, None, Request],
        reader: AnswerReader | None,
        reading: Callable[[], Workers],
    ) -> None:
        self._request, self._running, self._making = request, engine, making
        self._reader, self._reading = reader, reading
        self._event = asyncio.Event()
        self.request_id = request.request_id
        """The id that the caller gave, or that was made."""

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        try:
            if self._engine is None:
                self.begin(self._event.set)
            while not self.ready:
                self._event.clear()
                await self._event.wait()
            output = self.take()
            return await self.read(output) if self.unread else output
        except BaseException:  # the task was cancelled, or the request has failed
            self.leave()
            raise

    def begin(self, wake: Callable[[], None]) -> None:
        """Queue the request. `wake` is called when there is something to take."""
        self._request.loop, self._request.wake = asyncio.get_running_loop(), wake
        engine = self._running()
        engine.register(self._request)
        self._engine = engine
        engine.prepare(self._request, self._making)

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return self._request.ready

    def take(self) -> RequestOutput:
        """Return the output that is ready; if it is `unread`, for `read`. Raises the error of a failed request."""
        assert self._engine is not None
        output, reader = self._request.take(self._engine.core.clock()), self._reader
        self.finished = self._request.ended
        self.unread = reader is not None and not reader.is_quick(output)
        return output if reader is None or self.unread else reader.read(output)

    async def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output that was taken with its messages, which a worker reads."""
        assert self._reader is not None
        reader, self.unread = self._reader, False
        return await self._reading().run(lambda: reader.read(output))

    async def aclose(self) -> None:
        """Cancel the request if it is not finished. The iterator yields nothing more."""
        self.leave()

    def leave(self) -> None:
        """Cancel the request if it is not finished."""
        if not self.finished and self._engine is not None and not self._request.ended:
            self._engine.drop(self._request)
        self.finished = True

    def __del__(self) -> None:
        self.leave()


Found = list[tuple[int, RequestOutput]]
"""Pairs of a stream's index and its output."""
Observe = Callable[[Sequence[tuple[int, RequestOutput, bool]]], None]


class Sink(Protocol):
    """Takes outputs in the turn of the event loop in which they arrive."""

    def is_ready(self) -> bool:
        """Return whether it takes outputs now."""

    def write(self, found: Found) -> bool:
        """Take outputs, or return False: the task that reads the streams gets them."""


class MergedStreams(AsyncIterator[Found]):
    """Yields, when there are new outputs, those of all streams: pairs of a stream's index and its output.

    The step of the engine that produces tokens for several streams wakes the task once, not once for each, and not for
    what the `sink` takes. An error of one stream closes all.

    Args:
        streams: not read yet.
        observe: is called with new outputs: the stream's index, its output, and whether it is the last.
    """

    sink: Sink | None = None
    """Takes outputs while the task waits for the next ones."""

    def __init__(
        self,
        streams: Sequence[AsyncOutputStream],
        observe: Observe | None = None,
    ) -> None:
        self._streams, self._observe = streams, observe
        self._open = dict(enumerate(streams))
        self._event = asyncio.Event()
        self._begun = self._waiting = False
        self._left: Found = []  # what the sink did not take; their streams are still open
        self._error: Exception | None = None  # of a request or the sink, for the task

    async def __anext__(self) -> Found:
        try:
            if not self._begun:
                self._begun = True
                for stream in self._streams:
                    stream.begin(self._wake)
            while self._open:
                if self._error is not None:
                    raise self._error
                if found := self._left or self._take_ready():
                    self._left = []
                    for at, (i, output) in enumerate(found):
                        if self._open[i].unread:
                            found[at] = i, await self._open[i].read(output)
                    self._report(found)
                    return found
                self._event.clear()
                self._waiting = True
                try:
                    await self._event.wait()
                finally:
                    self._waiting = False
        except BaseException:  # the task was cancelled, or a request has failed
            self.close()
            raise
        raise StopAsyncIteration

    def _wake(self) -> None:
        """Give what has arrived to the sink, or wake the task."""
        if self._waiting and self.sink is not None and self._error is None and not self._left and self.sink.is_ready():
            try:
                found = self._take_ready()
                if any(self._open[i].unread for i, _ in found) or not self.sink.write(found):
                    self._left = found
                else:
                    self._report(found)
                    if self._open:
                        return
            except Exception as e:
                self._error = e
        self._event.set()

    def _take_ready(self) -> Found:
        return [(i, self._take(i)) for i, stream in self._open.items() if stream.ready]

    def _report(self, found: Found) -> None:
        """Report outputs that were taken, and forget the streams that they end."""
        if self._observe is not None:
            self._observe([(i, output, self._open[i].finished) for i, output in found])
        for i, _ in found:
            if self._open[i].finished:
                del self._open[i]

    def _take(self, i: int) -> RequestOutput:
        if len(self._streams) == 1:
            return self._streams[i].take()
        with numbered(i, len(self._streams)):
            return self._streams[i].take()

    def close(self) -> None:
        """Cancel the requests that are not finished. The iterator yields nothing more."""
        for stream in self._open.values():
            stream.leave()
        self._open, self._left, self.sink = {}, [], None
