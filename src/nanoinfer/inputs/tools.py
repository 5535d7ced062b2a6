"""Tools of a chat: functions that a model may call, in OpenAI's shape, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.errors import NanoinferError, about, one_line
from nanoinfer.inputs.messages import is_list
from nanoinfer.utils.checks import require_bool, show

MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 1 << 16
"""Characters of one tool's parameters as JSON."""
MAX_TOTAL_CHARS = 1 << 18
"""Characters of all tools as JSON."""
MAX_DEPTH = 64
CHOICES = ("none", "auto", "required")
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of an object."""
    strict: bool = False
    """OpenAI's flag. Calls match the schema in any case."""

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def as_tools(value: Any) -> tuple[Tool, ...]:
    """Return tools from a list of {"type": "function", "function": {"name": ..., "parameters": ...}}, or of `Tool`s.

    Raises:
        NanoinferError: it is not such a list; a name is not valid or not unique; a schema is none of an object; a limit
            is exceeded.
    """
    if value is None:
        return ()
    if not is_list(value) or len(value) > MAX_TOOLS:
        given = f"{len(value)} tools" if is_list(value) else f"tools={show(value)}"
        raise NanoinferError(f"{given}: give a list of at most {MAX_TOOLS} tools")
    tools: dict[str, Tool] = {}
    total = 0
    for i, item in enumerate(value):
        with about(f"tools[{i}]"):
            tool = item if isinstance(item, Tool) else _as_tool(item)
            total += _check(tool)
            if tool.name in tools:
                raise NanoinferError(f"name={tool.name!r} is the name of another tool, too: names are unique")
            if total > MAX_TOTAL_CHARS:
                raise NanoinferError(f"the tools have more than {MAX_TOTAL_CHARS} characters of JSON: shorten them")
            tools[tool.name] = tool
    return tuple(tools.values())


def as_choice(value: Any, tools: Sequence[Tool]) -> str:
    """Return a tool_choice, "none", "auto", "required" or the name of a tool, from one of these or OpenAI's object.

    None is "auto" with tools, "none" without. Raises NanoinferError if it is none of these.
    """
    if value is None:
        return "auto" if tools else "none"
    if isinstance(value, Mapping):
        function = value.get("function")
        value = function.get("name") if isinstance(function, Mapping) else value
    names = [tool.name for tool in tools]
    if not isinstance(value, str) or value not in (*CHOICES, *names):
        raise NanoinferError(
            f"tool_choice={show(value)} is unknown: use none, auto, required or the name of one of {len(tools)} tools"
        )
    if value not in ("none", "auto") and not tools:
        raise NanoinferError(f"tool_choice={value!r} needs tools: give some, or tool_choice='none'")
    return value


def _as_tool(item: Any) -> Tool:
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or item.get("type", "function") != "function":
        raise NanoinferError(
            f"{show(item)} is not {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}"
        )
    if unknown := [key for key in function if key not in ("name", "description", "parameters", "strict")]:
        raise NanoinferError(f"function has the unknown field {show(unknown[0])}")
    given = {key: value for key, value in function.items() if value is not None}
    if "name" not in given:
        raise NanoinferError("function has no name")
    return Tool(**given)


def _check(tool: Tool) -> int:
    """Check the fields of a tool; return its characters as JSON."""
    if not isinstance(tool.name, str) or not NAME.fullmatch(tool.name):
        raise NanoinferError(f"name={show(tool.name)} is not 1 to 64 letters, digits, '_', '-' and '.'")
    if tool.name in CHOICES:
        raise NanoinferError(f"name={tool.name!r} is a value of tool_choice: choose another name")
    if not isinstance(tool.description, str):
        raise NanoinferError(f"description={show(tool.description)} is not a string")
    require_bool("strict", tool.strict)
    schema = tool.parameters
    kinds = schema.get("type") if isinstance(schema, Mapping) else ()
    if not (kinds is None or kinds == "object" or (is_list(kinds) and "object" in kinds)):
        raise NanoinferError(
            f"parameters={show(schema)} is not the JSON schema of an object: use {{'type': 'object', ...}}"
        )
    try:
        size = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
        len(tool.description.encode())
    except (TypeError, ValueError, RecursionError) as e:
        raise NanoinferError(f"tool {tool.name!r} is not JSON: {one_line(e)}") from None
    if size > MAX_SCHEMA_CHARS:
        raise NanoinferError(f"parameters have {size} characters, the limit is {MAX_SCHEMA_CHARS}: shorten them")
    if _depth(schema) > MAX_DEPTH:
        raise NanoinferError(f"parameters nest deeper than {MAX_DEPTH}: use fewer levels")
    return size + len(tool.description)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [item for v in level for item in (v.values() if isinstance(v, Mapping) else v if is_list(v) else ())]
    return depth
