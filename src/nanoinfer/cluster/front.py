"""The front: an ASGI application that passes each request on to a replica of the model that it names.

If a replica ends, its requests whose response has not begun are sent again, to another replica; with a seed the
text is the same. A stream that has begun ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from nanoinfer.cluster.link import Answer, ReplicaLost, head_of
from nanoinfer.cluster.local import Group, unavailable
from nanoinfer.cluster.metrics import FrontMetrics
from nanoinfer.cluster.routing import choose, prefix_blocks
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.protocols.fields import FieldError
from nanoinfer.server.access_log import count_tokens
from nanoinfer.server.http import Bodies, SentResponse, respond, respond_json
from nanoinfer.server.metrics import CONTENT_TYPE as METRICS_TYPE
from nanoinfer.utils.checks import show

log = logging.getLogger("nanoinfer.server")

ATTEMPTS = 3
"""How often a request is sent to a replica: a request that crashes its replica must not crash all of them."""
RETRY_SEC = 0.05
"""Time before it is sent again; ten times as long before the next time. Of replicas that end together, the front learns
one by one."""
_MODELS = "/v1/models"


class Front:
    """Answers requests for several models.

    Args:
        groups: the models; requests that name none go to the first.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._by_name = {name: group for group in groups for name in group.names}
        self._bodies = Bodies()
        self.metrics = FrontMetrics(groups)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whose body comes in one message. Raises errors, which the caller turns into responses."""
        path = scope["path"] if scope["method"] in ("GET", "HEAD") else None  # a replica refuses other methods
        if path == "/health":
            return await self._health(send)
        if path == "/metrics":
            return await respond(send, await self.metrics.exposition(), content_type=METRICS_TYPE)
        if path == _MODELS:
            return await self._models(send)
        body: bytes = (await receive())["body"]
        document, blocks = await self._document(body, scope["state"].get("cache_salt"))
        group, response = self._group(scope, document), SentResponse(send)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_SEC * 10 ** (attempt - 1))
            remote = choose(await group.ready(), blocks)
            try:
                async with remote.request(head_of(scope), body) as answer:
                    return await _pass_on(answer, scope, response)
            except ReplicaLost:
                request_id = scope["state"].get("request_id", "-")
                log.warning("request %s: replica %s of %s has ended", request_id, remote.name, group.model)
                if response.status:
                    raise ResultError(
                        "the replica that ran this request has ended: send the request again; with a seed it gives the"
                        " same text"
                    ) from None
                self.metrics.retried(group)
        raise unavailable(f"{ATTEMPTS} replicas have ended while they ran this request: try again later")

    def _group(self, scope: Scope, document: Mapping[str, Any]) -> Group:
        """Return the model that a request names: in its body, in its path or in its query. Raises FieldError."""
        name = document.get("model")
        if scope["path"].startswith(_MODELS + "/"):
            name = scope["path"][len(_MODELS) + 1 :]
        elif name is None:
            name = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model", [None])[0]
        if name is None:
            return self._groups[0]
        group = self._by_name.get(name) if isinstance(name, str) else None
        if group is None:
            known = ", ".join(group.names[0] for group in self._groups)
            message = f"the model {show(name)} does not exist: this server has {known}"
            raise FieldError(message, "model", 404, "model_not_found")
        return group

    async def _document(self, body: bytes, salt: str | None) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Return the JSON object of a body and the blocks of its prompt; empty without one: the replica refuses it."""

        async def receive() -> Message:
            return {"body": body}

        try:
            return await self._bodies.read(receive, lambda document: (document, prefix_blocks(document, salt)))
        except NanoinferError:
            return {}, ()

    async def _health(self, send: Send) -> None:
        """Answer 200 while every model has a replica, or is unloaded and can be loaded again."""
        if missing := [group.names[0] for group in self._groups if not group.is_running]:
            raise unavailable(f"no replica of {', '.join(missing)} runs")
        await respond(send, b"")

    async def _models(self, send: Send) -> None:
        """List the names of all models, those that are unloaded included."""
        entries = [entry for group in self._groups for entry in group.described]
        await respond_json(send, {"object": "list", "data": entries})


async def _pass_on(answer: Answer, scope: Scope, send: Send) -> None:
    """Send what the replica answers. Raises ReplicaLost."""
    status, headers = await answer.head()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    more = True
    while more:
        part, more = await answer.part()
        await send({"type": "http.response.body", "body": part, "more_body": more})
    if any(answer.num_tokens):
        count_tokens(scope, *answer.num_tokens)
