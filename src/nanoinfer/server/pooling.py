"""/v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from nanoinfer.errors import input_too_long
from nanoinfer.openai_protocol import FieldError
from nanoinfer.openai_protocol.fields import EMBEDDINGS
from nanoinfer.openai_protocol.pooling import PoolingRequest, parse_pooling, pooling_body
from nanoinfer.server.auth import combined_salt
from nanoinfer.server.limits import INPUT_VALUES
from nanoinfer.server.service import Service, new_id


async def embed(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the embedding of each input."""
    await _pool(service, scope, receive, send)


async def rerank(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return documents in the order of their relevance for a query."""
    await _pool(service, scope, receive, send)


async def score(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the score of each document, for one query or for its own."""
    await _pool(service, scope, receive, send)


async def _pool(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request to embed or to score. If the client disconnects, its requests end."""

    def convert(body: Mapping[str, Any]) -> PoolingRequest:
        request = parse_pooling(scope["path"], body)
        service.check_model(request.model)
        _check(request, service)
        return request

    request = await service.bodies.read(receive, convert)
    llm, inputs, documents = service.llm.llm, request.inputs, request.documents
    options: Any = {"salt": combined_salt(scope, request.cache_salt), "priority": request.priority}
    num_requests, width = len(inputs) + len(documents), llm.config.n_embd
    if request.url != EMBEDDINGS and llm.pooler.reranks:  # a request has query and document, and one value
        num_requests, width = request.num_results, 1
    held = service.quotas.values.holding(num_requests * (width + INPUT_VALUES))
    with held, service.metrics.watch(scope, None, num_requests) as watch:
        outputs: Any = await service.llm.pool(
            lambda: llm.pooler.plan(inputs, documents, request.params, **options), watch.receive
        )
        body = pooling_body(request, outputs, request_id=new_id(), model=service.names[0], created=int(time.time()))
        await service.bodies.respond(send, body, num_requests * width)


def _check(request: PoolingRequest, service: Service) -> None:
    """Check a request against the limits of the server.

    Raises:
        FieldError: the pairs have too many characters: each has its own copy of the query.
        NanoinferError: a list of token ids is too long. It is refused here, so that it need not wait for its turn.
    """
    most = service.config.max_body_bytes
    if request.num_chars > most:
        raise FieldError(
            f"the pairs of query and document have {request.num_chars} characters; the server's max_body_bytes is"
            f" {most}: send fewer documents, or a shorter query",
            "documents",
        )
    if request.url == EMBEDDINGS and request.params.truncate_prompt_tokens is None:
        for prompt in request.inputs:
            if (num_tokens := len(prompt.get("prompt_token_ids", ()))) > service.sizes[0]:
                raise input_too_long(str(num_tokens), service.sizes[0])
