"""Who owns a request: iterators over what requests produce, each with a queue of its own.

Any number of streams may be open, and be read in any order, by any thread. Whichever is read runs the next step for all
of them, and each finds what its own requests gained in its own queue. A stream that is closed, exhausted, interrupted
or dropped, started or not, ends its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from nanoinfer.core import Core
from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.scheduling.sequence import Request


class Ownership:
    """Ends requests when it is left or dropped. A context manager for those who run them to their end."""

    def __init__(self, core: Core, requests: Sequence[Request]) -> None:
        self._core, self._requests = core, requests

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the requests that are unfinished."""
        if not all(r.finished for r in self._requests):
            self._core.abort(*self._requests)
        self._requests = ()

    def __del__(self) -> None:  # dropped, or an interrupt came before __exit__; in a finalizer nothing may wait
        self._core.cancel(self._requests)


class OutputStream(Iterator[Delta | RequestOutput]):
    """Yields what each step added to the requests, and each request's output after its last delta."""

    def __init__(self, core: Core, requests: Sequence[Request]) -> None:
        self._core = core
        self._requests = list(requests)
        self._open = dict.fromkeys(self._requests)  # requests whose output has not been returned
        self._queue: deque[Delta] = deque()
        self._ended: Request | None = None  # its last delta has been returned, its output is next
        self._by_id = {r.request_id: r for r in self._requests}
        self._num_left = {r.request_id: len(r.sequences) for r in self._requests}
        for request in self._requests:
            request.deltas = self._queue
        self._ownership = Ownership(core, self._requests)
        core.submit(self._requests)

    def __next__(self) -> Delta | RequestOutput:
        if self._ended is not None:
            return self._finish(self._ended)
        while not self._queue:
            if not self._open:
                raise StopIteration
            if all(r.finished for r in self._open) and not self._queue:  # ended by an interrupt: no deltas
                return self._finish(next(iter(self._open)))
            self._core.step()
        delta = self._queue.popleft()
        if delta.finish_reason is not None:
            self._num_left[delta.request_id] -= 1
            if self._num_left[delta.request_id] == 0:
                self._ended = self._by_id[delta.request_id]
        return delta

    def _finish(self, request: Request) -> RequestOutput:
        self._ended = None
        del self._open[request]
        return self._core.output(request)

    def close(self) -> None:
        """End the requests that are unfinished; the stream yields nothing more."""
        self._ended = None
        self._open.clear()
        self._queue.clear()
        self._ownership.close()


class TextStream(Iterator[str]):
    """Yields the text of a request of one sequence, whole characters only.

    Raises:
        NanoinferError: when it is read: the request has failed, or another call was interrupted and has ended it.
    """

    def __init__(self, outputs: OutputStream) -> None:
        self._outputs = outputs

    def __next__(self) -> str:
        for item in self._outputs:
            if isinstance(item, Delta):
                if item.text:
                    return item.text
            elif item.outputs[0].finish_reason in ("error", "abort"):
                raise NanoinferError(item.outputs[0].error or "the request was aborted: another call was interrupted")
        raise StopIteration

    def close(self) -> None:
        """End the request; the stream yields nothing more."""
        self._outputs.close()
