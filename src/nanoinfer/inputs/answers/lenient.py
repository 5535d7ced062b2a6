"""Tools without `strict`: what a grammar cannot express is left out of their schemas, with one warning for each tool.

Agents send the schemas of whatever tools their users have, which are made for validators. A call that is not quite as
its schema wants is of more use to them than a request that is refused. What is left out only narrows a schema: the
grammar then permits more. A tool of which no grammar can be made has calls with any object.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.errors import NanoinferError, printable
from nanoinfer.inputs.answers.format import AnswerFormat
from nanoinfer.inputs.answers.lark import ANNOTATIONS, Arguments, Lark, own
from nanoinfer.inputs.answers.schema_types import types
from nanoinfer.inputs.tools import Tool
from nanoinfer.sampling_params import MAX_GRAMMAR_CHARS
from nanoinfer.structured import schemas

ANY_OBJECT = {"type": "object"}
MAX_CHARS = MAX_GRAMMAR_CHARS * 3 // 4
"""Characters of the grammars of all arguments: the rest is for the names and markers of calls."""
MAX_KNOWN_CHARS = 1 << 20
"""Characters of the tools that are remembered, so that each has one warning; 1,000 are added for each."""
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
        total = sum(1000 + len(text) for _, text, _ in known)
        while total > MAX_KNOWN_CHARS and len(known) > 1:
            total -= 1000 + len(next(iter(known))[1])
            del known[next(iter(known))]
        self._known = known  # no lock: an interrupt could leave it held
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
    kinds = [types(root, option) for option in options]
    several = [kind for some in kinds for kind in (some or ("integer", "number"))]
    if len(several) != len(set(several)) or {"integer", "number"} <= set(several):
        left_out["oneOf"] = None
    if "anyOf" not in part:
        part["anyOf"] = options
    del part["oneOf"]
