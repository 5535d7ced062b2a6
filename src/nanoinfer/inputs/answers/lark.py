"""Parts of llguidance's Lark for the grammars of answers: literals with special tokens, and arguments of each notation.

json     %json of the whole schema
python   k=%json, in the order of the schema
tagged   a string as text up to the piece after it, other types %json, in the order of the schema
gemma    objects and arrays as rules, strings as text between marks

Agents send the schemas of whatever tools their users have, which are made for validators. A call that is not quite as
its schema wants is of more use to them than a request that is refused. So what a grammar cannot express is left out of
the schemas of tools without `strict`, with one warning for each tool: what is left out only narrows a schema, and the
grammar then permits more. A tool of which no grammar can be made has calls with any object.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.errors import NanoinferError, printable
from nanoinfer.inputs.answers.format import COUNT, ID, PLACEHOLDER, STRING_MARK, AnswerFormat
from nanoinfer.inputs.messages import Tool
from nanoinfer.sampling_params import MAX_GRAMMAR_CHARS
from nanoinfer.structured import schemas
from nanoinfer.utils.checks import show

ANNOTATIONS = ("title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated")
_COMPOSED = (
    "allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentRequired", "dependentSchemas",
    "minProperties", "maxProperties", "propertyNames", "unevaluatedProperties",
)  # fmt: skip
_ANY = {"anyOf": [{"type": "string"}, {"type": ["number", "boolean", "null"]}, {"type": "array"}, {"type": "object"}]}
MAX_LINKS = 8
"""References from one to the next that lead from the schema to that of its object."""
_PLACEHOLDERS = {ID: "/[a-zA-Z0-9]{9}/", COUNT: "/[0-9]{1,3}/"}
_BARE_KEY = re.compile(r"[^\s=:,()\[\]{}\"'<>]+")  # as the parser reads it
_TAGGED_KEY = re.compile(r"[^\s<>](?:[^\n<>]*[^\s<>])?")
ANY_OBJECT = {"type": "object"}
MAX_CHARS = MAX_GRAMMAR_CHARS * 3 // 4
"""Characters of the grammars of all arguments: the rest is for the names and markers of calls."""
MAX_KNOWN = 256
"""Tools that are remembered, so that each has one warning."""
_UNSUPPORTED = {
    "not", "if", "then", "else", "propertyNames", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
_REGEX = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
"""Look-around, boundaries of words and back-references, which llguidance does not support."""
log = logging.getLogger("nanoinfer")
_PATTERN = re.compile(r"(\^?)((?:\\.|.)*?)(\$?)", re.S)


def own(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the schema of arguments without annotations, as one of an object, with its objects closed.

    What it refers to is in its $defs.

    Raises NanoinferError as `schemas.check` and `schemas.check_types`.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for part in schemas.reachable(copy, [copy]):
        schemas.check_types(part)
        for key in ANNOTATIONS:
            part.pop(key, None)
    schemas.rewrite(copy)
    schemas.gather(copy)
    for _ in range(MAX_LINKS):
        root = schemas.target(copy, copy.get("$ref"))
        if root is not None and not root.keys() & copy.keys() - {"type", "$ref"}:
            copy = {**root, **{key: value for key, value in copy.items() if key != "$ref"}}
    copy["type"] = "object"
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
        for part in PLACEHOLDER.split(text):
            if part in _PLACEHOLDERS:
                parts.append(_PLACEHOLDERS[part])
                continue
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
        try:
            return self._rule(self._root)
        except RecursionError:  # of references
            raise NanoinferError("parameters nest too deep: use fewer levels") from None

    def _rule(self, schema: dict[str, Any]) -> str:
        notation = self._format.notation
        if notation == "json":
            return self._lark.json(schema)
        if notation == "gemma":
            return self._gemma(schema)
        if composed := [key for key in _COMPOSED if key in schema]:
            raise NanoinferError(
                f"parameters have {composed[0]}, which calls of this model cannot express: use properties"
            )
        if notation == "python":
            return self._members(schema, ", ", "=", self._leaf)
        return self._tagged(schema)

    def _leaf(self, schema: Any) -> str:
        """Return a value as JSON, with the definitions that it may refer to."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._lark.json({**schema, **definitions} if isinstance(schema, dict) else schema)

    def _members(self, schema: dict[str, Any], separator: str, colon: str, value: Callable[[Any], str]) -> str:
        """Return the members of an object in order, with a separator between those that are there; else any members."""
        if not schema.get("properties") and schema.get("additionalProperties") is not False:
            made = f'/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ "{colon}" {value({})}'
            return f'({made} ("{separator}" {made})*)?'
        rest = first = ""
        for key, part, needed in reversed(_members(schema, _BARE_KEY)):
            made = f"{self._lark.literal(key + colon)} {value(part)}"
            more = f'"{separator}" {made}'
            first, rest = (
                self._lark.rule(f"{made} {rest}" if needed else f"{made} {rest} | {first or chr(34) * 2}"),
                self._lark.rule(f"{more} {rest}" if needed else f"({more})? {rest}"),
            )
        return first or '""'

    def _tagged(self, schema: dict[str, Any]) -> str:
        """Return the arguments of notation "tagged"."""
        f, lark, parts = self._format, self._lark, []
        for key, value, needed in _members(schema, _TAGGED_KEY):
            permitted = schemas.types(schema, value)
            is_text = permitted is not None and permitted <= {"string", "null"}
            after_key = f.spellings("after_key")[0 if is_text else -1]
            made = self._raw(value) if is_text else f"{self._leaf(value)} {lark.literal(f.after_value)}"
            parts.append(f"({lark.literal(f.before_key + key + after_key)} {made}){'' if needed else '?'}")
        if not parts and schema.get("additionalProperties") is not False:
            key = lark.until(f.after_key, "/[^<>\\n]{1,64}/")
            parts.append(f"({lark.literal(f.before_key)} {key} {lark.until(f.after_value)})*")
        return lark.rule(" ".join(parts) or '""')

    def _raw(self, schema: Any) -> str:
        """Return a string or null of notation "tagged", with the piece after it."""
        end, permitted = self._format.after_value, schemas.options(self._root, schema)
        texts = [self._string(option, end.strip()) for option in permitted if option.get("type") != "null"]
        found = [text for text in texts if text is not None]
        return self._lark.until(end, " | ".join([*found, '"null"'] if len(found) < len(permitted) else found))

    def _string(self, schema: Mapping[str, Any], end: str) -> str | None:
        """Return a terminal's body for the text of a string; None if no string is permitted."""
        if (values := schemas.listed(schema)) is not None:
            return " | ".join(json.dumps(value) for value in values if isinstance(value, str)) or None
        low, high, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
        bounds = f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"
        parts = [f"/(?s:.){bounds}/" if bounds != "*" else "/(?s:.*)/"]
        if end and not self._lark.is_special(end):
            parts.append(f"~/(?s:.*){regex(end)}(?s:.*)/")
        if isinstance(pattern, str):
            match = _PATTERN.fullmatch(pattern)
            assert match is not None  # it matches any text
            start, inner, finish = match.groups()
            inner = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", inner)  # JavaScript writes / as \\/, too
            begin, finish = ("" if start else "(?s:.*)"), ("" if finish else "(?s:.*)")
            parts.append(f"/{begin}({inner}){finish}/")
        return " & ".join(parts)

    def _gemma(self, schema: Any) -> str:
        """Return a value of notation "gemma"."""
        if not isinstance(schema, dict) or not schema:
            return self._named("", _ANY)
        if (reference := schema.get("$ref")) is not None:
            if (found := schemas.target(self._root, reference)) is None:
                raise NanoinferError(f"parameters have a $ref to {reference!r}, which is not there")
            return self._named(reference, found)
        values, several = schemas.listed(schema), schemas.alternatives(schema)
        if values is None and several is not None:
            return self._lark.rule(" | ".join(map(self._gemma, several)))
        if refused := [key for key in _COMPOSED if key in schema]:
            raise NanoinferError(
                f"parameters have {refused[0]}, which calls of this model cannot express: leave it out"
            )
        if values is not None:
            return self._lark.rule(" | ".join(self._lark.literal(gemma_text(value)) for value in values))
        kind = schema.get("type")
        if kind == "string":
            body = self._string(schema, STRING_MARK) or '""'
            return f"{self._lark.literal(STRING_MARK)} {self._lark.until(STRING_MARK, body)}"
        if kind == "null":
            return '"null"'
        if kind == "array":
            item, low, high = self._gemma(schema.get("items")), schema.get("minItems", 0), schema.get("maxItems")
            more = f'("," {item}){{{max(0, low - 1)},{"" if high is None else max(0, high - 1)}}}'
            more = "" if high == 1 else more  # {0,0} is not permitted
            items = f"{item} {more}" if high != 0 else '""'
            return self._lark.rule(f'"[" {items} "]"' if low else f'"[" ({items})? "]"')
        if kind == "object" or (kind is None and "properties" in schema):
            return self._lark.rule(f'"{{" {self._members(schema, ",", ":", self._gemma)} "}}"')
        return self._leaf(schema) if kind else self._gemma({})

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


