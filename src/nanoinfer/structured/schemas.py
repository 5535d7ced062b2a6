"""JSON schemas before they are compiled: they are rewritten for llguidance, objects are closed, or refused.

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
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from nanoinfer.errors import NanoinferError, show

Schema = dict[str, Any]
KEEPS_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
"""Keywords of an object that is left as it is."""
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_APPLIED = ("allOf", "anyOf", "oneOf", "$ref")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_MAPS, lambda v: isinstance(v, dict), "an object"),
    (("allOf", "anyOf", "oneOf", "enum", "prefixItems"), lambda v: isinstance(v, list), "a list"),
    (("pattern", "format", "$ref"), lambda v: isinstance(v, str), "a string"),
    (("minItems", "maxItems", "minLength", "maxLength"), lambda v: type(v) is int and v >= 0, "an integer from 0"),
    (("minimum", "maximum", "multipleOf"), lambda v: type(v) in (int, float), "a number"),
    (("exclusiveMinimum", "exclusiveMaximum"), lambda v: type(v) in (int, float, bool), "a number"),
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


def rewrite(root: Schema) -> None:
    """Write what llguidance does not support by what it does, in place: other texts, the same meaning.

    oneOf            anyOf, where the options are objects with different constants of one property, which becomes
                     required: pydantic's discriminated unions
    propertyNames    properties or patternProperties, where the names are listed or match a pattern: records of zod
    allOf            what it holds, where that is one schema with other keywords: pydantic 1, and for texts without JSON
    """
    for schema in reachable(root, [root]):
        parts = _items(schema, "allOf")
        if len(parts) == 1 and isinstance(parts[0], dict) and not parts[0].keys() & schema.keys():
            schema |= parts[0]
            del schema["allOf"]
        names = schema.get("propertyNames")
        names = target(root, names["$ref"]) if isinstance(names, dict) and names.keys() == {"$ref"} else names
        if isinstance(names, dict):
            _rewrite_names(schema, names)
        leaves = [options(root, option, inherit=False) for option in _items(schema, "oneOf")]
        if "anyOf" not in schema and (name := _discriminator(leaves)) is not None:
            for leaf in (leaf for some in leaves for leaf in some):
                leaf["required"] = list(dict.fromkeys([*_required(leaf), name]))
            items = [("anyOf" if key == "oneOf" else key, value) for key, value in schema.items()]
            schema.clear()  # the order of keywords is that of properties
            schema.update(items)


def _rewrite_names(schema: Schema, names: Schema) -> None:
    """Rewrite "propertyNames" of an object. Args: names: their schema."""
    kept = names.keys() - {"type", "title", "description"}
    rest = schema.get("additionalProperties", {})
    if not kept and names.get("type", "string") == "string":
        del schema["propertyNames"]
    elif kept <= {"enum", "const"} and "patternProperties" not in schema:
        known = _properties(schema)
        properties = {name: known.get(name, rest) for name in listed(names) or () if isinstance(name, str)}
        schema |= {"properties": properties, "additionalProperties": False}
        del schema["propertyNames"]
    elif kept == {"pattern"} and "properties" not in schema and "patternProperties" not in schema:
        schema |= {"patternProperties": {names["pattern"]: rest}, "additionalProperties": False}
        del schema["propertyNames"]


def options(root: Any, schema: Any, inherit: bool = True) -> list[Any]:
    """Return the schemas of which one must match: references are followed, each once, and options are told apart.

    {"anyOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/n"}]} -> [{"type": "string"}, {"type": "null"}, ...]

    Args:
        root: the schema that references are to.
        schema: any value.
        inherit: whether options have the type that is beside anyOf, oneOf or $ref, and lists of types are options.
            Otherwise the result has schemas of the document, no copies.
    """
    leaves: list[Any] = []
    pending, followed = [schema], set()
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping):
            leaves.append({})
        elif (referred := target(root, part.get("$ref"))) is not None:
            if part["$ref"] not in followed:
                pending.append(_typed(part, referred) if inherit else referred)
            followed.add(part["$ref"])
        elif (several := alternatives(part, inherit)) is not None:
            pending += reversed(several)
        else:
            leaves.append(part)
    return leaves or [schema]  # it refers to itself alone


def alternatives(schema: Mapping[str, Any], inherit: bool = True) -> list[Any] | None:
    """Return the schemas of which one must match, if there are several: those of anyOf, oneOf or a list of types."""
    if isinstance(several := schema.get("anyOf") or schema.get("oneOf"), (list, tuple)):
        return [_typed(schema, part) for part in several] if inherit else list(several)
    if inherit and isinstance(kinds := schema.get("type"), (list, tuple)):
        return [{**schema, "type": kind} for kind in kinds]
    return None


def _typed(schema: Mapping[str, Any], part: Any) -> Any:
    """Return an option of a schema with the type of the schema, unless it has its own."""
    return {"type": schema["type"], **part} if "type" in schema and isinstance(part, Mapping) else part


def listed(schema: Any) -> list[Any] | tuple[Any, ...] | None:
    """Return the values that a schema lists by enum or const, if it does."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, (list, tuple)) else None


