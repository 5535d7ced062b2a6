"""Output streams: iterators over the deltas and outputs of requests, which own these requests.

Any number of streams may be open and be read in any order by any thread. Reading one of them runs steps for the
requests of all; each stream has its own queue. A stream that is closed, exhausted, interrupted or deleted
ends its requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

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


def all_finished(requests: Sequence[Request]) -> Callable[[], bool]:
    """Return a function that returns whether the requests have finished. It looks at each finished one once."""
    unfinished = [*requests]

    def finished() -> bool:
        while unfinished and unfinished[-1].finished:
            unfinished.pop()
        return not unfinished

    return finished


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
        self._queue: deque[Delta | RequestOutput] = deque()
        self._open = {r.request_id for r in requests}
        """Requests whose output has not been returned."""
        for request in requests:
            request.queue = self._queue
        self._ownership = Ownership(core, requests)
        core.submit(requests)

    def __next__(self) -> Delta | RequestOutput:
        while self._open:
            if not self._queue:
                self._core.step(until=lambda: bool(self._queue))
                continue
            item = self._queue.popleft()
            if isinstance(item, Delta):
                return item
            if item.request_id in self._open:  # an interrupt may have queued it twice
                self._open.remove(item.request_id)
                return item
        raise StopIteration

    def close(self) -> None:
        """End the unfinished requests. The stream yields nothing more."""
        self._open.clear()
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
