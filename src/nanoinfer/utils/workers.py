"""Daemon threads that run calls for event loops.

They replace concurrent.futures.ThreadPoolExecutor, whose threads the interpreter joins at its exit: it would first wait
for all queued calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Runs calls in daemon threads, which are started when calls arrive. Thread-safe.

    Args:
        around: returns a context manager that is entered around each call.
    """

    def __init__(
        self, name: str, max_threads: int, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._name, self._max_threads, self._around = name, max_threads, around
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_threads = 0
        self._stopped = False

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call that raises no exception. It may not run if `stop` is called meanwhile."""
        self._calls.put(call)
        if self._num_threads < self._max_threads:
            self._num_threads += 1
            arguments = (self._calls, self._around)
            threading.Thread(target=_work, args=arguments, name=self._name, daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of a call, or raise its exception. A call that has begun is not cancelled with the task."""
        import asyncio  # a tenth of the time that it takes to import nanoinfer, and only event loops need it

        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except Exception as e:
                future.set_exception(e)
            else:
                future.set_result(result)

        self.put(run)
        if self._stopped:
            future.cancel()
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the threads after the calls that are queued. Takes no lock: a finalizer may call it."""
        self._stopped = True
        for _ in range(self._max_threads):
            self._calls.put(None)

    def __del__(self) -> None:
        self.stop()


def _work(calls: SimpleQueue[Callable[[], None] | None], around: Callable[[], AbstractContextManager[None]]) -> None:
    while (call := calls.get()) is not None:
        with around():
            call()
        del call  # an idle thread holds no request
