"""Read the body of a request to /v1/responses: it becomes the body of a chat, which `parse` reads.

instructions "Be brief.", input "Hi"  ->  messages [{"role": "system", ...}, {"role": "user", "content": "Hi"}]
reasoning, message of the assistant, function_call, function_call, in this order  ->  one message of the assistant
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.errors import NanoinferError, only_text
from nanoinfer.openai_protocol.errors import as_sent, renamed
from nanoinfer.openai_protocol.fields import (
    CHAT,
    INCLUDED,
    LOGPROBS,
    RESPONSES,
    SAMPLING_OF,
    STORED,
    TABLES,
    FieldError,
    check_names,
)
from nanoinfer.openai_protocol.requests import JSON_SCHEMA, GenerationRequest, parse
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import require_choice, show

_CONVERTED = ("tools", "tool_choice", "top_logprobs", "stream_options")
_SAME = ({*SAMPLING_OF[RESPONSES], *TABLES[RESPONSES]} & {*SAMPLING_OF[CHAT], *TABLES[CHAT]}) - {*_CONVERTED}
"""Fields that mean the same in a chat."""
_RENAMED = {
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text",
          "summary_text": "text", "refusal": "refusal"}  # fmt: skip
"""Types of parts with a text, and the name of the text."""
_NOT_RUN = re.compile(
    r"(web_search(_preview)?|file_search|code_interpreter|image_generation|mcp|computer(_use_preview)?|(local_)?shell"
    r"|apply_patch|namespace|tool_search)(_\d{4}_\d\d_\d\d)?"
)
"""Types of tools that OpenAI's server runs, or that only models which were trained for them know."""
_NOT_RUN_ITEMS = re.compile(
    r"(web_search|file_search|code_interpreter|image_generation|mcp|computer|(local_)?shell|apply_patch|tool_search)"
    r"_(call|call_output|output)|mcp_(list_tools|approval_request|approval_response)"
)
CUSTOM_INPUT = "input"
_CUSTOM = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT],
           "additionalProperties": False}  # fmt: skip
"""Parameters of the function that a custom tool, whose input is any text, becomes."""


def parse_responses(body: Mapping[str, Any], defaults: SamplingParams) -> GenerationRequest:
    """Read the body of a request. Args and Raises as `parse`, with the names that this request has."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in STORED:
        if given.get(name, False) is not False:
            raise FieldError(
                f"{name}={show(given[name])} is not supported: this server stores no responses: send the whole"
                " conversation as input", name,
            )  # fmt: skip
    check_names(given, RESPONSES)
    chat = {name: value for name, value in given.items() if name in _SAME}
    left_out: set[str] = set()
    chat |= {"messages": _messages(given, left_out), **_tools(given, left_out)}
    chat |= {**_text_and_reasoning(given), **_logprobs(given)}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if "stream_options" in given:
        _require_object("stream_options", given["stream_options"], ("include_obfuscation",))
        chat["stream_options"] = given["stream_options"]
    try:
        request = parse(CHAT, chat, defaults, streams=True)
    except NanoinferError as e:
        raise renamed(e, _RENAMED) from None
    return replace(request, echoed=_echoed(given, request), left_out=left_out)


def responses_as_sent(error: NanoinferError, request: GenerationRequest) -> NanoinferError:
    """Return an error of a parsed request with the names of the fields that the client has sent."""
    return renamed(as_sent(error, response_format=request.response_format), _RENAMED)


def _echoed(given: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:
    """Return what the response has of the request."""
    params = request.params
    metadata = given.get("metadata", {})
    if (
        not isinstance(metadata, dict)
        or len(metadata) > 16
        or not all(isinstance(v, str) and len(k) <= 64 and len(v) <= 512 for k, v in metadata.items())
    ):
        raise FieldError(f"metadata={show(metadata)} is not an object of at most 16 strings of 512 characters, with"
                         " names of 64", "metadata")  # fmt: skip
    return {
        "background": False,
        "instructions": given.get("instructions"),
        "max_output_tokens": params.max_tokens if "max_output_tokens" in given else None,
        "metadata": metadata,
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": given.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": tuple(given.get("tools", ())),
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }


# Fields of the chat ----------------------------------------------------------------------------------------


def _tools(given: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return tools and tool_choice, whose functions are in objects of their own."""
    made: dict[str, Any] = {name: given[name] for name in ("tools", "tool_choice") if name in given}
    if "tools" in made:
        tools = made["tools"] if isinstance(made["tools"], list) else [made["tools"]]
        made["tools"] = [tool for i, item in enumerate(tools) if (tool := _tool(item, f"tools[{i}]", left_out))]
    choice: Any = made.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom") and "name" in choice:
        made["tool_choice"] = _named(choice)
    elif kind == "allowed_tools" and isinstance(named := choice.get("tools"), list):
        names = [
            _named(tool) for tool in named if isinstance(tool, dict) and tool.get("type") in ("function", "custom")
        ]
        made["tool_choice"] = {"type": kind, kind: {"mode": choice.get("mode"), "tools": names}}
    elif isinstance(choice, dict) and kind not in ("none", "auto", "required"):
        raise FieldError(f"tool_choice={show(choice)} is not supported: use none, auto, required or {{'type':"
                         " 'function', 'name': ...}", "tool_choice")  # fmt: skip
    return made


