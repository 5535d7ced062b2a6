"""Parts of llguidance's Lark for the grammars of answers: literals with special tokens, and arguments of each notation.

json     %json of the whole schema
python   k=%json, in the order of the schema
tagged   a string as text up to the piece after it, other types %json, in the order of the schema
gemma    objects and arrays as rules, strings as text between marks
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.answers.format import ID, AnswerFormat
from nanoinfer.inputs.answers.reader import STRING_MARK
from nanoinfer.inputs.answers.schema_types import types
from nanoinfer.structured import schemas
from nanoinfer.utils.checks import show

ANNOTATIONS = ("title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated")
_COMPOSED = (
    "allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentRequired", "dependentSchemas",
    "minProperties", "maxProperties", "propertyNames", "unevaluatedProperties",
)  # fmt: skip
_BARE_KEY = re.compile(r"[^\s=:,()\[\]{}\"'<>]+")  # as the parser reads it
_TAGGED_KEY = re.compile(r"[^\s<>](?:[^\n<>]*[^\s<>])?")
_OUTSIDE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')


def own(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema without annotations, with its objects closed.

    Raises NanoinferError as `schemas.check` and `schemas.check_types`.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for part in schemas.reachable(copy, [copy]):
        schemas.check_types(part)
        for key in ANNOTATIONS:
            part.pop(key, None)
    schemas.close(copy)
    schemas.check(copy)
    return copy


def regex(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


class Lark:
    """Collects the rules of a grammar.

    Args:
        special_tokens: text -> id of the tokens that only a reference can permit.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._rules: list[str] = []
        self._count = 0

    def rule(self, body: str, name: str = "r", options: str = "") -> str:
        """Add a rule and return its name. A name in capitals is a terminal."""
        made = self.reserve(name)
        self.define(made, body, options)
        return made

    def reserve(self, name: str = "r") -> str:
        """Return the name of a rule that is defined later."""
        self._count += 1
        return f"{name}{self._count}"

    def define(self, name: str, body: str, options: str = "") -> None:
        """Add a rule of a reserved name."""
        self._rules.append(f"{name}{options}: {body}")

    def text(self, start: str) -> str:
        """Return the grammar, with the body of its first rule."""
        return "\n".join([f"start: {start}", *self._rules])

    def is_special(self, text: str) -> bool:
        """Return whether a text begins with a special token."""
        return any(text.startswith(name) for name in self._special)

    def literal(self, text: str) -> str:
        """Return a piece of a format as a sequence of literals and special tokens; empty for an empty one."""
        parts = []
        for i, part in enumerate(text.split(ID)):
            parts += ["/[a-zA-Z0-9]{9}/"] if i else []
            for token in self._pattern.split(part) if self._pattern else [part]:
                if token:
                    special = self._special.get(token)
                    parts.append(json.dumps(token) if special is None else f"<special_{special}>")
        return " ".join(parts)

    def until(self, end: str, body: str = "/(?s:.*)/") -> str:
        """Return text up to and including an end marker.

        Args:
            end: the marker.
            body: terminal that matches the text.
        """
        if self.is_special(end.strip()):
            return f"{self.rule(body, 'TEXT')}? {self.literal(end)}"
        return self.rule(self.rule(body, "TEXT"), "text", f"[suffix={json.dumps(end)}]")

    def json(self, schema: Any) -> str:
        """Return a value as JSON."""
        if not isinstance(schema, dict):
            schema = {} if schema is not False else {"not": {}}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': ' ?'}})}")


