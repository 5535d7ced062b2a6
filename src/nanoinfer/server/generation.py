"""The routes that generate. What differs between them is in `service.SHAPES`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from nanoinfer.entrypoints.async_streams import Found, MergedStreams
from nanoinfer.errors import NanoinferError
from nanoinfer.explain.record import Recorder
from nanoinfer.outputs import RequestOutput
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, FieldError
from nanoinfer.protocols.output import check_finite, num_values
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.protocols.shared import Shape
from nanoinfer.server.access import combined_salt
from nanoinfer.server.connections import CONNECTION, ChunkedConnection
from nanoinfer.server.http import EVENTS, LARGE_VALUES
from nanoinfer.server.limits import TokenBounds, check_request
from nanoinfer.server.service import SHAPES, Service, new_id

STREAM_HEADERS = [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def generate(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Generate: one response, or a stream of server-sent events.

    If the client disconnects, the task is cancelled, and all requests end that were made for the prompts.
    """
    path, shape = scope["path"], SHAPES[scope["path"]]
    request = await service.bodies.read(receive, lambda body: _parsed(service, path, body))
    request_id = new_id()
    salt = combined_salt(scope, request.cache_salt)
    with _started(service, scope, shape, request, request_id, salt) as merged:
        # In a task of its own: each new output resumes it, and not every coroutine of the middleware around it.
        if request.stream:
            connection = scope.get("extensions", {}).get(CONNECTION)
            writing = _stream(service, shape, request, request_id, merged, send, connection)
        else:
            writing = _answer(service, shape, request, request_id, merged, send)
        await asyncio.create_task(writing)


async def explain(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Generate for one prompt or chat again, and return a recording of the steps for the page.

    It shares no prefix, so the recording begins with the whole prompt, and does not show what others have asked.
    """

    def convert(body: Mapping[str, Any]) -> tuple[str, GenerationRequest]:
        path = CHAT if "messages" in body else COMPLETIONS
        left_out = ("logprobs", "top_logprobs", "stream", "stream_options")  # the response has nothing of them
        request = _parsed(service, path, {name: value for name, value in body.items() if name not in left_out})
        if len(request.prompts) > 1:
            raise FieldError(f"prompt: {len(request.prompts)} prompts cannot be recorded together: send one", "prompt")
        return path, request

    path, request = await service.bodies.read(receive, convert)
    with service.quotas.recordings.holding(1):
        salt, run = secrets.token_hex(16), service.recording.run
        recorder = Recorder(service.llm.llm, salt=salt)
        try:
            await run(recorder.attach)
            with _started(service, scope, SHAPES[path], request, new_id(), salt) as merged:
                async for _ in merged:
                    pass
            recording = await run(recorder.recording)
        except NanoinferError as e:  # the recorder may have ended the request
            raise (recorder.error or e) from None
        finally:
            service.recording.put(recorder.detach)  # waits for the end of a step: not in the event loop
    await service.bodies.respond(send, recording.document, LARGE_VALUES + 1)


def _parsed(service: Service, path: str, body: Mapping[str, Any]) -> GenerationRequest:
    request = service.parse(path, body)
    with _names_of(SHAPES[path], request):
        check_request(request, service.config, *service.sizes)
    return request


@contextmanager
def _started(
    service: Service, scope: Scope, shape: Shape, request: GenerationRequest, request_id: str, salt: str | None
) -> Iterator[MergedStreams]:
    """Yield the outputs of a request, whose prompts are queued when they are read. At the end, all of it ends."""
    bounds = TokenBounds(request, service.sizes, service.config, service.quotas)
    with _names_of(shape, request):
        streams = service.start(request, request_id, salt, bounds.check)
        with service.metrics.watch(scope, request.params, len(streams)) as watch:
            merged = MergedStreams(streams, watch.receive)
            try:
                yield merged
            finally:
                merged.close()
                bounds.release()


@contextmanager
def _names_of(shape: Shape, request: GenerationRequest) -> Iterator[None]:
    """Let errors have the names of the fields that the request has."""
    try:
        yield
    except NanoinferError as e:
        raise shape.as_sent(e, request) from None


async def _answer(
    service: Service, shape: Shape, request: GenerationRequest, request_id: str, merged: MergedStreams, send: Send
) -> None:
    """Send all outputs in one response."""
    outputs: dict[int, RequestOutput] = {}
    async for new in merged:
        outputs.update(new)
    every = [outputs[i] for i in range(len(outputs))]

    def document() -> dict[str, Any]:
        check_finite(every)
        return shape.body(request, every, **service.common(request_id, request.model))

    await service.bodies.respond(send, document, num_values(request, every))


class _Direct:
    """Writes the chunks of new outputs to the connection, in the turn of the event loop in which the outputs arrive.

    Args:
        writer: of the response.
        connection: of the client.
    """

    def __init__(self, writer: Any, connection: ChunkedConnection) -> None:
        self._writer, self._connection = writer, connection
        self.is_ready = connection.is_writable

    def write(self, new: Found) -> bool:
        """Write chunks, unless they are large."""
        if self._writer.num_values(new) > LARGE_VALUES:
            return False
        if chunks := self._writer.write(new):
            self._connection.write_chunk(chunks)
        return True


async def _stream(
    service: Service,
    shape: Shape,
    request: GenerationRequest,
    request_id: str,
    merged: MergedStreams,
    send: Send,
    connection: ChunkedConnection | None,
) -> None:
    """Send the outputs while they are generated.

    The response begins with the first of them: an error before is a response of its own. One that comes later is the
    last event. After the first, this task only sends what is large, and what comes while the client reads slowly.
    """
    writer = shape.writer(request, **service.common(request_id, request.model))
    started = False
    try:
        async for new in merged:
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            if writer.num_values(new) > LARGE_VALUES:
                await service.bodies.send(send, writer.events(new))
            elif chunks := writer.write(new):
                await send({"type": "http.response.body", "body": chunks, "more_body": True})
            if merged.sink is None and connection is not None:
                merged.sink = _Direct(writer, connection)
    except NanoinferError as e:
        if not started:
            raise
        await send({"type": "http.response.body", "body": writer.error(shape.as_sent(e, request))})
    else:
        await send({"type": "http.response.body", "body": writer.end()})
