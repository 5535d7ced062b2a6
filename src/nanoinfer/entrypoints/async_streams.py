"""The streams of `AsyncLLM` in an event loop: the iterator over one request's outputs, and over those of several.

A stream owns its request (async_engine.py): if it is left or deleted, the request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence

from nanoinfer.entrypoints.async_engine import AsyncEngine, AsyncRequest
from nanoinfer.entrypoints.chat import AnswerReader
from nanoinfer.inputs.prompts import numbered
from nanoinfer.outputs import RequestOutput
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.workers import Workers


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
            output = self.take(has_metrics=True)
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

    def take(self, has_metrics: bool = False) -> RequestOutput:
        """Return the output that is ready; if it is `unread`, for `read`. Raises the error of a failed request."""
        assert self._engine is not None
        output = self._request.take(self._engine.core.clock() if has_metrics else None)
        self.finished, reader = self._request.ended, self._reader
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


class MergedStreams(AsyncIterator[Found]):
    """Yields, when there are new outputs, those of all streams: pairs of a stream's index and its output.

    The step of the engine that produces tokens for several streams wakes the task once, not once for each, and not for
    what the `sink` takes. Only the last output of a stream has metrics. An error of one stream closes all.

    Args:
        streams: not read yet.
        observe: is called with new outputs: the stream's index, its output, and whether it is the last.
    """

    sink: Callable[[Found], bool] | None = None
    """Takes outputs in the turn of the event loop in which they arrive while the task waits for the next ones, or
    returns False: the task gets them."""

    def __init__(self, streams: Sequence[AsyncOutputStream], observe: Observe | None = None) -> None:
        self._streams, self._observe = streams, observe
        self._open = dict(enumerate(streams))
        self._event = asyncio.Event()
        self._begun = self._waiting = self._unread = False
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
                if outputs := self._left or self._take_ready():
                    self._left = []
                    for at, (i, output) in enumerate(outputs):
                        if self._open[i].unread:
                            outputs[at] = i, await self._open[i].read(output)
                    self._report(outputs)
                    return outputs
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
        if self._waiting and self.sink is not None and self._error is None and not self._left:
            try:
                outputs = self._take_ready()
                if self._unread or not self.sink(outputs):
                    self._left = outputs
                else:
                    self._report(outputs)
                    if self._open:
                        return
            except Exception as e:
                self._error = e
        self._event.set()

    def _take_ready(self) -> Found:
        found, self._unread = [], False
        for i, stream in self._open.items():
            if stream.ready:
                try:
                    found.append((i, stream.take()))
                except Exception:
                    with numbered(i, len(self._streams)):
                        raise
                self._unread |= stream.unread
        return found

    def _report(self, outputs: Found) -> None:
        """Report outputs that were taken, and forget the streams that they end."""
        taken = [(i, output, self._open[i].finished) for i, output in outputs]
        if self._observe is not None:
            self._observe(taken)
        for i, _, finished in taken:
            if finished:
                del self._open[i]

    def close(self) -> None:
        """Cancel the requests that are not finished. The iterator yields nothing more."""
        for stream in self._open.values():
            stream.leave()
        self._open, self._left, self.sink = {}, [], None
