"""A server for the tests of the page: the prompt chooses what it answers. Run it in a thread with `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanoinfer.protocols.fields import FieldError
from nanoinfer.server import page_routes
from nanoinfer.server.http import Bodies, Refusal

SAMPLING: dict[str, Any] = {
    "max_tokens": None, "temperature": 1.0, "top_k": 0, "presence_penalty": 0.0, "seed": None, "stop": [],
    "stop_token_ids": [], "ignore_eos": False, "logprobs": None, "prompt_logprobs": None, "logit_bias": None,
    "overflow": "stop",
}  # fmt: skip
INFO = {
    "model": "tiny",
    "has_chat_template": True,
    "reasoning_options": ["enable_thinking", "reasoning_effort"],
    "block_size": 512,
    "engine": "native",
    "quantization": "int8",
    "speculation": True,
    "shows_tools": False,
    "sampling_params": {"chat": {**SAMPLING, "max_tokens": None}, "completions": {**SAMPLING, "max_tokens": 16}},
    "page_sampling_params": {
        "chat": {"max_tokens": 1024, "temperature": 0.8, "top_k": 50},
        "completions": {"max_tokens": 128, "temperature": 0.8, "top_k": 50},
    },
}
PROPERTIES: dict[str, Any] = {
    "max_tokens": {"type": ["integer", "null"], "minimum": 1, "description": "Maximum number of tokens."},
    "temperature": {"$ref": "#/components/schemas/Temperature"},
    "top_k": {"type": "integer", "minimum": -1, "description": "Sample from the k most likely tokens."},
    "presence_penalty": {"type": "number", "minimum": -1000, "maximum": 1000},
    "seed": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "description": "Seed of the request."},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    "stop_token_ids": {"type": "array", "items": {"type": "integer"}},
    "ignore_eos": {"type": "boolean", "description": "Continue after the end tokens."},
    "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    "logit_bias": {"type": ["object", "null"]},
    "overflow": {"type": "string", "enum": ["stop", "slide"]},
}
CHAT_PROPERTIES: dict[str, Any] = {
    "tools": {"type": ["array", "null"], "items": {"type": "object"}, "description": "Functions."},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]},
    "parallel_tool_calls": {"type": ["boolean", "null"]},
    "enable_thinking": {"type": ["boolean", "null"]},
    "reasoning_effort": {"type": ["string", "null"]},
}
TEMPERATURE = {"type": "number", "minimum": 0, "maximum": 1000000, "description": "0 is greedy decoding."}
OPENAPI = {
    "paths": {
        path: {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
        for path, schema in (
            ("/v1/completions", {"$ref": "#/components/schemas/Body"}),
            ("/v1/chat/completions", {"type": "object", "properties": CHAT_PROPERTIES}),
        )
    },
    "components": {"schemas": {"Body": {"type": "object", "properties": PROPERTIES}, "Temperature": TEMPERATURE}},
}
HTML = ["<img src=x ", "onerror=\"document.title='injected'\">", "<b>", "&amp;", "\n"]
TEXT = [" to", " be", ",\n", " or", "é"]
KEY = "secret"


class Stub:
    """What the tests look at: the requests that were received, and whether the server requires the key."""

    url = ""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.num_closed = 0  # streams that ended before their last token
        self.wants_key = False
        self.drafts = True
        self.info: dict[str, Any] = INFO
        self.answers: dict[str, list[dict[str, Any]]] = {}
        """Deltas of the answer to a last message of a chat."""

    def wait_until_closed(self, count: int) -> None:
        """Wait until this many streams have ended because their client left."""
        deadline = time.monotonic() + 10
        while self.num_closed < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def app(self) -> Starlette:
        async def info(request: Request) -> Response:
            return self._refused(request) or JSONResponse(self.info)

        async def openapi(request: Request) -> Response:
            return self._refused(request) or JSONResponse(OPENAPI)

        service = SimpleNamespace(bodies=Bodies())

        async def markdown(scope: Any, receive: Any, send: Any) -> None:
            try:
                await page_routes.markdown(service, scope, receive, send)  # type: ignore[arg-type]
            except FieldError as e:
                await Refusal(e.status, str(e)).send(send, scope)

        posts = [Route(path, self._generate, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
        posts.append(Route("/page/markdown", _Asgi(markdown), methods=["POST"]))
        return Starlette(routes=[*page_routes.routes(), Route("/info", info), Route("/openapi.json", openapi), *posts])

    def _refused(self, request: Request) -> Response | None:
        if not self.wants_key or request.headers.get("authorization") == f"Bearer {KEY}":
            return None
        return _error(401, "the API key is missing or wrong")

    async def _generate(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        self.bodies.append((request.url.path, body))
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if body.get("temperature", 1) > 5:
            return _error(400, "temperature=9.0 is not in [0, 5]", "temperature")
        if prompt == "busy":
            return _error(429, "the queue is full", headers={"Retry-After": "3"})
        return StreamingResponse(self._stream(prompt, chat), media_type="text/event-stream")

    async def _stream(self, prompt: str, chat: bool) -> AsyncIterator[str]:
        if prompt in self.answers:
            for i, delta in enumerate(self.answers[prompt]):
                await asyncio.sleep(0.01)
                choice = {"index": 0, "delta": delta, "token_ids": [i], "finish_reason": None}
                yield _event({"choices": [choice]})
            yield "data: [DONE]\n\n"
            return
        tokens = {"html": HTML, "long": [" a", " b"] * 500}.get(prompt, TEXT)
        try:
            for i, token in enumerate(tokens):
                await asyncio.sleep(0.01)
                chunk = _chunk(token, i, chat, last=i == len(tokens) - 1)
                if not self.drafts:
                    del chunk["choices"][0]["draft_accepted"]
                yield _event(chunk)
                if prompt == "lost" and i == 1:
                    return
                if prompt == "garbage" and i == 1:
                    yield "data: {oops\n\n"
                if prompt == "fails" and i == 1:
                    yield _event({"error": {"message": "logits are not finite", "param": None}})
                    return
            yield _event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)}})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_closed += 1
            raise


class _Asgi:
    """An ASGI application that Starlette does not take for a function of a request."""

    def __init__(self, call: Callable[..., Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._call(scope, receive, send)


def _error(status: int, message: str, param: str | None = None, **options: Any) -> Response:
    return JSONResponse({"error": {"message": message, "param": param}}, status_code=status, **options)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _chunk(token: str, i: int, chat: bool, last: bool) -> dict[str, Any]:
    """Return a chunk of one token, which every second time was accepted from the draft; é is two tokens."""
    ids, texts = ([90, 91], ["\ufffd", "\ufffd"]) if token == "é" else ([i + 10], [token])
    tops = [{text: -0.5, " other": -1.5} for text in texts]
    if chat:
        content = [
            {"token": t, "logprob": -0.5, "top_logprobs": [{"token": k, "logprob": v} for k, v in top.items()]}
            for t, top in zip(texts, tops, strict=True)
        ]
        shown: dict[str, Any] = {"delta": {"content": token}, "logprobs": {"content": content}}
    else:
        logprobs = {"tokens": texts, "token_logprobs": [-0.5] * len(texts), "top_logprobs": tops}
        shown = {"text": token, "logprobs": logprobs}
    choice = {"index": 0, **shown, "token_ids": ids, "draft_accepted": [i % 2 == 1] * len(ids)}
    return {"choices": [{**choice, "finish_reason": "length" if last else None}]}


@contextlib.contextmanager
def serve(app: Any) -> Iterator[str]:
    """Run an app in a thread, on a free port of the loopback interface. Yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    (socket,) = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/"
    finally:
        server.force_exit = True
        server.should_exit = True
        thread.join(10)
