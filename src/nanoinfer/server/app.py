"""The ASGI application: the routes, and the stack of middleware around them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.openai_protocol import error_body, error_object, json_bytes, status_code
from nanoinfer.server import page_routes
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import App, ClientDisconnected, Message, Receive, Scope, Send, respond_json
from nanoinfer.server.openapi import document
from nanoinfer.server.service import Service
from nanoinfer.server.table import ROUTES, RouteSpec

log = logging.getLogger("nanoinfer")


def build_app(llm: AsyncLLM, config: ServerConfig) -> App:
    """Return the ASGI application that serves a model.

    Args:
        llm: generates; the caller closes it.
        config: options and limits.
    """
    service = Service(llm, config)
    service.openapi = functools.cache(lambda: json_bytes(document(ROUTES, service.defaults)))
    app: App = Errors(Router([*(_route(service, spec) for spec in ROUTES), *page_routes.routes()]))
    middleware: tuple[Callable[[App], App], ...] = (
        # Plain ASGI applications around `app`, the innermost first. What a middleware's `receive` raises in a route is
        # answered by Errors; a middleware that refuses a request answers it by itself.
    )
    for wrap in middleware:
        app = wrap(app)
    return app


def _route(service: Service, spec: RouteSpec) -> Route:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await spec.handler(service, scope, receive, send)

    route = Route(spec.path, answer, methods=[spec.method])
    route.app = answer  # Starlette takes a function for one of a Request, and wraps it
    return route


class Errors:
    """Middleware that answers exceptions by errors in OpenAI's shape.

    Args:
        app: raises NanoinferError, or Starlette's HTTPException for an unknown path or method.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer its exception."""
        if scope["type"] != "http":
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        scope["app"] = self  # Starlette's routes then raise HTTPException
        try:
            await self._app(scope, receive, watched)
        except ClientDisconnected:
            return
        except NanoinferError as e:
            status, body = status_code(e), error_body(e)
        except HTTPException as e:
            status, body = e.status_code, error_object(f"{scope['method']} {scope['path']}: {e.detail}", e.status_code)
        except asyncio.CancelledError:
            raise
        except Exception as e:
            log.error(
                "%s %s: %s", scope["method"], scope["path"], one_line(e), exc_info=log.isEnabledFor(logging.DEBUG)
            )
            status, body = 500, error_object(f"internal error: {one_line(e)}", 500)
        else:
            return
        if not started:
            await respond_json(send, body, status)
