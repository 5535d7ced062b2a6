"""The ASGI application: the table of routes, and the stack of middleware around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.protocols import fields
from nanoinfer.server import page_routes, routes
from nanoinfer.server.access import CheckOrigins, RequireKey
from nanoinfer.server.access_log import AccessLog, LogRequests
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.limits import BoundRequests
from nanoinfer.server.openapi import RouteSpec, document
from nanoinfer.server.service import Service
from nanoinfer.utils.json_pieces import json_bytes

ROUTES = (
    RouteSpec("POST", fields.COMPLETIONS, routes.generate),
    RouteSpec("POST", fields.CHAT, routes.generate),
    RouteSpec("POST", fields.RESPONSES, routes.generate),
    RouteSpec("POST", fields.MESSAGES, routes.generate),
    RouteSpec("POST", fields.COUNT_TOKENS, routes.count_tokens),
    RouteSpec("POST", fields.EMBEDDINGS, routes.embed),
    RouteSpec("GET", "/v1/models", routes.models),
    RouteSpec("GET", "/v1/models/{model:path}", routes.model),
    RouteSpec("POST", "/tokenize", routes.tokenize),
    RouteSpec("POST", "/detokenize", routes.detokenize),
    RouteSpec("GET", "/tokenizer_info", routes.tokenizer_info),
    RouteSpec("GET", "/info", routes.info),
    RouteSpec("GET", "/health", routes.health),
    RouteSpec("GET", "/metrics", routes.metrics),
    RouteSpec("GET", "/openapi.json", routes.openapi),
    RouteSpec("POST", "/page/markdown", page_routes.markdown),
    RouteSpec("POST", "/page/explain", routes.explain),
)
"""The routes, from which the application and the OpenAPI document are made."""


def build_app(llm: AsyncLLM, config: ServerConfig, access_log: AccessLog | None = None) -> ASGIApp:
    """Return the ASGI application that serves a model.

    Args:
        llm: generates; the caller closes it.
        config: options and limits; without an api_key_file (`auth.with_keys`).
        access_log: the caller closes it; None: none.
    """
    app, service = build_routes(llm, config)
    return guarded(app, config, service.metrics.responded, access_log)


def build_routes(llm: AsyncLLM, config: ServerConfig) -> tuple[ASGIApp, Service]:
    """Return the application without what looks at clients (`guarded`): the routes, within the limits of a request.

    Args:
        llm, config: as for `build_app`.
    """
    service = Service(llm, config)
    service.openapi = functools.cache(lambda: json_bytes(document(ROUTES, service.defaults, config.max_logprobs)))
    router = Router([*(_route(service, spec) for spec in ROUTES), *page_routes.routes()], redirect_slashes=False)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # Starlette's routes then raise HTTPException, which BoundRequests answers
        await router(scope, receive, send)

    return BoundRequests(routed, config), service


def guarded(
    app: ASGIApp, config: ServerConfig, record: Callable[[Mapping[str, Any]], None], access_log: AccessLog | None
) -> ASGIApp:
    """Return an application that passes on the requests of permitted clients, and records each.

    Args:
        app: the application, which answers its own exceptions (BoundRequests).
        config: as for `build_app`.
        record: gets the entry of the access log of each request.
        access_log: gets them, too; None: there is none.
    """
    app = RequireKey(app, config.api_key)  # the innermost first
    app = CheckOrigins(app, config.host, config.allowed_host, config.allowed_origin)

    return LogRequests(app, record, *(() if access_log is None else (access_log.write,)))


def _route(service: Service, spec: RouteSpec) -> Route:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await spec.handler(service, scope, receive, send)

    route = Route(spec.path, answer, methods=[spec.method])
    route.app = answer  # Starlette takes a function for one of a Request, and wraps it
    return route