def _members(schema: dict[str, Any], names: re.Pattern[str]) -> list[tuple[str, Any, bool]]:
    """Return key, schema and whether it is required of each property of an object, whose names are of that form."""
    properties, required = schema.get("properties"), schema.get("required")
    if odd := [key for key in properties or {} if not names.fullmatch(key)]:
        raise NanoinferError(
            f"parameters have the property {show(odd[0])}, whose name calls of this model cannot express: use letters"
        )
    needed = set(required) if isinstance(required, list) else set()
    return [(key, part, key in needed) for key, part in (properties or {}).items()]


class LenientTools:
    """The tools of requests as their grammars have them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, AnswerFormat], tuple[Tool, int]] = {}

    def of(self, tools: Sequence[Tool], format: AnswerFormat) -> list[Tool]:
        """Return tools with schemas that a format can express, but for those with `strict`, which stay as they are.

        The largest ones are not constrained if the grammar of all would be too large.
        """
        found = [(tool, *self._of(tool, format)) for tool in tools]
        total = sum(size for _, _, size in found)
        for tool, made, size in sorted(found, key=lambda item: -item[2]):
            if total > MAX_CHARS and not tool.strict and made.parameters != ANY_OBJECT:
                self.release(tool, format, f"all tools have {total} characters of grammar, the limit is {MAX_CHARS}")
                total -= size
        return [self._of(tool, format)[0] for tool in tools]

    def release(self, tool: Tool, format: AnswerFormat, why: str) -> None:
        """Let the calls of a tool have any object from now on."""
        log.warning("tool %r: the arguments of its calls may be any object: %s", tool.name, why)
        self._put(tool, format, replace(tool, parameters=ANY_OBJECT), 0)

    def _of(self, tool: Tool, format: AnswerFormat) -> tuple[Tool, int]:
        """Return a tool as grammars have it, and the characters of the rules of its arguments."""
        if (known := self._known.get(_key(tool, format))) is not None:
            return known
        schema, left_out = json.loads(json.dumps(tool.parameters)), []
        if not tool.strict:
            left_out = leave_out(schema)
        lark = Lark({})
        try:
            rule = Arguments(lark, format, own(schema)).rule()
        except NanoinferError as e:
            if tool.strict:
                return tool, 0  # its grammar raises the same
            self.release(tool, format, str(e))
            return self._of(tool, format)
        if left_out:
            log.warning(
                "tool %r: the grammar of its calls leaves out %s: arguments may not match them (strict is false)",
                tool.name, printable(", ".join(left_out)),
            )  # fmt: skip
        return self._put(tool, format, replace(tool, parameters=schema), len(lark.text(rule)))

    def _put(self, tool: Tool, format: AnswerFormat, made: Tool, size: int) -> tuple[Tool, int]:
        known = {key: value for key, value in self._known.items() if key != _key(tool, format)}
        known[_key(tool, format)] = made, size
        self._known = dict([*known.items()][-MAX_KNOWN:])  # no lock: an interrupt could leave it held
        return made, size


def _key(tool: Tool, format: AnswerFormat) -> tuple[str, str, AnswerFormat]:
    return tool.name, json.dumps([tool.strict, tool.parameters]), format


def leave_out(root: schemas.Schema) -> list[str]:
    """Remove what a grammar cannot express from a schema, in place; return the keywords that were there."""
    left_out: dict[str, None] = {}
    for part in schemas.reachable(root, [root]):
        for key in [key for key, value in part.items() if value is None and key != "const"]:
            del part[key]
            if key not in ANNOTATIONS:
                left_out[key] = None
        for key, _ in schemas.wrong_types(part):
            del part[key]
            left_out[key] = None
    schemas.rewrite(root)
    for part in schemas.reachable(root, [root]):
        _rewrite_one_of(root, part, left_out)
        for key in [key for key, value in part.items() if _is_refused(root, part, key, value)]:
            if (key, part.pop(key)) != ("uniqueItems", False):
                left_out[key] = None
            if key == "patternProperties":  # else closing the object would forbid them
                part["additionalProperties"] = True
    return list(left_out)


def _is_refused(root: schemas.Schema, part: schemas.Schema, key: str, value: Any) -> bool:
    """Return whether a keyword must be left out."""
    if key == "type":
        return not _TYPES.issuperset([value] if isinstance(value, str) else value)
    if key == "format":
        return value not in _FORMATS
    if key == "pattern":
        return _REGEX.search(value) is not None
    if key == "patternProperties":
        return any(map(_REGEX.search, value))
    if key == "$ref":
        return schemas.target(root, value) is None
    if key in ("minProperties", "maxProperties"):
        return not part.get("properties", {}).keys() <= set(part.get("required", ()))
    return key in _UNSUPPORTED


def _rewrite_one_of(root: schemas.Schema, part: schemas.Schema, left_out: dict[str, None]) -> None:
    """Rewrite "oneOf" as "anyOf"; it is noted as left out if a value may match several of its options."""
    if (options := part.get("oneOf")) is None:
        return
    kinds = [schemas.types(root, option) for option in options]
    several = [kind for some in kinds for kind in (some or ("integer", "number"))]
    if len(several) != len(set(several)) or {"integer", "number"} <= set(several):
        left_out["oneOf"] = None
    if "anyOf" not in part:
        part["anyOf"] = options
    del part["oneOf"]