def types(root: Any, schema: Any) -> set[str] | None:
    """Return the JSON types that a schema permits; None if it does not say. Args: root: that references are to."""
    names: set[str] = set()
    for option in options(root, schema):
        if isinstance(kind := option.get("type") if isinstance(option, Mapping) else None, str):
            names.add(kind)
        elif (values := listed(option)) is not None:
            names.update(map(type_of, values))
        else:
            return None
    return names or None


def types_of(root: Mapping[str, Any], key: str) -> set[str] | None:
    """Return the JSON types that a property of an object may have; None if the schema does not say."""
    properties = root.get("properties")
    return types(root, properties.get(key) if isinstance(properties, Mapping) else None)


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "null")


def _discriminator(options: list[list[Any]]) -> str | None:
    """Return a property whose constants differ from option to option, each of which is one of some objects."""
    if not options or not all(isinstance(s, dict) and s.get("type") == "object" for leaves in options for s in leaves):
        return None
    for name in _properties(options[0][0]):
        values = [[listed(_properties(leaf).get(name)) or () for leaf in leaves] for leaves in options]
        sets = [{json.dumps(value) for some in each for value in some} for each in values]
        if all(all(each) for each in values) and sum(map(len, sets)) == len(set().union(*sets)):
            return name
    return None


def check_types(schema: Schema) -> None:
    """Raise NanoinferError for a keyword with a value of a wrong type. Limits that are floats become int, in place."""
    for key, what in wrong_types(schema):
        raise NanoinferError(f"parameters: {key}={show(schema[key])} is not {what}: correct the schema")


def wrong_types(schema: Schema) -> list[tuple[str, str]]:
    """Return the keywords with a value of a wrong type, each with what it must be. Floats change as above."""
    wrong = []
    for keys, is_valid, what in _TYPES:
        for key in keys:
            if isinstance(value := schema.get(key), float) and value.is_integer():
                value = schema[key] = int(value)
            if key in schema and not is_valid(value):
                wrong.append((key, what))
    return wrong


def gather(root: Schema) -> None:
    """Copy what is referred to outside $defs and definitions to $defs, in place, and refer to the copies."""
    moved: dict[str, tuple[str, Schema]] = {}
    for schema in reachable(root, [root]):
        reference = str(schema.get("$ref"))
        if (referred := target(root, reference)) is not None and not re.match(r"#/(\$defs|definitions)/", reference):
            name, _ = moved.setdefault(reference, (f"moved.{len(moved)}", referred))
            schema["$ref"] = f"#/$defs/{name}"
    without = {name: {k: v for k, v in s.items() if k not in ("$defs", "definitions")} for name, s in moved.values()}
    if moved:
        root["$defs"] = {**json.loads(json.dumps(without)), **root.get("$defs", {})}


def reachable(root: Schema, pending: list[Any]) -> list[Schema]:
    """Return schemas and all schemas within them or referred to, each once."""
    reached: dict[int, Schema] = {}
    pending = list(pending)
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in reached:
            continue
        reached[id(schema)] = schema
        pending += [schema.get(key) for key in _SINGLE]
        for key in _LISTS:
            pending += _items(schema, key)
        for key in _MAPS:
            if isinstance(named := schema.get(key), dict):
                pending += named.values()
        if "$ref" in schema:
            pending.append(target(root, schema["$ref"]))
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
    value: Any = root
    for name in unquote(reference[2:]).split("/") if reference != "#" else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name in map(str, range(len(value))):
            value = value[int(name)]
        else:
            return None
    return value if isinstance(value, dict) else None


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Schema) -> list[str]:
    return [name for name in _items(schema, "required") if isinstance(name, str)]


def _items(schema: Schema, key: str) -> list[Any]:
    items = schema.get(key)
    return items if isinstance(items, list) else []
