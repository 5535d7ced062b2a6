"""The routes that do not generate: embeddings, the model, its tokenizer, health."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from nanoinfer.errors import NanoinferError, input_too_long
from nanoinfer.protocols.errors import error_object
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, COUNT_TOKENS, SAMPLING, FieldError
from nanoinfer.protocols.messages import messages_error, parse_messages
from nanoinfer.protocols.pooling import PoolingRequest, parse_pooling, pooling_body
from nanoinfer.protocols.requests import parse_detokenize, parse_tokenize
from nanoinfer.sampling_params import CHAT_MAX_TOKENS, COMMAND_DEFAULTS, SamplingParams
from nanoinfer.server.access import combined_salt
from nanoinfer.server.http import respond, respond_json
from nanoinfer.server.limits import INPUT_VALUES
from nanoinfer.server.metrics import CONTENT_TYPE as METRICS_TYPE
from nanoinfer.server.service import Service, new_id


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
        _check(request, service)
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
        body = partial(
            pooling_body,
            request,
            outputs,
            request_id=new_id(),
            model=service.name_of(request.model),
            created=int(time.time()),
        )
        await service.bodies.respond(send, body, len(inputs) * width)


def _check(request: PoolingRequest, service: Service) -> None:
    """Raise NanoinferError if a list of token ids is too long: it is refused before it waits for its turn."""
    if request.params.truncate_prompt_tokens is None:
        for prompt in request.inputs:
            if (num_tokens := len(prompt.get("prompt_token_ids", ()))) > service.sizes[0]:
                raise input_too_long(str(num_tokens), service.sizes[0])
