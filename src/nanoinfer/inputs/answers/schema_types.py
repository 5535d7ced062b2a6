"""The types that a JSON schema permits, by which values that are written without quotes become JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanoinfer.structured.schemas import target

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def types_of(root: Mapping[str, Any], key: str) -> set[str] | None:
    """Return the JSON types that a property of an object may have; None if the schema does not say."""
    properties = root.get("properties")
    return types(root, properties.get(key) if isinstance(properties, Mapping) else None)


def types(root: Any, schema: Any) -> set[str] | None:
    """Return the JSON types that a schema permits; None if it does not say. Args: root: to which references are."""
    found: set[str] = set()
    for option in options(root, schema):
        if isinstance(kind := option.get("type"), str):
            found.add(kind)
        elif (values := listed(option)) is not None:
            found.update(map(type_of, values))
        else:
            return None
    return found or None


def options(root: Any, schema: Any) -> list[Mapping[str, Any]]:
    """Return the schemas of which one must match: references are followed, each once, and options are told apart.

    {"anyOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/n"}]} -> [{"type": "string"}, {"type": "null"}, ...]
    """
    found: list[Mapping[str, Any]] = []
    left, followed = [schema], set()
    while left:
        part = left.pop()
        if not isinstance(part, Mapping):
            found.append({})
        elif (referred := target(root, part.get("$ref"))) is not None:
            if part["$ref"] not in followed:
                left.append({**_kinds(part), **referred})
            followed.add(part["$ref"])
        elif (several := alternatives(part)) is not None:
            left += reversed(several)
        else:
            found.append(part)
    return found or [schema]  # it refers to itself alone


def alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the schemas of which one must match, if there are several: those of anyOf, oneOf or a list of types."""
    if isinstance(found := schema.get("anyOf") or schema.get("oneOf"), (list, tuple)):
        return [{**_kinds(schema), **part} if isinstance(part, Mapping) else part for part in found]
    if isinstance(kinds := schema.get("type"), (list, tuple)):
        return [{**schema, "type": kind} for kind in kinds]
    return None


def _kinds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": schema["type"]} if "type" in schema else {}


def listed(schema: Mapping[str, Any]) -> list[Any] | tuple[Any, ...] | None:
    """Return the values that a schema lists by enum or const, if it does."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, (list, tuple)) else None


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "null")


def strict_json(text: str) -> Any:
    """Return what a JSON text says. Raises ValueError, for NaN and Infinity too, and RecursionError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(name)
