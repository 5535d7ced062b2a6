"""The routes that do not generate: models, health."""

from __future__ import annotations

import asyncio
from typing import Any

from nanoinfer.server.http import Receive, Scope, Send, respond, respond_json
from nanoinfer.server.metrics import CONTENT_TYPE as METRICS_TYPE
from nanoinfer.server.service import Service


async def health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 200 with an empty body while the engine runs."""
    await respond(send, b"")


async def metrics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the metrics in Prometheus' text format."""
    text = await asyncio.to_thread(service.metrics.exposition)  # it may wait for a step
    await respond(send, text, content_type=METRICS_TYPE)


async def models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """List the names of the model."""
    await respond_json(send, {"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Describe one name of the model."""
    service.check_model(name := scope["path_params"]["model"])
    await respond_json(send, _model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "nanoinfer",
        "root": service.llm.llm.model_name,
        "max_model_len": service.llm.llm.config.block_size,
    }
