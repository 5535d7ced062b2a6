"""Structured outputs with a GGUF tokenizer: SmolLM2-135M-Instruct through the server (make test-smollm2)."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra structured is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")

from starlette.types import ASGIApp

from helpers import smollm2
from helpers.asgi import call, serve
from nanoinfer import AsyncLLM
from nanoinfer.protocols.fields import CHAT

pytestmark = smollm2.needs_smollm2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["English", "français", "日本語"]}, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
    {"structured_outputs": {"regex": r"[A-Z][a-zé]{2,11}, \d{1,3} 歳"}},
    {"structured_outputs": {"choice": ["Paris", "München", "東京"]}},
    {"structured_outputs": {"grammar": 'root ::= "I am " [0-9]+ " years old" ("." | "!")'}},
]


def check(given: dict[str, Any], text: str) -> None:
    """Check that an output is what was asked for."""
    wanted = given.get("structured_outputs", {})
    if "choice" in wanted:
        assert text in wanted["choice"]
    elif "json" in wanted or not wanted:
        found = json.loads(text)
        assert list(found) == PERSON["required"]
        assert isinstance(found["name"], str)
        assert 0 <= found["age"] <= 150
        assert set(found["languages"]) <= {"English", "français", "日本語"}
        assert not wanted or text == json.dumps(found, separators=(",", ":"), ensure_ascii=False)
    else:
        assert re.fullmatch(wanted.get("regex", r"I am \d+ years old[.!]"), text)


def test_outputs_of_a_gguf_model_match() -> None:
    question = [{"role": "user", "content": "Describe a person from Japan: name, age and languages, as JSON."}]

    async def main(app: ASGIApp, model: AsyncLLM) -> list[Any]:
        bodies = [
            {"messages": question, "temperature": t, "seed": 1, "max_tokens": 120, **given}
            for given in FORMATS
            for t in (0, 0.7)
        ]
        return await asyncio.gather(*(call(app, "POST", CHAT, body=json.dumps(body).encode()) for body in bodies))

    responses = serve(smollm2.model(), main)
    for i, response in enumerate(responses):
        assert response.status == 200, response.content
        (choice,) = json.loads(response.content)["choices"]
        assert choice["finish_reason"] == "stop", choice
        check(FORMATS[i // 2], choice["message"]["content"])
