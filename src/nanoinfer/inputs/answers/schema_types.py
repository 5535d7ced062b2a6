"""The types that a JSON schema permits, by which values that are written without quotes become JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanoinfer.structured.schemas import target

MAX_DEPTH = 16
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def types_of(root: Mapping[str, Any], key: str) -> set[str] | None:
    """Return the JSON types that a property of an object may have; None if the schema does not say."""
    properties = root.get("properties")
    return types(root, properties.get(key) if isinstance(properties, Mapping) else None)


def types(root: Any, schema: Any, depth: int = 0) -> set[str] | None:
    """Return the JSON types that a schema permits; None if it does not say.

    Args:
        root: the document, to which references are.
        schema: in it.
        depth: of options and references, which is bounded.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    if (named := schema.get("type")) is not None:
        return {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
    if isinstance(values := schema.get("enum"), (list, tuple)):
        return {type_of(value) for value in values}
    if "const" in schema:
        return {type_of(schema["const"])}
    if "$ref" in schema:
        return types(root, target(root, schema["$ref"]), depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), (list, tuple)):
            found = [types(root, option, depth + 1) for option in options]
            return None if None in found else {name for some in found if some is not None for name in some}
    return None


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
        found = type_of(strict_json(word))
    except (ValueError, RecursionError):
        return quoted
    if permitted is None or "string" not in permitted or found in permitted:
        return word
    return word if found == "integer" and "number" in permitted else quoted


def strict_json(text: str) -> Any:
    """Return what a JSON text says. Raises ValueError, for NaN and Infinity too, and RecursionError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(name)
