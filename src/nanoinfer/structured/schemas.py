"""JSON schemas before they are compiled: objects are closed, and objects that cannot be generated are refused.

By JSON Schema's default, an object may have properties that its schema does not list, so a model can add properties
without end. `close` adds "additionalProperties": false to objects that list theirs, as pydantic's schemas do. What the
result permits also matches the schema as it was given, and what was satisfiable stays so:

    closed     an object with "properties": the root, a property, an item, a definition, an option of anyOf
    left open  one that has a keyword of KEEPS_OPEN, and one without "properties"
               all within a composition ("properties" beside allOf, anyOf or $ref, several parts of allOf, "properties"
               beside "patternProperties"), because each part would refuse the properties of the others
               all within oneOf, because an object may match two of its options that do not overlap once they are closed
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import show

Schema = dict[str, Any]
KEEPS_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
"""Keywords of an object that is left as it is."""
MAX_OPTIONAL = 490
"""Optional properties in a row. llguidance needs 4 items for each, of at most 2,000."""
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_APPLIED = ("allOf", "anyOf", "oneOf", "$ref")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_MAPS, lambda v: isinstance(v, dict), "an object"),
    (("allOf", "anyOf", "oneOf", "enum"), lambda v: isinstance(v, list), "a list"),
    (("pattern", "$ref"), lambda v: isinstance(v, str), "a string"),
    (("minItems", "maxItems", "minLength", "maxLength"), lambda v: type(v) is int and v >= 0, "an integer from 0"),
    (("required",), _are_strings, "a list of strings"),
    (("type",), lambda v: isinstance(v, str) or _are_strings(v), "a string or a list of strings"),
)


def close(root: Schema) -> None:
    """Close the objects of a schema, in place.

    If it refers to anything but paths in the document, it is left as it is.
    """
    schemas = reachable(root, [root])
    if any("$ref" in s and target(root, s["$ref"]) is None for s in schemas):
        return
    composed = [part for s in schemas for part in _composed(s)]
    left_open = {id(s) for s in reachable(root, composed)}
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, dict) and id(schema) not in left_open and not any(k in schema for k in KEEPS_OPEN):
            for name in _required(schema):
                properties.setdefault(name, {})
            schema["additionalProperties"] = False


def check(root: Schema) -> None:
    """Raise NanoinferError if an object of a schema has more optional properties in a row than can be generated."""
    for schema in reachable(root, [root]):
        properties = schema.get("properties")
        if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL:
            continue
        required = set(_required(schema))
        run = longest = 0
        for name in properties:
            run = 0 if name in required else run + 1
            longest = max(longest, run)
        if longest > MAX_OPTIONAL:
            raise NanoinferError(
                f"structured_outputs.json: an object has {longest} optional properties in a row, the limit is"
                f" {MAX_OPTIONAL}: add some of them to required, or split the object"
            )


def check_types(schema: Schema) -> None:
    """Raise NanoinferError for a keyword with a value of a wrong type. Limits that are floats become int, in place."""
    for keys, is_valid, what in _TYPES:
        for key in keys:
            if isinstance(value := schema.get(key), float) and value.is_integer():
                value = schema[key] = int(value)
            if key in schema and not is_valid(value):
                raise NanoinferError(f"parameters: {key}={show(value)} is not {what}: correct the schema")


def gather(root: Schema) -> None:
    """Copy what is referred to outside $defs and definitions to $defs, in place, and refer to the copies."""
    moved: dict[str, tuple[str, Schema]] = {}
    for schema in reachable(root, [root]):
        reference = str(schema.get("$ref"))
        if (found := target(root, reference)) is not None and not re.match(r"#/(\$defs|definitions)/", reference):
            name, _ = moved.setdefault(reference, (f"moved.{len(moved)}", found))
            schema["$ref"] = f"#/$defs/{name}"
    without = {name: {k: v for k, v in s.items() if k not in ("$defs", "definitions")} for name, s in moved.values()}
    if moved:
        root["$defs"] = {**json.loads(json.dumps(without)), **root.get("$defs", {})}


def reachable(root: Schema, found: list[Any]) -> list[Schema]:
    """Return schemas and all schemas within them or referred to, each once."""
    reached: dict[int, Schema] = {}
    found = list(found)
    while found:
        schema = found.pop()
        if not isinstance(schema, dict) or id(schema) in reached:
            continue
        reached[id(schema)] = schema
        found += [schema.get(key) for key in _SINGLE]
        for key in _LISTS:
            found += _items(schema, key)
        for key in _MAPS:
            if isinstance(named := schema.get(key), dict):
                found += named.values()
        if "$ref" in schema:
            found.append(target(root, schema["$ref"]))
    return list(reached.values())


def _composed(schema: Schema) -> list[Any]:
    """Return the schema if several of its parts describe one object; else the options of its oneOf."""
    about = [s for s in _items(schema, "allOf") if isinstance(s, dict) and any(k in s for k in _OF_OBJECTS + _APPLIED)]
    num_parts = len(about) + any(key in schema for key in _OF_OBJECTS)
    num_parts += sum(key in schema for key in ("anyOf", "oneOf", "$ref"))
    if num_parts > 1 or ("properties" in schema and "patternProperties" in schema):
        return [schema]
    return _items(schema, "oneOf")


def target(root: Schema, reference: Any) -> Schema | None:
    """Return the schema that a reference is to; None unless it is a path in the document, such as "#/$defs/a"."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    found: Any = root
    for name in unquote(reference[2:]).split("/") if reference != "#" else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name in map(str, range(len(found))):
            found = found[int(name)]
        else:
            return None
    return found if isinstance(found, dict) else None


def _required(schema: Schema) -> list[str]:
    return [name for name in _items(schema, "required") if isinstance(name, str)]


def _items(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