class Arguments:
    """Rules of the arguments of one tool.

    Args:
        lark: gets the rules.
        format: of the answers.
        schema: of an object, as `own` returns it.
    """

    def __init__(self, lark: Lark, format: AnswerFormat, schema: dict[str, Any]) -> None:
        self._lark, self._format, self._root = lark, format, schema
        self._references: dict[str, str] = {}

    def rule(self) -> str:
        """Return the rule of the arguments. Raises NanoinferError if the notation cannot express the schema."""
        notation, schema = self._format.notation, self._root
        if notation == "json":
            return self._lark.json(schema)
        if notation == "gemma":
            return self._gemma(schema)
        if composed := [key for key in _COMPOSED if key in schema]:
            raise NanoinferError(
                f"parameters have {composed[0]}, which calls of this model cannot express: use properties"
            )
        if _OUTSIDE.search(json.dumps(schema)):
            raise NanoinferError("parameters have a $ref to something else than $defs: move it there")
        if notation == "python":
            return self._sequence(schema, ", ", lambda key: f"{key}=", self._leaf) or '""'
        between = self._format
        parts, after_value = [], self._lark.literal(between.after_value)
        for key, value, needed in _members(schema, _TAGGED_KEY):
            permitted = types(schema, value)
            is_text = permitted is not None and permitted <= {"string", "null"}
            after_key = between.spellings("after_key")[0 if is_text else -1]
            made = self._raw(value, between.after_value) if is_text else f"{self._leaf(value)} {after_value}"
            parts.append(f"({self._lark.literal(between.before_key + key + after_key)} {made}){'' if needed else '?'}")
        if not parts and schema.get("additionalProperties") is not False:
            key = self._lark.until(between.after_key, "/[^<>\\n]{1,64}/")
            before = self._lark.literal(between.before_key)
            parts.append(f"({before} {key} {self._lark.until(between.after_value)})*")
        return self._lark.rule(" ".join(parts) or '""')

    def _leaf(self, schema: Any) -> str:
        """Return a value as JSON, with the definitions that it may refer to."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._lark.json({**schema, **definitions} if isinstance(schema, dict) else schema)

    def _sequence(self, schema: dict[str, Any], separator: str, before: Any, value: Any) -> str:
        """Return the members of an object in order, with a separator between those that are there."""
        rest = first = ""
        for key, part, needed in reversed(_members(schema, _BARE_KEY)):
            made = f"{self._lark.literal(before(key))} {value(part)}"
            more = f'"{separator}" {made}'
            first, rest = (
                self._lark.rule(f"{made} {rest}" if needed else f"{made} {rest} | {first or chr(34) * 2}"),
                self._lark.rule(f"{more} {rest}" if needed else f"({more})? {rest}"),
            )
        return first

    def _raw(self, schema: Any, end: str) -> str:
        """Return a string or null of notation "tagged", with the piece after it."""
        options = [self._string(option, end.strip()) for option in self._options(schema)]
        texts = [option for option in options if option is not None]
        if len(texts) < len(options):
            texts.append('"null"')
        return self._lark.until(end, " | ".join(texts))

    def _options(self, schema: Any) -> Sequence[Any]:
        """Return the schemas of which one must match, references followed."""
        found: list[Any] = []
        seen: set[int] = set()
        left = [schema]
        while left:
            schema = left.pop(0)
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            if isinstance(schema, dict) and isinstance(to := schemas.target(self._root, schema.get("$ref")), dict):
                left.insert(0, to)
            elif not isinstance(schema, dict):
                found.append({})
            elif options := schema.get("anyOf") or schema.get("oneOf"):
                left = [*options, *left]
            else:
                named = schema.get("type")
                found += [{**schema, "type": name} for name in named] if isinstance(named, list) else [schema]
        return found or [{}]

    def _string(self, schema: dict[str, Any], end: str) -> str | None:
        """Return a terminal's body for the text of a string; None for null."""
        if schema.get("type") == "null":
            return None
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return " | ".join(json.dumps(value) for value in values if isinstance(value, str)) or None
        parts = [f"~/(?s:.*){regex(end)}(?s:.*)/"] if end and not self._lark.is_special(end) else []
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        parts.insert(
            0, "/(?s:.*)/" if not low and high is None else f"/(?s:.){{{low},{'' if high is None else high}}}/"
        )
        if isinstance(pattern := schema.get("pattern"), str):
            inner = pattern.replace("/", "\\/").removeprefix("^").removesuffix("$")
            begin, finish = ("" if pattern[:1] == "^" else "(?s:.*)"), ("" if pattern[-1:] == "$" else "(?s:.*)")
            parts.append(f"/{begin}({inner}){finish}/")
        return " & ".join(parts)

    def _gemma(self, schema: Any) -> str:
        """Return a value of notation "gemma"."""
        if not isinstance(schema, dict) or not schema:
            return self._gemma_any()
        if "$ref" in schema:
            return self._gemma_reference(str(schema["$ref"]))
        if (options := schema.get("anyOf") or schema.get("oneOf")) is not None:
            return self._lark.rule(" | ".join(self._gemma(option) for option in options))
        if refused := [key for key in _COMPOSED if key in schema]:
            raise NanoinferError(
                f"parameters have {refused[0]}, which calls of this model cannot express: leave it out"
            )
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return self._lark.rule(" | ".join(self._lark.literal(gemma_text(value)) for value in values))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._lark.rule(" | ".join(self._gemma({**schema, "type": one}) for one in kind))
        if kind == "string":
            return self._gemma_string(schema)
        if kind == "array":
            item = self._gemma(schema.get("items"))
            low, high = max(0, schema.get("minItems", 0) - 1), schema.get("maxItems")
            more = f'("," {item}){{{low},{"" if high is None else max(0, high - 1)}}}'
            more = "" if high == 1 else more  # {0,0} is not permitted
            items = f"{item} {more}" if high != 0 else '""'
            return self._lark.rule(f'"[" {items} "]"' if schema.get("minItems", 0) else f'"[" ({items})? "]"')
        if kind == "object" or "properties" in schema:
            if not schema.get("properties") and schema.get("additionalProperties") is not False:
                return self._gemma_any_object()
            members = self._sequence(schema, ",", lambda key: f"{key}:", self._gemma)
            return self._lark.rule(f'"{{" {members} "}}"')
        return self._leaf(schema) if kind else self._gemma_any()

    def _gemma_reference(self, reference: str) -> str:
        if reference not in self._references:
            if (found := schemas.target(self._root, reference)) is None:
                raise NanoinferError(f"parameters have a $ref to {reference!r}, which is not there")
            self._references[reference] = name = self._lark.reserve()
            self._lark.define(name, self._gemma(found))
        return self._references[reference]

    def _gemma_any(self) -> str:
        """Return any value."""
        if "" not in self._references:
            self._references[""] = name = self._lark.reserve()
            scalar = self._lark.json({"type": ["number", "boolean", "null"]})
            items = f'"[" ({name} ("," {name})*)? "]"'
            self._lark.define(name, f"{self._gemma_string({})} | {scalar} | {items} | {self._gemma_any_object()}")
        return self._references[""]

    def _gemma_any_object(self) -> str:
        member = f'/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ ":" {self._gemma_any()}'
        return self._lark.rule(f'"{{" ({member} ("," {member})*)? "}}"')

    def _gemma_string(self, schema: dict[str, Any]) -> str:
        body = self._string(schema, STRING_MARK) or '""'
        return f"{self._lark.literal(STRING_MARK)} {self._lark.until(STRING_MARK, body)}"


def gemma_text(value: Any) -> str:
    """Return a value in notation "gemma"."""
    if isinstance(value, str):
        return f"{STRING_MARK}{value}{STRING_MARK}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_text, value))}]"
    return json.dumps(value)


def _members(schema: dict[str, Any], names: re.Pattern[str]) -> list[tuple[str, Any, bool]]:
    """Return key, schema and whether it is required of each property of an object, whose names are of that form."""
    properties, required = schema.get("properties"), schema.get("required")
    if odd := [key for key in properties or {} if not names.fullmatch(key)]:
        raise NanoinferError(
            f"parameters have the property {show(odd[0])}, whose name calls of this model cannot express: use letters"
        )
    needed = set(required) if isinstance(required, list) else set()
    return [(key, part, key in needed) for key, part in (properties or {}).items()]