def _tool(item: Any, at: str, left_out: set[str]) -> dict[str, Any] | None:
    """Return a tool of a chat; None for one that is left out."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and (found := _NOT_RUN.fullmatch(kind)):
        left_out.add(f"tools of type {found[1]}")
        return None
    if kind not in ("function", "custom"):
        what = f"type={show(kind)}" if kind is not None else show(item)
        raise FieldError(f"{at}: {what} is not supported: give a list of functions, {{'type': 'function', 'name': ...,"
                         " 'parameters': ...}", "tools")  # fmt: skip
    function = {k: v for k, v in item.items() if k != "type" and v not in (None, False)}
    if function.pop("defer_loading", None):
        left_out.add("defer_loading of tools")
    if kind == "custom":
        if function.pop("format", {"type": "text"}) != {"type": "text"}:
            left_out.add("the format of custom tools")
        function = {**function, "parameters": _CUSTOM}
    return {"type": "function", "function": function}


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}


def _text_and_reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    made = {}
    text, reasoning = given.get("text", {}), given.get("reasoning", {})
    _require_object("text", text, ("format", "verbosity"))
    _require_object("reasoning", reasoning, ("effort", "summary", "generate_summary"))
    if text.get("verbosity") is not None:
        require_choice("text.verbosity", text["verbosity"], ("low", "medium", "high"))
    if (found := text.get("format")) is not None:
        made["response_format"] = found
        if isinstance(found, dict) and found.get("type") == "json_schema":
            described = {name: found[name] for name in JSON_SCHEMA if name in found}
            others = {name: value for name, value in found.items() if name not in JSON_SCHEMA}
            made["response_format"] = {**others, "json_schema": described}
    if reasoning.get("effort") is not None:
        made["reasoning_effort"] = reasoning["effort"]
    return made


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    include, num_top = given.get("include", []), given.get("top_logprobs", 0)
    if not isinstance(include, list) or not all(isinstance(name, str) and name in INCLUDED for name in include):
        raise FieldError(f"include={show(include)} is not a list of {' and '.join(INCLUDED)}", "include")
    if LOGPROBS in include:
        return {"logprobs": True, "top_logprobs": num_top}
    if num_top != 0:
        raise FieldError(f"top_logprobs={show(num_top)} needs include=['{LOGPROBS}']", "top_logprobs")
    return {}


def _require_object(name: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, dict) or not value.keys() <= {*known}:
        raise FieldError(f"{name}={show(value)} is not an object with {' and '.join(known)}", name)


# Messages --------------------------------------------------------------------------------------------------


def _messages(given: Mapping[str, Any], left_out: set[str]) -> list[dict[str, Any]]:
    """Return the conversation as the messages of a chat."""
    items, instructions = given.get("input"), given.get("instructions", "")
    if not isinstance(instructions, str):
        raise FieldError(f"instructions={show(instructions)} is not a string", "instructions")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        found = "is missing" if items is None else f"{show(items)} is not supported"
        raise FieldError(f"input {found}: give a string or a list of items", "input")
    made: list[dict[str, Any]] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and _NOT_RUN_ITEMS.fullmatch(kind):
            left_out.add(f"items of type {kind}")
        else:
            _add_item(made, kind, item, f"input[{i}]")
    return made


def _add_item(made: list[dict[str, Any]], kind: Any, item: Any, at: str) -> None:
    """Add an item of the input to the messages, or to the last of them."""
    last = made[-1] if made and made[-1]["role"] == "assistant" else None
    if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
        content = _text(item.get("content"), f"{at}.content")
        if item["role"] == "assistant" and last is not None and last["content"] is None:
            last["content"] = content
        else:
            made.append({"role": item["role"], "content": content})
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or [], at)
        if not text and item.get("encrypted_content"):
            raise FieldError(f"{at}: encrypted_content cannot be read: send the item with its content", "input")
        if text:
            made.append({"role": "assistant", "content": None, "reasoning_content": text})
    elif kind in ("function_call", "custom_tool_call"):
        given = "arguments" if kind == "function_call" else CUSTOM_INPUT
        call_id, name, arguments = (_string(item, key, at) for key in ("call_id", "name", given))
        if given == CUSTOM_INPUT:
            arguments = json.dumps({CUSTOM_INPUT: arguments}, ensure_ascii=False)
        if last is None:
            made.append(last := {"role": "assistant", "content": None})
        function = {"name": name, "arguments": arguments}
        last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id, content = _string(item, "call_id", at), _text(item.get("output"), f"{at}.output", is_result=True)
        made.append({"role": "tool", "tool_call_id": call_id, "content": content})
    else:
        raise FieldError(
            f"{at}={show(item)} is not supported: give a message with the role user, assistant, system or developer, a"
            " function_call, a function_call_output or a reasoning item", "input",
        )  # fmt: skip


def _text(value: Any, at: str, *, is_result: bool = False) -> str:
    """Return a text that is a string or a list of parts, which are joined by newlines as those of a chat.

    Images and files are an error; where they are the result of a tool, which the user has not seen, a text says so.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(f"{at}={show(value)} is neither a string nor a list of parts", "input")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if is_result and kind in ("input_image", "input_file"):
            text = f"[{kind}: left out, because this model reads text only]"
        if not isinstance(text, str):
            raise FieldError(
                f"{at}[{i}]={show(part)} is not {{'type': 'input_text', 'text': ...}}: {only_text(part)}",
                "input",
            )
        texts.append(text)
    return "\n".join(texts)


def _string(item: Mapping[str, Any], key: str, at: str) -> str:
    if not isinstance(value := item.get(key), str):
        raise FieldError(f"{at}: {key}={show(value)} is not a string", "input")
    return value
