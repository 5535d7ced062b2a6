"""The engine thread of `AsyncLLM`: it steps the core for the requests of any number of event loops.

    event loop     register -> prepare                  await ............. take the output
    worker threads                    make the request     |                  ^
    engine thread                        submit -> step -> step -> step -> one call into each loop a step

Event loops send commands through a queue. The thread reads it before each step, and waits for it when no request is
unfinished. After a step it sends each loop all that the step produced in one `call_soon_threadsafe`, which costs a
system call and a wake-up of the loop.

An `AsyncRequest` merges the deltas until its iterator takes them: of a token, only its count and its text are stored a
second time, so a slow reader needs no more memory than the output has.

All operations of event loops and finalizers are free of locks, so they never wait for a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import cast

from nanoinfer.core import output_processor as request_outputs
from nanoinfer.core.core import Core
from nanoinfer.errors import NanoinferError, ResultError, one_line, result_error
from nanoinfer.outputs import CompletionOutput, Delta, RequestOutput
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.utils.workers import Workers

log = logging.getLogger("nanoinfer")

COMMANDS_SEC = 0.005  # most time between two steps for commands: many arrivals do not stall the running requests
CLOSED = "the AsyncLLM is closed: make a new one"
INTERRUPTED = "an operation of another thread was interrupted"

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
            self._received = [_Received() for _ in self.request.sequences]
        received = self._received[item.index]
        received.text += item.text
        received.num_tokens += item.num_tokens
        received.finish_reason = item.finish_reason
        received.changed = True

    @property
    def ended(self) -> bool:
        """Whether the end of the request was received."""
        return self._end is not None

    def take(self, now: float | None) -> RequestOutput:
        """Return what was received since the last call, in the form that `output_kind` says.

        Args:
            now: seconds on the core's clock; None: only the last output has metrics.

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
        received = self._received or [_Received() for _ in end.outputs]
        rest = []
        for o, r in zip(end.outputs, received, strict=True):
            if r.changed or r.finish_reason is None:
                logprobs = None if o.logprobs is None else o.logprobs[r.tokens_taken :]
                text, token_ids = o.text[r.text_taken :], o.token_ids[r.tokens_taken :]
                accepted = None if o.draft_accepted is None else o.draft_accepted[r.tokens_taken :]
                new = replace(o, text=text, token_ids=token_ids, logprobs=logprobs, draft_accepted=accepted)
                rest.append(new)
        return rest


def _completion(s: Sequence, received: _Received, output_kind: str) -> CompletionOutput:
    """Return an output as far as it was received. The engine thread may have appended further tokens to `s`."""
    at, text = 0, received.text
    if output_kind == DELTA:
        at, text = received.tokens_taken, text[received.text_taken :]
    end, first = received.num_tokens, len(s.prompt_token_ids)
    ids, reason = s.token_ids[first + at : first + end], received.finish_reason
    output = CompletionOutput(s.sample_index, text, ids, reason, s.stop_reason if reason is not None else None)
    if (values := request_outputs.logprobs_of(s)) is not None:
        pairs = zip(s.token_ids[first : first + end], values[:end], strict=True)
        output.cumulative_logprob = sum(logprobs[token].logprob for token, logprobs in pairs)
        output.logprobs = values[at:end]
    if s.draft_accepted:
        output.draft_accepted = request_outputs.accepted(s, at, end)
    return output


Item = Delta | RequestOutput | Exception
Sent = tuple[AsyncRequest, Item]


