"""What one request may ask for and take: the middleware that holds the limits, and checks for the routes.

connections.py holds those of a connection (heads, slow readers). docs/server-security.md lists all of them, with the
status that a client sees.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.errors import NanoinferError, QueueFull, too_long
from nanoinfer.protocols.fields import FieldError
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.sampling_params import WHOLE_VOCABULARY, PoolingParams, SamplingParams
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Refusal, SentResponse, headers_too_large, refusal_of, too_many
from nanoinfer.utils.checks import require_int

LOGPROBS = ("logprobs", "top_logprobs")
"""Fields with numbers of log-probabilities, which max_logprobs limits."""
MAX_EMBEDDING_VALUES = 1 << 24
"""Values of the embeddings of all requests: 8 bytes of each while they are summed, 4 in the response."""
INPUT_VALUES = 320
"""Values that take as much memory as an input does beside its embedding: it is a request of the library."""
NUM_ENTRIES_IN_FLIGHT = 4
"""Times max_logprob_entries that all requests may hold."""
MAX_STOP_CHARS = 256
"""Characters of a stop string and of a bad word."""
MAX_ITEMS = {
    "stop": 16, "bad_words": 128, "logit_bias": 1024, "stop_token_ids": 1024, "allowed_token_ids": 1024
}  # fmt: skip
"""Items that fields of a request may have."""


# For the routes ------------------------------------------------------------------------------------------


def check_request(request: GenerationRequest, config: ServerConfig, block_size: int, vocab_size: int) -> None:
    """Check what a request asks for against the server's config, the context length and the size of the vocabulary.

    Raises:
        FieldError: a value is above its limit.
        NanoinferError: as `check_lengths`.
    """
    params = request.params
    check_lengths(request.prompts, params, block_size)
    num_prompts = max(1, len(request.prompts))
    if num_prompts * params.num_sequences > config.max_sequences:
        name = "n" if params.best_of is None else "best_of"
        raise FieldError(
            f"{num_prompts} prompts with {name}={params.num_sequences} are more than the server's max_sequences="
            f"{config.max_sequences}: send fewer prompts, or lower {name}",
            "prompt" if num_prompts > 1 else name,
        )
    for name, limit in MAX_ITEMS.items():
        items = getattr(params, name) or ()
        _require_at_most(f"the number of items in {name}", len(items), "limit", limit, name)
        if name in ("stop", "bad_words"):
            longest = max(map(len, items), default=0)
            _require_at_most(f"the length of a string in {name}", longest, "limit", MAX_STOP_CHARS, name)
    what = "logprobs=-1, the whole vocabulary," if params.logprobs == WHOLE_VOCABULARY else "logprobs"
    count = _num_top(params.logprobs, vocab_size)
    _require_at_most(what, count, "max_logprobs", config.max_logprobs, "logprobs")


def check_lengths(
    prompts: Iterable[Mapping[str, Any]], params: SamplingParams | PoolingParams, block_size: int, what: str = "prompt"
) -> None:
    """Raise NanoinferError if a list of token ids is too long: it is refused before it waits for its turn."""
    for prompt in prompts if params.truncate_prompt_tokens is None else ():
        if (num_tokens := len(prompt.get("prompt_token_ids", ()))) > block_size:
            raise too_long(str(num_tokens), block_size, what)


def check_logprobs(body: Mapping[str, Any], config: ServerConfig) -> None:
    """Check numbers of log-probabilities before the body is parsed, by the server's limit. Raises FieldError."""
    for name in LOGPROBS:
        value = body.get(name)
        if isinstance(value, float) and value.is_integer():  # 2.0 is an integer in JSON
            value = int(value)
        if value is not None and not isinstance(value, bool):
            try:
                require_int(name, value, WHOLE_VOCABULARY, config.max_logprobs)
            except NanoinferError as e:
                raise FieldError(f"{e}, the server's max_logprobs", name) from None


def _require_at_most(what: str, value: int, name: str, limit: int, param: str) -> None:
    if value > limit:
        raise FieldError(f"{what} is {value}; the server's {name} is {limit}", param)


class Quota:
    """Counts what all requests hold of something. Thread-safe.

    Args:
        limit: that they may hold.
        what: for the error, such as "log-probabilities".
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._num, self._lock = 0, threading.Lock()

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Count what a request holds within the context. Raises QueueFull."""
        self.add(count)
        try:
            yield
        finally:
            self.add(-count)

    def add(self, count: int) -> None:
        """Count what a request will hold, or with a negative number has held. Raises QueueFull."""
        with self._lock:
            if count > 0 and self._num + count > self._limit:
                raise QueueFull(
                    f"server busy: {count} {self._what}, with {self._num} of other requests, are above {self._limit};"
                    " retry later"
                )
            self._num += count


class Quotas:
    """What all requests of a server share. Args: config: of the server."""

    def __init__(self, config: ServerConfig) -> None:
        self.values = Quota(MAX_EMBEDDING_VALUES, "values of embeddings")
        self.entries = Quota(NUM_ENTRIES_IN_FLIGHT * config.max_logprob_entries, "log-probabilities")
        self.recordings = Quota(1, "recording")


