"""Parts of llguidance's Lark for the grammars of answers: literals with special tokens, and arguments of each notation.

json     %json of the whole schema
tagged   a string as text up to the piece after it, other types %json, in the order of the schema
gemma    objects and arrays as rules, strings as text between marks

Agents send the schemas of whatever tools their users have, which are made for validators. What a grammar cannot express
is left out of the schemas of tools without `strict`; one of which no grammar can be made is released: its calls have
any object.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from nanoinfer.errors import NanoinferError, show
from nanoinfer.inputs.answers.format import ID, STRING_MARK, AnswerFormat
from nanoinfer.inputs.messages import Tool
from nanoinfer.structured import schemas

log = logging.getLogger("nanoinfer")
ANNOTATIONS = ("title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated")
_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
_UNSUPPORTED = (
    "not", "if", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", "propertyNames",
    "unevaluatedProperties",
)  # fmt: skip
"""Keywords of objects that only narrow them: of tools without `strict`, they are left out."""
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_REGEX = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
"""Look-around, boundaries of words and back-references, which llguidance does not support."""
_ANY = {"anyOf": [{"type": "string"}, {"type": ["number", "boolean", "null"]}, {"type": "array"}, {"type": "object"}]}
ANY_OBJECT = {"type": "object"}
MAX_LINKS = 8
"""References from one to the next that lead from the schema to that of its object."""
MAX_RELEASED = 256
_BARE_KEY = re.compile(r"[^\s=:,()\[\]{}\"'<>]+")  # as the parser reads it
_TAGGED_KEY = re.compile(r"[^\s<>](?:[^\n<>]*[^\s<>])?")


class ReleasedTools:
    """Tools of which no grammar can be made: the arguments of their calls may be any object."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], None] = {}

    def add(self, tool: Tool, why: str) -> None:
        """Release a tool from now on; the log has the reason, once."""
        log.warning("tool %r: the arguments of its calls may be any object: %s", tool.name, why)
        keys = [*self._keys, _key(tool)][-MAX_RELEASED:]
        self._keys = dict.fromkeys(keys)  # no lock: an interrupt could leave it held

    def __contains__(self, tool: Tool) -> bool:
        return _key(tool) in self._keys


def _key(tool: Tool) -> tuple[str, str]:
    return tool.name, json.dumps([tool.strict, tool.parameters])


