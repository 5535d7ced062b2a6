"""Tools, schemas and checks for tests of tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.answers import valid
from helpers.chat import chat_folder
from helpers.chat_templates import TOOLS

ADD = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}}
CITY = {"city": {"type": "string", "maxLength": 4}}


def tool(name: str, properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a tool, all of whose properties are required."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


TWO: list[dict[str, Any]] = [tool("add", ADD), tool("weather", CITY, description="The weather of a city.")]


def tools_folder(path: Path, template: str = TOOLS) -> Path:
    """Write a random chat model whose template has tools and reasoning."""
    return chat_folder(path, template, max_position_embeddings=2048)


def check_call(name: str, arguments: str, tools: list[dict[str, Any]]) -> Any:
    """Return the arguments of a call. Asserts that they match its tool's schema."""
    (schema,) = [t["function"]["parameters"] for t in tools if t["function"]["name"] == name]
    values = json.loads(arguments)
    assert valid(values, schema, schema), (arguments, schema)
    return values