class AsyncEngine:
    """Runs the requests of event loops on a core. The methods may be called in any thread.

    Args:
        core: other threads may use it as well.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._registered: dict[str, AsyncRequest] = {}  # all unfinished requests
        self._submitted: dict[int, AsyncRequest] = {}  # by the core's id; used by the engine thread only
        self._queue: deque[Delta | RequestOutput] = deque()  # of all submitted requests, in any thread's steps
        self._commands: SimpleQueue[AsyncRequest | None] = SimpleQueue()
        self._closed = False
        self.ended: Future[None] = Future()
        """Done when the engine thread has ended."""
        self.ended.set_running_or_notify_cancel()
        threading.Thread(target=self._run, name="nanoinfer-engine", daemon=True).start()

    # Called by event loops and worker threads ------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Number of requests that are not finished."""
        return len(self._registered)

    def register(self, request: AsyncRequest) -> None:
        """Add a request before it is prepared. Raises NanoinferError if its id is in use, or after `close`."""
        if self._registered.setdefault(request.request_id, request) is not request:
            raise NanoinferError(
                f"request_id={request.request_id!r} is the id of an unfinished request: use another, or abort that one"
            )
        if self._closed:  # checked last: `close` ends what is registered before it
            self._forget(request)
            raise NanoinferError(CLOSED)

    def prepare(self, request: AsyncRequest, making: Generator[Workers, None, Request]) -> None:
        """Run the next part of what makes the core's request; after the last one, queue it. An exception ends it.

        Nothing more runs for a request whose iterator has ended.

        Args:
            request: is registered.
            making: yields the workers that run the part that follows, and returns the request.
        """
        if request.dropped:
            return
        try:
            workers = next(making)
        except StopIteration as end:
            request.request = end.value
            self._commands.put(request)
        except Exception as e:
            self._forget(request)
            self._send([(request, e)])
        else:
            workers.put(lambda: self.prepare(request, making))

    def drop(self, request: AsyncRequest) -> None:
        """Cancel a request whose iterator has ended. A finalizer may call it."""
        request.dropped = True
        self._forget(request)
        if (prepared := request.request) is not None:
            self.core.cancel([prepared])  # even if many commands are queued
        self._commands.put(request)

    def abort(self, request_id: str) -> None:
        """End a request; its iterator returns the output so far. Does nothing if there is none of this id."""
        if (request := self._registered.get(request_id)) is not None:
            request.aborted = True
            self._commands.put(request)

    def close(self) -> None:
        """End all requests and the engine thread. A finalizer may call it."""
        self._closed = True
        self._commands.put(None)

    def cancel_all(self) -> None:
        """Cancel the parent's requests in a forked child, where this engine has no thread."""
        self.core.cancel([r.request for r in self._registered.values() if r.request is not None])

    def _forget(self, request: AsyncRequest) -> None:
        if self._registered.get(request.request_id) is request:
            self._registered.pop(request.request_id, None)

    def _send(self, items: Iterable[Sent]) -> None:
        """Send what requests receive to their event loops: one call for each loop."""
        of_loop: defaultdict[asyncio.AbstractEventLoop, list[Sent]] = defaultdict(list)
        for request, item in items:
            if not request.dropped:
                of_loop[request.loop].append((request, item))
        for loop, sent in of_loop.items():
            try:
                loop.call_soon_threadsafe(_receive, sent)
            except RuntimeError:  # the loop is closed
                for request, _ in sent:
                    self.drop(request)

    # The engine thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                try:
                    if not self._run_commands():
                        return
                    self.core.step(until=lambda: bool(self._queue))
                    self._send_queue()
                except Exception as e:
                    self._fail(e)
        finally:
            self._closed = True
            unfinished = list(self._registered.values())
            self._registered.clear()
            self._send([(r, NanoinferError(CLOSED)) for r in unfinished])
            with suppress(Exception):  # an engine that fails has told the requests why
                self.core.abort(*(r.request for r in unfinished if r.request is not None))
            self.ended.set_result(None)

    def _run_commands(self) -> bool:
        """Carry out the queued commands; wait for one if there is nothing to run. Return False at the end."""
        until = time.monotonic() + COMMANDS_SEC
        while True:
            try:
                request = self._commands.get(block=not self._submitted)
            except Empty:
                return True
            if request is None:
                return False
            self._update(request)
            del request  # a thread that waits holds no request
            if self._submitted and time.monotonic() > until:
                return True

    def _update(self, request: AsyncRequest) -> None:
        """Submit a request, or end it if its iterator has ended or `abort` was called."""
        prepared = request.request
        if prepared is None:  # ended before it was prepared: it comes again when it is
            return
        if prepared.request_id in self._submitted:
            self.core.cancel([prepared])
        elif request.aborted and not request.dropped:
            self.core.abort(prepared)
            self._end(request, self._result(request, self.core.output(prepared)))
        elif not request.dropped:
            prepared.queue = self._queue
            try:
                self.core.submit([prepared])
            except Exception as e:  # for example, the queue is full
                self._end(request, e if isinstance(e, NanoinferError) else ResultError(one_line(e)))
            else:
                self._submitted[prepared.request_id] = request

    def _send_queue(self, reason: str = INTERRUPTED) -> None:
        """Send what steps have produced.

        Args:
            reason: why requests have ended for which `abort` was not called.
        """
        sent: list[Sent] = []
        while self._queue:
            item = self._queue.popleft()
            request_id = cast(int, item.request_id)
            if (request := self._submitted.get(request_id)) is None or (prepared := request.request) is None:
                continue
            at_end = prepared.params.num_sequences > prepared.params.n  # best_of: the outputs are chosen at the end
            if isinstance(item, RequestOutput):
                del self._submitted[request_id]
                self._forget(request)
                sent.append((request, self._result(request, item, reason)))
            elif item.error is not None and not at_end:  # the request fails with one of its sequences
                self.core.cancel([] if prepared.finished else [prepared])
            elif request.output_kind != FINAL_ONLY and not at_end:
                sent.append((request, item))
        self._send(sent)

    def _fail(self, error: Exception) -> None:
        """Send the outcome of an exception in the core, which has ended the running requests."""
        log.error("%s: all running requests have ended", one_line(error), exc_info=log.isEnabledFor(logging.DEBUG))
        num_submitted = len(self._submitted)
        self._send_queue(one_line(error))
        if len(self._submitted) == num_submitted:  # end all requests: the exception would come again in the next step
            for request in list(self._submitted.values()):
                self.core.cancel([request.request] if request.request is not None else [])
                self._end(request, ResultError(f"the request was aborted: {one_line(error)}"))

    def _end(self, request: AsyncRequest, item: Item) -> None:
        """Forget a request, and send its output or error."""
        self._forget(request)
        if (prepared := request.request) is not None:
            self._submitted.pop(prepared.request_id, None)
        self._send([(request, item)])

    def _result(self, request: AsyncRequest, output: RequestOutput, reason: str = INTERRUPTED) -> Item:
        for o in output.outputs:
            if o.error is not None:
                return result_error(o.error)
        if not request.aborted and any(o.finish_reason == "abort" for o in output.outputs):
            return ResultError(f"the request was aborted: {reason}")
        return output


def _receive(sent: list[Sent]) -> None:
    """Run in an event loop: give each request what it receives, then wake who reads it."""
    for request, item in sent:
        request.receive(item)
    for wake in {request.wake: None for request, _ in sent}:
        wake()
