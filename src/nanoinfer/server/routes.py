"""The routes, but for those of the page. What differs between those that generate is in `service.SHAPES`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from nanoinfer.entrypoints.async_streams import Found, MergedStreams
from nanoinfer.errors import NanoinferError
from nanoinfer.explain.record import Recorder
from nanoinfer.outputs import RequestOutput
from nanoinfer.protocols.errors import error_object
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, COUNT_TOKENS, SAMPLING, FieldError
from nanoinfer.protocols.messages import messages_error, parse_messages
from nanoinfer.protocols.output import check_finite, num_values
from nanoinfer.protocols.pooling import PoolingRequest, parse_pooling, pooling_body
from nanoinfer.protocols.requests import GenerationRequest, parse_detokenize, parse_tokenize
from nanoinfer.protocols.shared import Shape
from nanoinfer.sampling_params import CHAT_MAX_TOKENS, COMMAND_DEFAULTS, SamplingParams
from nanoinfer.server.access import combined_salt
from nanoinfer.server.connections import CONNECTION, ChunkedConnection
from nanoinfer.server.http import EVENTS, LARGE_VALUES, respond, respond_json
from nanoinfer.server.limits import INPUT_VALUES, TokenBounds, check_lengths, check_request
from nanoinfer.server.metrics import CONTENT_TYPE as METRICS_TYPE
from nanoinfer.server.service import SHAPES, Service, new_id


async def health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 200 with an empty body while the engine runs."""
    if service.llm.is_running:
        await respond(send, b"")
    else:
        await respond_json(send, error_object("the engine has ended: start the server again", 503), 503)


async def metrics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the metrics in Prometheus' text format."""
    await respond(send, service.metrics.exposition(), content_type=METRICS_TYPE)


