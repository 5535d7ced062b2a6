"""A client of the application, without a network. It needs the extras server and test."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from nanoinfer import LLM, AsyncLLM
from nanoinfer.server.app import build_app
from nanoinfer.server.config import ServerConfig


def uncached(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a usage without the number of cached tokens, which depends on the requests before."""
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


class Client:
    """Sends requests to the application, without a network."""

    def __init__(self, llm: LLM, **config: Any) -> None:
        self.llm, self.async_llm = llm, AsyncLLM.from_llm(llm)
        self.app = build_app(self.async_llm, ServerConfig(**config))

    def request(self, method: str, path: str, **options: Any) -> Any:
        async def send() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, **options)

        return asyncio.run(asyncio.wait_for(send(), 60))

    def get(self, path: str) -> Any:
        return self.request("GET", path).json()

    def post(self, path: str, **body: Any) -> Any:
        response = self.request("POST", path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream."""
        response = self.request("POST", path, json={**body, "stream": True})
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def error(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        response = self.request("POST", path, json=body)
        assert set(response.json()) == {"error"}
        return response.status_code, response.json()["error"]
