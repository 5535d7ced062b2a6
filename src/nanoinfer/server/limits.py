"""What one request may ask for and take: the middleware that holds the limits, and checks for the routes.

connections.py holds those of a connection (heads, slow readers). docs/server-security.md lists all of them, with the
status that a client sees.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.errors import NanoinferError, QueueFull, too_long
from nanoinfer.protocols.fields import FieldError
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.sampling_params import WHOLE_VOCABULARY, SamplingParams
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Refusal, SentResponse, headers_too_large, refusal_of, too_many
from nanoinfer.utils.checks import require_int

LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
"""Fields with numbers of log-probabilities, which max_logprobs limits."""
MAX_SLIDING_TOKENS = 1 << 20
"""Prompt tokens times n or best_of, where overflow=slide permits more than the context length: of all requests."""
MAX_EMBEDDING_VALUES = 1 << 24
"""Values of the embeddings of all requests: 8 bytes of each while they are summed, 4 in the response."""
INPUT_VALUES = 320
"""Values that take as much memory as an input does beside its embedding: it is a request of the library."""
NUM_ENTRIES_IN_FLIGHT = 4
"""Times max_logprob_entries that all requests may hold."""


# For the routes ------------------------------------------------------------------------------------------


def check_request(request: GenerationRequest, config: ServerConfig, block_size: int, vocab_size: int) -> None:
    """Check what a request asks for against the server's config, the context length and the size of the vocabulary.

    Raises:
        FieldError: a value is above its limit.
        NanoinferError: a list of token ids is too long. It is refused here, so that it need not wait for its turn.
    """
    params = request.params
    if params.overflow != "slide" and params.truncate_prompt_tokens is None:
        for prompt in request.prompts:
            if (num_tokens := len(prompt.get("prompt_token_ids", ()))) > block_size:
                raise too_long(str(num_tokens), block_size)
    num_prompts = max(1, len(request.prompts))
    if num_prompts * params.num_sequences > config.max_sequences:
        name = "n" if params.best_of is None else "best_of"
        raise FieldError(
            f"{num_prompts} prompts with {name}={params.num_sequences} are more than the server's max_sequences="
            f"{config.max_sequences}: send fewer prompts, or lower {name}",
            "prompt" if num_prompts > 1 else name,
        )
    _check_values(params, config, vocab_size)


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


def _check_values(params: SamplingParams, config: ServerConfig, vocab_size: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        what = f"{name}=-1, the whole vocabulary," if count == WHOLE_VOCABULARY else name
        _require_at_most(what, _num_top(count, vocab_size), "max_logprobs", config.max_logprobs, name)
    for name, limit in (("stop", "max_stop"), ("bad_words", "max_bad_words")):
        words = getattr(params, name)
        _require_at_most(f"the number of strings in {name}", len(words), limit, getattr(config, limit), name)
        for text in words:
            most = config.max_stop_chars
            _require_at_most(f"the length of a string in {name}", len(text), "max_stop_chars", most, name)
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        size = len(getattr(params, name) or ())
        _require_at_most(f"the size of {name}", size, "max_token_entries", config.max_token_entries, name)


def _require_at_most(what: str, value: int, limit: str, most: int, param: str | None = None) -> None:
    if value > most:
        raise FieldError(f"{what} is {value}; the server's {limit} is {most}", param or what)


class Quota:
    """Counts what all requests hold of something. Thread-safe.

    Args:
        most: that they may hold.
        what: for the error, such as "log-probabilities".
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
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
            if count > 0 and self._num + count > self._most:
                raise QueueFull(
                    f"server busy: {count} {self._what}, with {self._num} of other requests, are above {self._most};"
                    " retry later"
                )
            self._num += count


class Quotas:
    """What all requests of a server share. Args: config: of the server."""

    def __init__(self, config: ServerConfig) -> None:
        self.sliding = Quota(MAX_SLIDING_TOKENS, "tokens of prompts that are longer than the context")
        self.values = Quota(MAX_EMBEDDING_VALUES, "values of embeddings")
        self.entries = Quota(NUM_ENTRIES_IN_FLIGHT * config.max_logprob_entries, "log-probabilities")


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
        self._num_sliding = 0  # tokens of the prompts so far that are longer than the context, each for every output
        self._quotas = quotas
        self._held: list[tuple[Quota, int]] | None = []  # None: the request has ended
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the request: it holds nothing any more."""
        with self._lock:
            held, self._held = self._held, None
        for quota, count in held or ():
            quota.add(-count)

    def _hold(self, quota: Quota, count: int) -> None:
        with self._lock:
            if count and self._held is not None:  # else the request is abandoned after this check
                quota.add(count)
                self._held.append((quota, count))

    def check(self, num_prompt: int) -> None:
        """Check one of the prompts.

        Args:
            num_prompt: its tokens.

        Raises:
            NanoinferError: the log-probabilities that the request asks for are more than max_logprob_entries; or the
                prompts so far that are longer than the context are, with n, more than MAX_SLIDING_TOKENS.
            QueueFull: with what other requests hold, it would be more than a quota.
        """
        params, width = self._params, self._params.num_sequences
        slides, name = params.overflow == "slide", "n" if params.best_of is None else "best_of"
        if slides and num_prompt > self._block_size:
            with self._lock:
                self._num_sliding += num_prompt * width
                total = self._num_sliding
            if total > MAX_SLIDING_TOKENS:
                raise NanoinferError(
                    f"the prompt has {num_prompt} tokens, more than the context length, and {name}={width}: their"
                    f" product, of all such prompts, is above {MAX_SLIDING_TOKENS}: shorten the prompt, or lower {name}"
                )
            self._hold(self._quotas.sliding, num_prompt * width)
        num_output = sys.maxsize if slides else max(1, self._block_size + 1 - num_prompt)
        num_output = min(num_output, params.max_tokens or sys.maxsize)
        found = _entries(params.logprobs, self._vocab_size, width * num_output)
        found += _entries(params.prompt_logprobs, self._vocab_size, params.n * num_prompt)
        with self._lock:
            self._num_entries += found
            total = self._num_entries
        if total > self._config.max_logprob_entries:
            name = "prompt_logprobs" if params.logprobs is None else "logprobs"
            others = "" if total == found else ", and for the prompts before,"
            raise NanoinferError(
                f"{name}={getattr(params, name)} for {width} outputs of {num_prompt} tokens in the prompt and up to"
                f" {num_output} after it{others} makes {total} log-probabilities; the server's max_logprob_entries is"
                f" {self._config.max_logprob_entries}: lower {name}, n or max_tokens, or shorten the prompt"
            )
        self._hold(self._quotas.entries, found)


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
        most = self.config.max_header_bytes
        if (
            sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > most
        ):  # uvicorn passes some longer ones on
            return await headers_too_large(most).send(send, scope)
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
        most = self.config.max_body_bytes
        too_large = Refusal(413, f"the body has more than max_body_bytes={most} bytes: send less")
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not length.isdigit() or int(length[:20]) > most:
            return too_large
        body, more = bytearray(), True
        with anyio.move_on_after(self.config.body_timeout_sec):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > most:
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