async def models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """List the names of the model and of its adapters."""
    await respond_json(send, {"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Describe one name of the model."""
    service.check_model(name := scope["path_params"]["model"])
    await respond_json(send, _model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    lora = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "nanoinfer",
        "root": service.llm.llm.model_name if lora is None else lora.lora_path,
        **({} if lora is None else {"parent": service.names[0]}),
        "max_model_len": service.llm.llm.config.block_size,
    }


async def info(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Describe the model, its engine and the defaults of requests."""
    llm, described = service.llm.llm, service.llm.llm.model
    await respond_json(
        send,
        {
            "model": service.names[0],
            "has_chat_template": described.chat_template is not None,
            "reasoning_options": _reasoning_options(described.chat_template or ""),
            "shows_tools": "tools" in f"{described.tool_template}{described.chat_template}",
            "block_size": llm.config.block_size,
            "engine": llm.engine_name,
            "device": llm.device,
            "dtype": llm.dtype,
            "weight_format": described.weight_format,
            "quantization": described.quantization,
            "speculation": llm.core.speculator is not None,
            "sampling_params": {
                name: {field: getattr(service.defaults[url], field) for field in SAMPLING}
                for name, url in (("completions", COMPLETIONS), ("chat", CHAT))
            },
            "page_sampling_params": {
                "completions": _page_params(service, SamplingParams.max_tokens),
                "chat": _page_params(service, CHAT_MAX_TOKENS),
            },
        },
    )


def _page_params(service: Service, max_tokens: int | None) -> dict[str, Any]:
    """Return the parameters that the page begins with: those of the server, the model or the command line."""
    chosen = service.config.default_max_tokens
    params = SamplingParams(**COMMAND_DEFAULTS, max_tokens=chosen or max_tokens)
    params = service.llm.llm.requests.merge(params, () if chosen is None else ("max_tokens",))
    return {name: getattr(params, name) for name in ("max_tokens", *COMMAND_DEFAULTS)}


def _reasoning_options(template: str) -> list[str]:
    """Return the options of reasoning that a chat template reads, as far as its text says.

    The format of the answers says it better, but costs a tenth of a second.
    """
    names = {"enable_thinking": ("enable_thinking",), "reasoning_effort": ("reasoning_effort",),
             "thinking_token_budget": ("think", "reasoning")}  # fmt: skip
    return [name for name, words in names.items() if any(word in template for word in words)]


async def tokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the token ids of a text, or of what the chat template makes of messages."""
    request = await service.bodies.read(receive, parse_tokenize)
    service.check_model(request.model)
    tokenizer = service.llm.llm.model.require_tokenizer()
    if request.messages is not None:
        ids = await service.llm.apply_chat_template(request.messages, **request.template)
    else:
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = await service.llm.tokenize(request.prompt) if request.prompt else start
        if not request.add_special_tokens:
            ids = ids[len(start) :]
    document = {"count": len(ids), "max_model_len": service.llm.llm.config.block_size, "tokens": ids}
    await service.bodies.respond(send, lambda: document, len(ids))


async def count_tokens(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Count the tokens of the prompt that a request to /v1/messages has."""
    request = await service.bodies.read(receive, partial(parse_messages, url=COUNT_TOKENS))
    service.check_model(request.model)
    try:
        ids = await service.llm.apply_chat_template(request.messages, **request.template)
    except NanoinferError as e:
        raise messages_error(e, request) from None
    await respond_json(send, {"input_tokens": len(ids)})


async def tokenizer_info(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the special tokens and the chat template, in vLLM's shape."""
    described = service.llm.llm.model
    described.require_tokenizer()
    special: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    special |= described.special_tokens
    if special["eos_token"] is None and described.end_token_ids:
        special["eos_token"] = service.decode(described.end_token_ids[:1])
    length, template = service.llm.llm.config.block_size, described.chat_template
    await respond_json(send, {**special, "chat_template": template, "model_max_length": length})


async def detokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the text of token ids."""
    vocab_size = service.llm.llm.config.vocab_size

    def convert(body: Mapping[str, Any]) -> list[int]:
        name, ids = parse_detokenize(body)
        service.check_model(name)
        if bad := [token for token in ids if not 0 <= token < vocab_size]:
            raise FieldError(f"tokens: token id {bad[0]} is not in [0, {vocab_size - 1}]"[:300], "tokens")
        return ids

    ids = await service.bodies.read(receive, convert)
    document = {"prompt": await service.llm.decode(ids)}
    await service.bodies.respond(send, lambda: document, len(ids))


async def openapi(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the OpenAPI document."""
    await respond(send, service.openapi())


async def embed(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the embedding of each input."""

    def convert(body: Mapping[str, Any]) -> PoolingRequest:
        request = parse_pooling(body)
        service.check_model(request.model)
        check_lengths(request.inputs, request.params, service.sizes[0], "input")
        return request

    request = await service.bodies.read(receive, convert)
    llm, inputs, lora = service.llm.llm, request.inputs, service.adapters.get(request.model or "")
    options: Any = {"salt": combined_salt(scope, request.cache_salt), "priority": request.priority}
    width = llm.config.n_embd
    held = service.quotas.values.holding(len(inputs) * (width + INPUT_VALUES))
    with held, service.metrics.watch(scope, None, len(inputs)) as watch:
        outputs = await service.llm.pool(
            lambda: llm.pooler.embed(inputs, request.params, lora, **options), watch.receive
        )
        body = partial(pooling_body, request, outputs, service.reply(new_id(), request.model))
        await service.bodies.respond(send, body, len(inputs) * width)


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
        return shape.body(request, every, service.reply(request_id, request.model))

    await service.bodies.respond(send, document, num_values(request, every))


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
    writer = shape.writer(request, service.reply(request_id, request.model))
    started = False

    def write_at_once(new: Found) -> bool:
        if connection is None or not connection.is_writable() or writer.num_values(new) > LARGE_VALUES:
            return False
        if chunks := writer.write(new):
            connection.write_chunk(chunks)
        return True

    try:
        async for new in merged:
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            if writer.num_values(new) > LARGE_VALUES:
                await service.bodies.send(send, writer.events(new))
            elif chunks := writer.write(new):
                await send({"type": "http.response.body", "body": chunks, "more_body": True})
            merged.sink = write_at_once
    except NanoinferError as e:
        if not started:
            raise
        await send({"type": "http.response.body", "body": writer.error(shape.as_sent(e, request))})
    else:
        await send({"type": "http.response.body", "body": writer.end()})
