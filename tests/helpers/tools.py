"""Tools, schemas and checks for tests of tool calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

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


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose values are short."""
    kinds = ["integer", "boolean", "string", "enum", "null"] + ["array", "object"] * (depth < 2)
    kind = rng.choice(kinds)
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-99, 0), "maximum": rng.randint(1, 999)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "ß", "x y", 3, True, None, "日本"], rng.randint(1, 4))}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(1, 2)}
    if kind == "object":
        return random_object(rng, depth + 1)
    return {"type": kind}


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of an object."""
    names = rng.sample(["a", "b_c", "long name", "é", "0"], rng.randint(0, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value matches one of these schemas."""
    if "enum" in schema:
        return any(value == v and type(value) is type(v) for v in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and all(name in value for name in schema["required"])
            and all(name in known and matches(v, known[name]) for name, v in value.items())
        )
    if kind == "array":
        items = isinstance(value, list) and len(value) <= schema["maxItems"]
        return items and all(matches(v, schema["items"]) for v in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        in_range = type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        return in_range
    return isinstance(value, bool) if kind == "boolean" else value is None


def check_call(name: str, arguments: str, tools: list[dict[str, Any]]) -> Any:
    """Return the arguments of a call. Asserts that they match its tool's schema."""
    (schema,) = [t["function"]["parameters"] for t in tools if t["function"]["name"] == name]
    found = json.loads(arguments)
    assert matches(found, schema), (arguments, schema)
    return found
