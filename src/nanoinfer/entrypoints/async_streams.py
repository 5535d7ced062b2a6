"""The stream of a request of `AsyncLLM`, and the streams of several requests that one task reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence

from nanoinfer.entrypoints.async_engine import AsyncEngine
from nanoinfer.entrypoints.async_requests import AsyncRequest
from nanoinfer.entrypoints.chat import AnswerReader
from nanoinfer.inputs.prompts import numbered
from nanoinfer.outputs import RequestOutput
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.workers import Workers


class AsyncOutputStream(AsyncIterator[RequestOutput]):
    """Yields the outputs of one request, which it owns. Use it in one task at a time.

    Args:
        engine: returns what runs the steps.
        making: makes the request; yields the workers that run the next part.
        request_id: given by the caller, or made.
        output_kind: one of OUTPUT_KINDS.
        reader: reads the messages of a chat.
        reading: returns the workers that read what takes more than a few milliseconds.
    """

    _request: AsyncRequest | None = None  # until the first iteration
    finished = False
    """Whether the iterator yields nothing more."""
    unread = False
    """Whether the output that was taken last is still to be read."""

    def __init__(
        self,
        engine: Callable[[], AsyncEngine],
        making: Generator[Workers, None, Request],
        request_id: str,
        output_kind: str,
        reader: AnswerReader | None,
        reading: Callable[[], Workers],
    ) -> None:
        self._running, self._making, self._output_kind = engine, making, output_kind
        self._reader, self._reading = reader, reading
        self.request_id = request_id
        """The id that the caller gave, or that was made."""

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        try:
            request = self._request or self.begin(asyncio.Event())
            await request.wait()
            output = self.take()
            return await self.read(output) if self.unread else output
        except BaseException:  # the task was cancelled, or the request has failed
            self.leave()
            raise

    def begin(self, event: asyncio.Event) -> AsyncRequest:
        """Queue the request. The event is set when there is something to take."""
        request = AsyncRequest(self.request_id, self._output_kind, asyncio.get_running_loop(), event)
        self._engine = self._running()
        self._engine.register(request)
        self._request = request
        self._engine.prepare(request, self._making)
        return request

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return self._request is not None and self._request.ready

    def take(self) -> RequestOutput:
        """Return the output that is ready; if it is `unread`, for `read`. Raises the error of a failed request."""
        assert self._request is not None
        core = self._engine.core
        output = self._request.take(core.outputs.logprobs, core.clock)
        self.finished = self._request.ended
        reader = self._reader
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
        if not self.finished and (request := self._request) is not None and not request.ended:
            self._engine.drop(request)
        self.finished = True

    def __del__(self) -> None:
        self.leave()


Observe = Callable[[Sequence[tuple[int, RequestOutput, bool]]], None]


class MergedStreams(AsyncIterator[list[tuple[int, RequestOutput]]]):
    """Yields, when there are new outputs, those of all streams: pairs of a stream's index and its output.

    The step of the engine that produces tokens for several streams wakes the task once, not once for each. An error of
    one stream closes all.

    Args:
        streams: not read yet.
        observe: is called with new outputs: the stream's index, its output, and whether it is the last.
    """

    def __init__(
        self,
        streams: Sequence[AsyncOutputStream],
        observe: Observe | None = None,
    ) -> None:
        self._streams, self._observe = streams, observe
        self._open = dict(enumerate(streams))
        self._event = asyncio.Event()
        self._begun = False

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        try:
            if not self._begun:
                self._begun = True
                for stream in self._streams:
                    stream.begin(self._event)
            while self._open:
                if found := [(i, self._take(i)) for i, stream in self._open.items() if stream.ready]:
                    for at, (i, output) in enumerate(found):
                        if self._open[i].unread:
                            found[at] = i, await self._open[i].read(output)
                    if self._observe is not None:
                        self._observe([(i, output, self._open[i].finished) for i, output in found])
                    for i, _ in found:
                        if self._open[i].finished:
                            del self._open[i]
                    return found
                self._event.clear()
                await self._event.wait()
        except BaseException:  # the task was cancelled, or a request has failed
            self.close()
            raise
        raise StopAsyncIteration

    def _take(self, i: int) -> RequestOutput:
        if len(self._streams) == 1:
            return self._streams[i].take()
        with numbered(i, len(self._streams)):
            return self._streams[i].take()

    def close(self) -> None:
        """Cancel the requests that are not finished. The iterator yields nothing more."""
        for stream in self._open.values():
            stream.leave()
        self._open = {}
