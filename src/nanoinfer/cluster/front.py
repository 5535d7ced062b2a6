"""The front: an ASGI application that passes each request on to a replica of the model that it names.

If a replica ends, its requests whose response has not begun are sent again, to another replica; with a seed the
text is the same. A stream that has begun ends with an error, or, with the header X-Continue-Stream, another replica
continues it: a token depends only on the seed, its position and the tokens before it. So the front requests the ids of
the tokens in each event, and sends the request again with these as `output_token_ids`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from nanoinfer.cluster.link import Answer, ReplicaLost, head_of
from nanoinfer.cluster.local import Group, unavailable
from nanoinfer.cluster.metrics import FrontMetrics
from nanoinfer.cluster.routing import prefix_blocks
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, FieldError
from nanoinfer.server.access_log import count_tokens
from nanoinfer.server.http import Bodies, respond, respond_json
from nanoinfer.server.metrics import CONTENT_TYPE as METRICS_TYPE
from nanoinfer.utils.checks import show

log = logging.getLogger("nanoinfer.server")

ATTEMPTS = 3
"""How often a request is sent to a replica: a request that crashes its replica must not crash all of them."""
RETRY_SEC = 0.05
"""Time before it is sent again; ten times as long before the next time. Of replicas that end together, the front learns
one by one."""
_MODELS = "/v1/models"
_CONTINUE = b"x-continue-stream"


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
            return await self._models(scope, send)
        body: bytes = (await receive())["body"]
        document, blocks = await self._document(body, scope["state"].get("cache_salt"))
        group = self._group(scope, document)
        stream = continued_stream(scope, document)
        num_lost = num_events = 0
        while num_lost < ATTEMPTS:
            answer = await group.ask(head_of(scope), body if stream is None else stream.body(), blocks)
            try:
                return await _pass_on(answer, scope, send, stream)
            except ReplicaLost:
                request_id = scope["state"].get("request_id", "-")
                log.warning("request %s: replica %s of %s has ended", request_id, answer.remote.name, group.model)
                if answer.status and stream is None:
                    raise ResultError(
                        "the replica that ran this request has ended: send the request again; with a seed it gives the"
                        " same text"
                    ) from None
                num_lost += 1
                if stream is not None and stream.num_events > num_events:  # progress: it does not crash replicas
                    num_lost, num_events = 1, stream.num_events
                self.metrics.retried(group)
                if num_lost < ATTEMPTS:
                    await asyncio.sleep(RETRY_SEC * 10 ** (num_lost - 1))
            finally:
                answer.close()
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
            return await self._bodies.read(receive, lambda found: (found, prefix_blocks(found, salt)))
        except NanoinferError:
            return {}, ()

    async def _health(self, send: Send) -> None:
        """Answer 200 while every model has a replica, or is unloaded and can be loaded again."""
        if missing := [group.names[0] for group in self._groups if not group.is_running]:
            raise unavailable(f"no replica of {', '.join(missing)} runs")
        await respond(send, b"")

    async def _models(self, scope: Scope, send: Send) -> None:
        """List the names of all models, those that are unloaded included."""
        found = [entry for group in self._groups for entry in group.described]
        await respond_json(send, {"object": "list", "data": found})


async def _pass_on(answer: Answer, scope: Scope, send: Send, stream: ContinuedStream | None) -> None:
    """Send what the replica answers. Raises ReplicaLost."""
    await answer.wait()
    events = stream if answer.status == 200 else None  # others are whole responses: errors
    if stream is None or not stream.has_begun:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if stream is not None:
            stream.has_begun = True
    elif events is None:
        raise ResultError("the stream could not be continued on another replica: send the request again")
    while True:
        part, more = answer.take(), answer.num_tokens is None
        if events is not None:
            part = events.receive(part)
        if part or not more:
            await send({"type": "http.response.body", "body": part, "more_body": more})
        if not more:
            break
        await answer.wait()
    assert answer.num_tokens is not None
    if any(answer.num_tokens):
        count_tokens(scope, *answer.num_tokens)


class ContinuedStream:
    """A stream of events that may come from several replicas.

    Args:
        document: the body of the request.

    Raises:
        FieldError: its output_token_ids are no list.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        seed = document.get("seed")
        self._document = {**document, "return_token_ids": True, "seed": secrets.randbits(31) if seed is None else seed}
        given = document.get("output_token_ids") or []
        if not isinstance(given, list):
            raise FieldError(f"output_token_ids={show(given)} is not a list", "output_token_ids")
        self._token_ids = list(given)
        self._rest = b""
        self._held: list[bytes] = []
        self._id: bytes | None = None
        self._has_finished = False
        self.has_begun = False
        """Whether the status was sent."""
        self.num_events = 0
        """Events that were passed on."""

    def body(self) -> bytes:
        """Return the body of a request that continues the stream."""
        self._rest = b""  # a part of an event, which comes again, as those do that are held
        self._held.clear()
        return json.dumps({**self._document, "output_token_ids": self._token_ids}).encode()

    def receive(self, part: bytes) -> bytes:
        """Return the events that can be passed on of what was received, with one id, and note their tokens.

        A token may come as several events, of which the last has its id: they are passed on together.
        """
        *events, self._rest = (self._rest + part).split(b"\n\n")
        passed: list[bytes] = []
        for event in events:
            if self._add(event + b"\n\n"):
                passed += self._held
                self._held.clear()
        self.num_events += len(passed)
        return b"".join(passed)

    def _add(self, event: bytes) -> bool:
        """Hold an event; return whether those that are held can be passed on."""
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):  # [DONE]
            self._held.append(event)
            return True
        found = json.loads(data)
        token_ids: list[int] = []
        for choice in found.get("choices", ()):
            if self._has_finished:
                return False  # the replica ended after this, and before the end of the stream
            token_ids += choice.get("token_ids") or ()
            self._has_finished = choice.get("finish_reason") is not None
        self._token_ids += token_ids
        own = json.dumps(found.get("id")).encode()
        self._id = self._id or own
        self._held.append(event.replace(own, self._id, 1))
        return bool(token_ids) or self._has_finished or "error" in found


def continued_stream(scope: Scope, document: Mapping[str, Any]) -> ContinuedStream | None:
    """Return the stream of a request that has the header; None if it has not.

    Raises:
        FieldError: the request is not one for a stream of one output, or as for ContinuedStream.
    """
    if all(name != _CONTINUE or value == b"0" for name, value in scope["headers"]):
        return None
    several = [name for name in ("n", "best_of") if document.get(name) not in (None, 1)]
    several += [name for name in ("echo", "prompt_logprobs") if document.get(name) not in (None, False)]
    prompt = document.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        several.append("prompt")
    if scope["path"] not in (COMPLETIONS, CHAT) or document.get("stream") is not True or several:
        raise FieldError(
            f"X-Continue-Stream is for streams of one output, without the prompt, of {COMPLETIONS}, {CHAT}: leave out"
            f" the header{f', or {several[0]}' if several else ''}",
            several[0] if several else "stream",
        )
    return ContinuedStream(document)
