"""Messages and tools of a chat: checked, and converted from the forms that vLLM accepts to what chat templates take.

Calls of tools and their results have OpenAI's shape; without ids, as transformers has them, too. docs/tool-calls.md
shows them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.errors import NanoinferError, about, one_line, only_text, show, text_instead_of
from nanoinfer.inputs.prompts import numbered
from nanoinfer.utils.checks import require_bool

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}; further keys are passed to the template."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning of an assistant's message: templates read one of them, so they get all."""
MAX_CALLS = 128
"""Calls of one message."""
_OTHER_PARTS = (
    "image", "image_url", "input_image", "document", "file", "input_file", "audio", "input_audio", "video", "video_url",
)  # fmt: skip
"""Types of parts that results of tools may have beside text."""
MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 1 << 16
"""Characters of one tool's parameters as JSON."""
MAX_TOTAL_CHARS = 1 << 18
"""Characters of all tools as JSON."""
MAX_DEPTH = 64
CHOICES = ("none", "auto", "required")
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
log = logging.getLogger("nanoinfer")


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """Return one conversation or several as a list of conversations. Raises as `as_conversation`."""
    many = messages if is_list(messages) and messages and all(map(is_list, messages)) else [messages]
    conversations = []
    for i, conversation in enumerate(many):
        with numbered(i, len(many), "conversation"):
            conversations.append(as_conversation(conversation))
    return conversations


def as_conversation(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of one conversation, at least one, with contents as strings.

    A result whose call is not there, because a client or a gateway has left it out, becomes a message of the user.

    Raises:
        NanoinferError: it is not a list of messages, a message has no role, a content is not text, a call is malformed,
            or a result names no call.
    """
    if not is_list(messages) or not messages:
        raise NanoinferError(
            f"messages={show(messages)} is not a conversation: give a list of {{'role': ..., 'content': ...}}"
        )
    checked: list[dict[str, Any]] = []
    call_ids: set[str | None] = set()
    for i, message in enumerate(messages):
        with numbered(i, len(messages), "message"):
            checked.append(last := _as_message(message))
            call_ids.update(call.get("id") for call in last.get("tool_calls", ()))
            if last["role"] == "tool" and (call_id := last.get("tool_call_id")) not in call_ids:
                if call_id is None:
                    raise NanoinferError("tool_call_id is missing: give the id of the call that this is the result of")
                log.info("tool_call_id %s is the id of no call: its result is the user's message", show(call_id))
                checked[-1] = {"role": "user", "content": f"Result of an earlier call: {last['content']}"}
    return checked


def as_object(arguments: Any) -> dict[str, Any] | None:
    """Return the arguments of a call as an object, {} for "" and null; None for text that is not its JSON."""
    if arguments in ("", None):
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return dict(value) if isinstance(value, Mapping) else None


def _as_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise NanoinferError(f"message={show(message)} is not a dict with role and content")
    calls = message.get("tool_calls")
    message = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls:  # clients send null, or an empty list
        with about("tool_calls"):
            message["tool_calls"] = _as_calls(calls)
    role, content, call_id = message.get("role"), message.get("content"), message.get("tool_call_id")
    if not isinstance(role, str) or not role:
        raise NanoinferError(f"role={show(role)} is not a string such as 'user', 'assistant' or 'system'")
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if role == "assistant" and reasoning is not None:
        if not isinstance(reasoning, str):
            raise NanoinferError(f"reasoning_content={show(reasoning)} is not a string")
        message |= dict.fromkeys(REASONING_KEYS, reasoning)
    if not isinstance(call_id, (str, type(None))):
        raise NanoinferError(f"tool_call_id {show(call_id)} is not a string")
    if content is None and role == "assistant":  # beside calls or reasoning, or of an answer that was cut off
        return {**message, "content": None if "tool_calls" in message else ""}
    if "content" not in message:
        raise NanoinferError(f"message={show(message)} has no content")
    return {**message, "content": _text(content, role)}


def _as_calls(calls: Any) -> list[dict[str, Any]]:
    if not is_list(calls) or len(calls) > MAX_CALLS:
        raise NanoinferError(f"{show(calls)} is not a list of at most {MAX_CALLS} calls")
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise NanoinferError(
                f"{show(call)} is not {{'id': ..., 'type': 'function', 'function': {{'name': ..., 'arguments': ...}}}}"
            )
        if not isinstance(call.get("id"), (str, type(None))) or call.get("type", "function") != "function":
            raise NanoinferError(f"id={show(call.get('id'))}, type={show(call.get('type'))}: give a string, 'function'")
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, (str, Mapping)):  # text that is no JSON was cut off: the template shows it
            raise NanoinferError(f"arguments={show(arguments)} are neither an object nor its JSON")
        checked.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return checked


def _text(content: Any, role: str) -> str:
    """Return a content as a string: text parts are joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise NanoinferError(f"content={show(content)} is neither a string nor a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if role == "tool" and kind in _OTHER_PARTS:
            text = text_instead_of(kind)
        if not isinstance(text, str):
            raise NanoinferError(f"content part {show(part)} is not {{'type': 'text', 'text': ...}}: {only_text(part)}")
        texts.append(text)
    return "\n".join(texts)


def is_list(value: Any) -> bool:
    """Return whether a value is a list or another sequence, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


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
        what = f"{len(value)} tools" if is_list(value) else f"tools={show(value)}"
        raise NanoinferError(f"{what}: give a list of at most {MAX_TOOLS} tools")
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
    return Tool(**{"name": None, **{key: value for key, value in function.items() if value is not None}})


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
