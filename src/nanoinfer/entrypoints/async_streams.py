"""Read the streams of several requests of `AsyncLLM` in one task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from nanoinfer.inputs.prompts import numbered
from nanoinfer.outputs import RequestOutput

if TYPE_CHECKING:
    from nanoinfer.entrypoints.async_llm import AsyncOutputStream


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
        observe: Callable[[Sequence[tuple[int, RequestOutput, bool]]], None] | None = None,
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