class TokenBounds:
    """Checks the number of a request's prompt tokens, which is known after tokenization, in several threads.

    Args:
        request: whose prompts are tokenized.
        sizes: the context length, and the number of tokens of the vocabulary.
        config: of the server.
        quotas: shared with the other requests, until `release` is called.
    """

    def __init__(
        self, request: GenerationRequest, sizes: tuple[int, int], config: ServerConfig, quotas: Quotas
    ) -> None:
        self._params, self._config = request.params, config
        self._block_size, self._vocab_size = sizes
        self._num_entries = 0  # log-probabilities of all prompts so far, and of their outputs

        self._quotas = quotas
        self._num_held: int | None = 0  # of the quota; None: the request has ended
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the request: it holds nothing any more."""
        with self._lock:
            held, self._num_held = self._num_held, None
        self._quotas.entries.add(-(held or 0))

    def check(self, num_prompt: int) -> None:
        """Check one of the prompts.

        Args:
            num_prompt: its tokens.

        Raises:
            NanoinferError: the request asks for more log-probabilities than max_logprob_entries.
            QueueFull: with what other requests hold, it would be more than a quota.
        """
        params, width = self._params, self._params.num_sequences
        slides = params.overflow == "slide"
        num_output = sys.maxsize if slides else max(1, self._block_size + 1 - num_prompt)
        num_output = min(num_output, params.max_tokens or sys.maxsize)
        count = _entries(params.logprobs, self._vocab_size, width * num_output)
        count += _entries(params.prompt_logprobs, self._vocab_size, params.n * num_prompt)
        with self._lock:
            self._num_entries += count
            total = self._num_entries
        if total > self._config.max_logprob_entries:
            others = "" if total == count else ", and for the prompts before,"
            raise NanoinferError(
                f"logprobs={params.logprobs} for {width} outputs of {num_prompt} tokens in the prompt and up to"
                f" {num_output} after it{others} makes {total} log-probabilities; the server's max_logprob_entries is"
                f" {self._config.max_logprob_entries}: lower logprobs, n or max_tokens, or shorten the prompt"
            )
        with self._lock:
            if self._num_held is not None:  # else the request was abandoned after this check
                self._quotas.entries.add(count)
                self._num_held += count


def _entries(count: int | None, vocab_size: int, num_tokens: int) -> int:
    return 0 if count is None else num_tokens * (_num_top(count, vocab_size) + 1)


def _num_top(count: int | None, vocab_size: int) -> int:
    return vocab_size if count == WHOLE_VOCABULARY else count or 0


# The middleware ------------------------------------------------------------------------------------------


class BoundRequests:
    """ASGI middleware: reads the body, then answers within limits of size, time and number.

    The application gets the body whole. If the client disconnects, or the time is over, the application is cancelled,
    which frees what the request has in the engine. An exception of the application is a response, and one line
    in the log; the traceback is logged at level debug.

    Args:
        app: the application.
        limits: the config.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.config = app, config
        self.num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within the config."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        counts = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if counts and self.num_in_flight >= self.config.max_requests_in_flight:
            message = f"server busy: max_requests_in_flight={self.config.max_requests_in_flight} reached; retry later"
            return await too_many(message).send(send, scope)
        limit = self.config.max_header_bytes
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > limit:  # uvicorn passes some longer ones on
            return await headers_too_large(limit).send(send, scope)
        self.num_in_flight += counts
        try:
            body = await self._body(scope, receive)
            if isinstance(body, Refusal):
                await body.send(send, scope)
            elif body is not None:
                await self._answer(scope, body, receive, send)
        finally:
            self.num_in_flight -= counts

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Refusal | None:
        """Return the body; None if the client disconnects."""
        limit = self.config.max_body_bytes
        too_large = Refusal(413, f"the body has more than max_body_bytes={limit} bytes: send less")
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > limit:
            return too_large
        body, more = bytearray(), True
        with anyio.move_on_after(self.config.body_timeout_sec):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > limit:
                    return too_large
                more = message.get("more_body", False)
        if more:
            return Refusal(408, f"the body was not received within {self.config.body_timeout_sec:g} seconds")
        return bytes(body)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Call the application until it ends, the client disconnects, or the time is over."""
        response = SentResponse(send)
        failure: Refusal | None = None
        bodies = [body]
        del body  # the application's, which need not keep it

        async def receive_body() -> Message:
            if not bodies:
                await anyio.sleep_forever()  # until the application is cancelled or ends
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, response, group.cancel_scope.cancel)
            seconds = self.config.request_timeout_sec
            with anyio.move_on_after(seconds) as time_limit:
                try:
                    await self.app(scope, receive_body, response)
                except Exception as e:
                    failure = refusal_of(e, scope)
            if time_limit.cancelled_caught:
                message = f"the request was ended after request_timeout_sec={seconds:g} seconds: lower max_tokens"
                failure = Refusal(504, message, headers=(("x-should-retry", "false"),))
            group.cancel_scope.cancel()
        if failure is not None:
            await _fail(failure, response, scope)


async def _watch(receive: Receive, response: SentResponse, cancel: Callable[[], object]) -> None:
    """Call `cancel` if the client disconnects before the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not response.is_complete:
        cancel()


async def _fail(failure: Refusal, response: SentResponse, scope: Scope) -> None:
    """Send an error: as the response, or as the last event of a stream. Other responses are cut off."""
    if not response.status:
        await failure.send(response, scope)
    elif not response.is_complete:
        if not response.is_stream:
            raise ConnectionAbortedError("a response has failed after its status was sent")
        await response({"type": "http.response.body", "body": failure.event(scope)})
