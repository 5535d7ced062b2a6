"""The types that a JSON schema permits, by which values that are written without quotes become JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanoinfer.structured.schemas import target

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def types_of(root: Mapping[str, Any], key: str) -> set[str] | None:
    """Return the JSON types that a property of an object may have; None if the schema does not say."""
    properties = root.get("properties")
    return types(root, properties.get(key) if isinstance(properties, Mapping) else None)


def types(root: Any, schema: Any) -> set[str] | None:
    """Return the JSON types that a schema permits; None if it does not say.

    Args:
        root: the document, to which references are.
        schema: in it.
    """
    found: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping):
            return None
        if id(schema) in seen:  # an option that refers to itself permits nothing more
            continue
        seen.add(id(schema))
        options = next((v for key in ("anyOf", "oneOf") if isinstance(v := schema.get(key), (list, tuple))), None)
        if (named := schema.get("type")) is not None:
            found |= {name for name in ([named] if isinstance(named, str) else named) if isinstance(name, str)}
        elif isinstance(values := schema.get("enum"), (list, tuple)):
            found |= {type_of(value) for value in values}
        elif "const" in schema:
            found.add(type_of(schema["const"]))
        elif "$ref" in schema:
            left.append(target(root, schema["$ref"]))
        elif options is not None:
            left += options
        else:
            return None
    return found or None


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "null")


def to_json(text: str, permitted: set[str] | None) -> str:
    """Return a value that was written without quotes as JSON: as it is if its type is permitted, else as a string.

    The words of Python, such as True, become those of JSON.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    word = text.strip()
    word = _WORDS.get(word, word)
    if permitted is not None and permitted <= {"string", "null"}:
        return word if "null" in permitted and word == "null" else quoted
    try:
        found = type_of(json.loads(word, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted
    if permitted is None or "string" not in permitted or found in permitted:
        return word
    return word if found == "integer" and "number" in permitted else quoted


def _refuse(name: str) -> None:
    raise ValueError(name)
