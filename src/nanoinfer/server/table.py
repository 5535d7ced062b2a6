"""The table of routes, from which the application and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from nanoinfer.anthropic_protocol import COUNT_TOKENS, MESSAGES
from nanoinfer.openai_protocol import CHAT, COMPLETIONS, RESPONSES
from nanoinfer.openai_protocol.fields import DETOKENIZE, EMBEDDINGS, RERANK, SCORE, TOKENIZE
from nanoinfer.server import generation, markdown, pooling, routes
from nanoinfer.server.service import Service

Handler = Callable[[Service, Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class RouteSpec:
    """A route."""

    method: str
    path: str
    handler: Handler
    """The first line of its docstring is the summary in the OpenAPI document."""
    content_type: str = "application/json"
    """Of a successful response; empty: there is no body."""


ROUTES = (
    RouteSpec("POST", COMPLETIONS, generation.generate),
    RouteSpec("POST", CHAT, generation.generate),
    RouteSpec("POST", RESPONSES, generation.generate),
    RouteSpec("POST", MESSAGES, generation.generate),
    RouteSpec("POST", COUNT_TOKENS, routes.count_tokens),
    RouteSpec("POST", EMBEDDINGS, pooling.embed),
    RouteSpec("POST", RERANK, pooling.rerank),
    RouteSpec("POST", SCORE, pooling.score),
    RouteSpec("GET", "/v1/models", routes.models),
    RouteSpec("GET", "/v1/models/{model:path}", routes.model),
    RouteSpec("POST", TOKENIZE, routes.tokenize),
    RouteSpec("POST", DETOKENIZE, routes.detokenize),
    RouteSpec("GET", "/tokenizer_info", routes.tokenizer_info),
    RouteSpec("GET", "/info", routes.info),
    RouteSpec("GET", "/health", routes.health, ""),
    RouteSpec("GET", "/metrics", routes.metrics, "text/plain"),
    RouteSpec("GET", "/openapi.json", routes.openapi),
    RouteSpec("POST", "/page/markdown", markdown.markdown),
)
