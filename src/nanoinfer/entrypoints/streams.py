"""Output streams: iterators over the deltas and outputs of requests, which own these requests.

Any number of streams may be open and be read in any order by any thread. Reading one of them runs steps for the
requests of all; each stream has its own queue of deltas. A stream that is closed, exhausted, interrupted or deleted
ends its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from nanoinfer.core.core import Core
from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.scheduling.sequence import Request


class Ownership:
    """Owns requests: a context manager that ends them on exit, or when it is deleted."""

    _requests: Sequence[Request] = ()  # until __init__, which may be interrupted, has set it

    def __init__(self, core: Core, requests: Sequence[Request]) -> None:
        self._core = core
        self._requests = requests

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the unfinished requests."""
        if not all(r.finished for r in self._requests):
            self._core.abort(*self._requests)
        self._requests = ()

    def __del__(self) -> None:  # deleted, or interrupted before __exit__; a finalizer must not wait for a lock
        if self._requests:
            self._core.cancel(self._requests)


class OutputStream(Iterator[Delta | RequestOutput]):
    """Yields the deltas of each step, and each request's output after its last delta."""

    def __init__(self, core: Core, requests: Sequence[Request]) -> None:
        for p in (r.params for r in requests):
            if p.num_sequences > p.n:
                raise NanoinferError(
                    f"best_of={p.best_of} is more than n={p.n}: the outputs are chosen at the end and cannot be"
                    " streamed: use generate, or leave best_of out"
                )
        self._core = core
        self._requests = list(requests)
        self._open = dict.fromkeys(self._requests)  # requests whose output has not been returned
        self._queue: deque[Delta] = deque()
        self._ended: Request | None = None  # the request whose last delta has been returned; its output is next
        self._by_id = {r.request_id: r for r in self._requests}
        self._num_left = {r.request_id: len(r.sequences) for r in self._requests}
        for request in self._requests:
            request.deltas = self._queue
        self._ownership = Ownership(core, self._requests)
        core.submit(self._requests)

    def __next__(self) -> Delta | RequestOutput:
        if (ended := self._ended) is not None:
            self._ended = None
            del self._open[ended]
            return self._core.output(ended)
        while not self._queue:
            if not self._open:
                raise StopIteration
            if not all(r.finished for r in self._open):
                self._core.step()
                continue
            first = next(iter(self._open))
            output = self._core.output(first)  # waits for the step that ended it, which may still queue its delta
            if not self._queue:  # ended by an interrupt: no delta
                del self._open[first]
                return output
        delta = self._queue.popleft()
        if delta.finish_reason is not None:
            self._num_left[delta.request_id] -= 1
            if self._num_left[delta.request_id] == 0:
                self._ended = self._by_id[delta.request_id]
        return delta

    def close(self) -> None:
        """End the unfinished requests. The stream yields nothing more."""
        self._ended = None
        self._open.clear()
        self._queue.clear()
        self._ownership.close()


class TextStream(Iterator[str]):
    """Yields the text of a request with one sequence, in whole characters.

    Raises:
        NanoinferError: on reading: the request failed, or an interrupt of another call aborted it.
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
        """End the request. The stream yields nothing more."""
        self._outputs.close()