def own(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Return a copy of the schema of arguments without annotations, as one of an object, with its objects closed.

    What it refers to is in its $defs.

    Args:
        schema: of a tool.
        strict: whether a keyword that cannot be used is an error; else it is left out.

    Raises:
        NanoinferError: as `schemas.check_types`.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for part in schemas.reachable(copy, [copy]):
        for key in [key for key in part if key in ANNOTATIONS or (not strict and _is_refused(part, key))]:
            del part[key]
        schemas.check_types(part)
    schemas.rewrite(copy)
    schemas.gather(copy)
    for _ in range(MAX_LINKS):
        root = schemas.target(copy, copy.get("$ref"))
        if root is not None and not root.keys() & copy.keys() - {"type", "$ref"}:
            copy = {**root, **{key: value for key, value in copy.items() if key != "$ref"}}
    copy["type"] = "object"
    schemas.close(copy)
    return copy


def _is_refused(part: Mapping[str, Any], key: str) -> bool:
    """Return whether llguidance refuses a keyword, even where it is lenient."""
    value = part[key]
    if value is None:
        return key != "const"
    if key == "type":
        return not (isinstance(value, (str, list)) and _TYPES.issuperset([value] if isinstance(value, str) else value))
    return key == "pattern" and isinstance(value, str) and _REGEX.search(value) is not None


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
        self.rules: list[str] = []
        self._count = 0

    def rule(self, body: str, name: str = "r", options: str = "") -> str:
        """Add a rule and return its name. A name in capitals is a terminal."""
        own_name = self.reserve(name)
        self.define(own_name, body, options)
        return own_name

    def reserve(self, name: str = "r") -> str:
        """Return the name of a rule that is defined later."""
        self._count += 1
        return f"{name}{self._count}"

    def define(self, name: str, body: str, options: str = "") -> None:
        """Add a rule of a reserved name."""
        self.rules.append(f"{name}{options}: {body}")

    def text(self, start: str) -> str:
        """Return the grammar, with the body of its first rule."""
        return "\n".join([f"start: {start}", *self.rules])

    def is_special(self, text: str) -> bool:
        """Return whether a text begins with a special token."""
        return any(text.startswith(name) for name in self._special)

    def literal(self, text: str) -> str:
        """Return a piece of a format as a sequence of literals and special tokens; empty for an empty one."""
        parts: list[str] = []
        for i, part in enumerate(text.split(ID)):
            parts += ["/[a-zA-Z0-9]{1,9}/"] if i > 0 else []
            for token in filter(None, self._pattern.split(part) if self._pattern else [part]):
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


class Arguments:
    """Rules of the arguments of one tool.

    Args:
        lark: gets the rules.
        format: of the answers.
        tool: whose calls they are.
        released: tools with any arguments, to which the tool is added if no grammar of it can be made.
    """

    def __init__(self, lark: Lark, format: AnswerFormat, tool: Tool, released: ReleasedTools) -> None:
        self._lark, self._format, self._tool, self._released = lark, format, tool, released
        self._references: dict[str, str] = {}
        self._guidance: dict[str, Any] = {"whitespace_pattern": " ?"}
        if not tool.strict:
            self._guidance |= {"lenient": True, "coerce_one_of": True}

    def rule(self) -> str:
        """Return the rule of the arguments. Raises NanoinferError if none can be made for a tool with `strict`."""
        if self._tool not in self._released:
            num_rules = len(self._lark.rules)
            try:
                return self._rule(self._tool.parameters)
            except RecursionError:  # of references
                error = NanoinferError("parameters nest too deep: use fewer levels")
            except NanoinferError as e:
                error = e
            if self._tool.strict:
                raise error
            del self._lark.rules[num_rules:]
            self._references = {}
            self._released.add(self._tool, str(error))
        return self._rule(ANY_OBJECT)

    def _rule(self, parameters: Mapping[str, Any]) -> str:
        self._root = schema = own(parameters, self._tool.strict)
        notation = self._format.notation
        if notation == "json":
            return self._json(schema)
        return self._gemma(schema) if notation == "gemma" else self._tagged(schema)

    def _json(self, schema: Any) -> str:
        """Return a value as JSON, with the definitions that it may refer to."""
        if not isinstance(schema, dict):
            schema = {} if schema is not False else {"not": {}}
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._lark.rule(f"%json {json.dumps({**schema, **definitions, 'x-guidance': self._guidance})}")

    def _refuse(self, schema: Mapping[str, Any]) -> None:
        """Raise NanoinferError if an object has keywords that only notation "json" can express."""
        keywords = (*_COMPOSED, *(_UNSUPPORTED if self._tool.strict else ()))
        if refused := [key for key in keywords if key in schema]:
            raise NanoinferError(
                f"parameters have {refused[0]}, which calls of this model cannot express: use properties"
            )

    def _properties(self, schema: Mapping[str, Any], names: re.Pattern[str]) -> list[tuple[str, Any, bool]]:
        """Return key, schema and whether it is required of each property of an object."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if odd := [key for key in properties if not names.fullmatch(key)]:
            raise NanoinferError(
                f"parameters have the property {show(odd[0])}, whose name calls of this model cannot express: use"
                " letters"
            )
        return [(key, part, key in required) for key, part in properties.items()]

    def _tagged(self, schema: dict[str, Any]) -> str:
        """Return the arguments of notation "tagged"."""
        f, lark, parts = self._format, self._lark, []
        self._refuse(schema)
        for key, value, is_required in self._properties(schema, _TAGGED_KEY):
            permitted = schemas.types(schema, value)
            if permitted is not None and permitted <= {"string", "null"}:
                text = self._raw(value)
            else:
                text = f"{self._json(value)} {lark.literal(f.after_value)}"
            parts.append(f"({lark.literal(f.before_key + key + f.after_key)} {text}){'' if is_required else '?'}")
        if not parts and schema.get("additionalProperties") is not False:
            key = lark.until(f.after_key, "/[^<>\\n]{1,64}/")
            parts.append(f"({lark.literal(f.before_key)} {key} {lark.until(f.after_value)})*")
        return lark.rule(" ".join(parts) or '""')

    def _raw(self, schema: Any) -> str:
        """Return a string or null of notation "tagged", with the piece after it."""
        end, options = self._format.after_value, schemas.options(self._root, schema)
        texts = [self._string(option, end.strip()) for option in options if option.get("type") != "null"]
        strings = [text for text in texts if text is not None]
        return self._lark.until(end, " | ".join([*strings, '"null"'] if len(strings) < len(options) else strings))

    def _string(self, schema: Mapping[str, Any], end: str) -> str | None:
        """Return a terminal's body for the text of a string; None if no string is permitted."""
        if (values := schemas.listed(schema)) is not None:
            return " | ".join(json.dumps(value) for value in values if isinstance(value, str)) or None
        if self._tool.strict and "pattern" in schema:
            raise NanoinferError("parameters have a pattern, which calls of this model cannot express: leave it out")
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"/(?s:.){{{low},{high}}}/" if low or high != "" else "/(?s:.*)/"
        return f"{text} & ~/(?s:.*){regex(end)}(?s:.*)/" if end and not self._lark.is_special(end) else text

    def _gemma(self, schema: Any) -> str:
        """Return a value of notation "gemma"."""
        lark = self._lark
        if not isinstance(schema, dict) or not schema:
            return self._named("", _ANY)
        if (reference := schema.get("$ref")) is not None:
            if (referred := schemas.target(self._root, reference)) is None:
                raise NanoinferError(f"parameters have a $ref to {reference!r}, which is not there")
            return self._named(reference, referred)
        kind, values, several = schema.get("type"), schemas.listed(schema), schemas.alternatives(schema)
        if values is not None:
            return lark.rule(" | ".join(lark.literal(gemma_text(value)) for value in values))
        if several is not None:
            return lark.rule(" | ".join(map(self._gemma, several)))
        self._refuse(schema)
        if kind == "string":
            body = self._string(schema, STRING_MARK) or '""'
            return f"{lark.literal(STRING_MARK)} {lark.until(STRING_MARK, body)}"
        if kind == "array":
            item, low, high = self._gemma(schema.get("items")), schema.get("minItems", 0), schema.get("maxItems", 10**6)
            more = f'("," {item}){{{max(0, low - 1)},{"" if high == 10**6 else high - 1}}}' if high > 1 else ""
            items = f"{item} {more}" if high > 0 else '""'
            return lark.rule(f'"[" {items} "]"' if low else f'"[" ({items})? "]"')
        if kind == "object" or (kind is None and "properties" in schema):
            return lark.rule(f'"{{" {self._members(schema)} "}}"')
        return self._json(schema) if kind else self._gemma({})

    def _members(self, schema: Mapping[str, Any]) -> str:
        """Return the members of an object of notation "gemma" in order, with commas between those that are there."""
        if not schema.get("properties") and schema.get("additionalProperties") is not False:
            any_member = f'/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ ":" {self._gemma({})}'
            return f'({any_member} ("," {any_member})*)?'
        rest = first = ""
        for key, part, is_required in reversed(self._properties(schema, _BARE_KEY)):
            member = f"{self._lark.literal(key + ':')} {self._gemma(part)}"
            more = f'"," {member}'
            first, rest = (
                self._lark.rule(f"{member} {rest}" if is_required else f"{member} {rest} | {first or chr(34) * 2}"),
                self._lark.rule(f"{more} {rest}" if is_required else f"({more})? {rest}"),
            )
        return first or '""'

    def _named(self, reference: str, schema: Any) -> str:
        """Return the rule of a schema that refers to itself, which is made once."""
        if reference not in self._references:
            self._references[reference] = name = self._lark.reserve()
            self._lark.define(name, self._gemma(schema))
        return self._references[reference]


def gemma_text(value: Any) -> str:
    """Return a value in notation "gemma"."""
    if isinstance(value, str):
        return f"{STRING_MARK}{value}{STRING_MARK}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_text, value))}]"
    return json.dumps(value)
