"""/v1/messages, in Anthropic's shape: requests become the bodies of chats; responses are whole, or events.

{"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "model": "m"}
->  {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, ...], "max_tokens": 5, ...}

A block, a field of a block or a value that has no translation is an error, except for what is about tools that
Anthropic's servers run: agents send it in each request, and work without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from nanoinfer.errors import CONTEXT_LENGTH, NanoinferError, text_instead_of
from nanoinfer.outputs import CompletionOutput, RequestOutput, ToolCall
from nanoinfer.protocols.errors import anthropic_error, as_sent, renamed, status_code
from nanoinfer.protocols.fields import CHAT, MESSAGES, FieldError, read_fields
from nanoinfer.protocols.requests import GenerationRequest, parse
from nanoinfer.protocols.shared import Outputs, Part, Parts, Shape, StreamWriter, Write, parts_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import require_bool, show
from nanoinfer.utils.json_pieces import Json, encode

_BLOCKS = {"system": ("text",), "user": ("text", "tool_result"), "assistant": ("thinking", "text", "tool_use")}
"""The types of blocks that the messages of a role have."""
_RESULT = ("text", "image", "document")
"""The types of blocks that the result of a tool has. Images and documents become a text that says so."""
_REQUIRED: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
"""The fields that a block must have."""
_OPTIONAL: dict[str, dict[str, type]] = {
    "thinking": {"signature": str},
    "tool_result": {"content": object, "is_error": bool},
}
_BILLING = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that differs in each request: with it, no prefix would be found in the cache."""
_NAMES = {str: "a string", dict: "an object", bool: "a bool"}
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
"""Fields of a chat, too."""
_TOOL = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_TOOL_HINTS = ("defer_loading", "input_examples", "allowed_callers")
"""Fields of a tool that are left out."""
_NOT_RUN = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_(?:regex|bm25)|bash|text_editor|computer|memory|mcp_toolset)"
    r"(?:_\d{8})?"
)
"""Types of tools that Anthropic's servers run, or that only Anthropic's models know."""
_NOT_RUN_BLOCKS = re.compile(r"(server|mcp)_tool_use|\w+_tool_result|tool_reference")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SENT = {
    "continue_final_message=True": "messages",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}
"""What errors about the chat call a field -> its name in the request."""


def parse_messages(
    body: Mapping[str, Any], defaults: SamplingParams | None = None, *, url: str = MESSAGES
) -> GenerationRequest:
    """Read the body of a request to MESSAGES or COUNT_TOKENS. Args and errors as for `parse`, and of `to_chat`."""
    left_out: set[str] = set()
    try:
        request = parse(CHAT, to_chat(url, body, left_out), defaults or SamplingParams(), streams=True)
    except NanoinferError as e:
        raise renamed(e, _SENT) from None
    return replace(request, left_out=left_out, template={**request.template, "optional_thinking": True})


def messages_error(error: NanoinferError, request: GenerationRequest) -> NanoinferError:
    """Return an error of a parsed request with the names of the fields that the client has sent.

    A prompt that is too long has Anthropic's message, by which agents decide to shorten the conversation.
    """
    if found := re.match(rf"the prompt has (.*) tokens, {CONTEXT_LENGTH} (\d+)", str(error)):
        return _error(f"prompt is too long: {found[1]} tokens > {found[2]} maximum: shorten the conversation")
    return renamed(as_sent(error, response_format=request.response_format), _SENT)


def to_chat(url: str, body: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return the body of the request to /v1/chat/completions that a request stands for.

    Args:
        url: MESSAGES or COUNT_TOKENS.
        body: the JSON object.
        left_out: gets what of it has no translation, because it is about tools that this server cannot run.

    Raises:
        FieldError: a field, or something in it, is unknown, missing or not supported.
    """
    given = read_fields(url, body)
    made = {name: given[name] for name in _SAME if name in given}
    made["messages"] = _conversation(given.get("system"), given["messages"], left_out)
    if made["messages"] and made["messages"][-1]["role"] == "assistant":  # else all blocks are left out
        if "tool_calls" in made["messages"][-1]:
            raise _error("messages: the last message has a tool_use without its tool_result: add a message with it")
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    if "stop_sequences" in given:
        made["stop"] = given["stop_sequences"]
    if "tools" in given:
        made["tools"] = [
            tool for i, item in enumerate(given["tools"]) if (tool := _tool(item, f"tools[{i}]", left_out))
        ]
    if "tool_choice" in given:
        made |= _tool_choice(given["tool_choice"], made.get("tools", ()))
    if "thinking" in given:
        made |= _thinking(given["thinking"])
    return made | _output(given.get("output_config", {}), given.get("output_format"))


def _error(message: str) -> FieldError:
    """Return an error about a field. Anthropic's errors have no place for its name but the message."""
    return FieldError(message, None)


def _a(kind: type, value: Any, where: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise _error(f"{where}={show(value)} is not {what}")
    return value


def _object(value: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of an object that are not null. Raises FieldError for another name than `names`."""
    found = {key: v for key, v in _a(dict, value, where, "an object").items() if v is not None}
    if unknown := [key for key in found if key not in names]:
        raise _error(f"{where}: the field {show(unknown[0])} is not supported: leave it out")
    return found


# Messages ------------------------------------------------------------------------------------------------


def _conversation(system: Any, messages: Any, left_out: set[str]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Those of the same role in succession are one, as Anthropic has it."""
    if not messages:
        raise _error(f"messages={show(messages)} is not a list of one or more {{'role': ..., 'content': ...}}")
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    blocks = [] if system is None else _blocks(system, "system", "system", left_out)
    if kept := [block for block in blocks if not block["text"].startswith(_BILLING)]:
        turns.append(("system", kept))
    for i, message in enumerate(messages):
        found = _object(message, f"messages[{i}]", ("role", "content"))
        role = found.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise _error(f"messages[{i}].role={show(role)} is not supported: use user, assistant or system")
        blocks = _blocks(found.get("content"), f"messages[{i}].content", role, left_out)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    made: list[dict[str, Any]] = []
    for role, blocks in turns:
        made += [_assistant(blocks)] if role == "assistant" else _user(role, blocks)
    return made


def _blocks(content: Any, where: str, role: str, left_out: set[str]) -> list[dict[str, Any]]:
    """Return the checked blocks of a content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not (content or role == "assistant"):
        raise _error(f"{where}={show(content)} is neither a string nor a list of one or more blocks")
    found = [_block(item, f"{where}[{i}]", f"role {role}", _BLOCKS[role], left_out) for i, item in enumerate(content)]
    return [block for block in found if block is not None]


def _block(item: Any, where: str, of: str, kinds: tuple[str, ...], left_out: set[str]) -> dict[str, Any] | None:
    """Return a checked block of something that has these kinds; None for one that is left out."""
    kind = _a(dict, item, where, "an object").get("type")
    if isinstance(kind, str) and _NOT_RUN_BLOCKS.fullmatch(kind):
        left_out.add("blocks of tools that Anthropic's servers run")
        return None
    if not isinstance(kind, str) or kind not in kinds:
        reason = ", which only Anthropic can read," if kind == "redacted_thinking" else ""
        raise _error(f"{where}.type={show(kind)}{reason} is not supported for {of}: use {', '.join(kinds)}")
    if kind in ("image", "document"):
        return {"type": "text", "text": text_instead_of(kind)}
    required, optional = _REQUIRED[kind], _OPTIONAL.get(kind, {})
    found = _object(item, where, ("type", "cache_control", *required, *optional))
    found.pop("cache_control", None)
    for name, type_ in {**required, **optional}.items():
        if name in required or name in found:
            _a(type_, found.get(name), f"{where}.{name}", _NAMES.get(type_, ""))
    if kind == "tool_result" and not isinstance(found.setdefault("content", ""), str):
        parts = _a(list, found["content"], f"{where}.content", "a string or a list of text blocks")
        inner = [_block(part, f"{where}.content[{i}]", "results", _RESULT, left_out) for i, part in enumerate(parts)]
        found["content"] = "\n".join(part["text"] for part in inner if part is not None)
    return found


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the assistant."""
    texts = [block for block in blocks if block["type"] == "text"]
    calls = [
        {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": b["input"]}}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    made: dict[str, Any] = {"role": "assistant", "content": texts or (None if calls else "")}
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        made["reasoning_content"] = "\n".join(thoughts)
    return {**made, "tool_calls": calls} if calls else made


def _user(role: str, blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn of the user or the system: its texts, and each result of a tool."""
    for kind, group in groupby(blocks, key=lambda block: block["type"]):
        if kind == "text":
            yield {"role": role, "content": [*group]}
            continue
        for block in group:
            text = f"Error: {block['content']}" if block.get("is_error") else block["content"]
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


# Options -------------------------------------------------------------------------------------------------


def _tool(item: Any, where: str, left_out: set[str]) -> dict[str, Any] | None:
    """Return a tool of a chat; None for one that is left out."""
    kind = _a(dict, item, where, "an object").get("type")
    if isinstance(kind, str) and (found := _NOT_RUN.fullmatch(kind)):
        left_out.add(f"tools of type {found[1]}")
        return None
    if kind not in (None, "custom"):
        raise _error(f"{where}.type={show(kind)} is not supported: the server runs no tools: give name, input_schema")
    given = _object(item, where, (*_TOOL, *_TOOL_HINTS))
    left_out.update(f"{name} of tools" for name in _TOOL_HINTS if given.get(name))
    _a(dict, given.get("input_schema"), f"{where}.input_schema", "a JSON schema")
    function = {name: given[name] for name in ("name", "description", "strict") if name in given}
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}


def _tool_choice(value: Any, tools: Any) -> dict[str, Any]:
    given = _object(value, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind, name, alone = given.get("type"), given.get("name"), given.get("disable_parallel_tool_use", False)
    require_bool("tool_choice.disable_parallel_tool_use", alone)
    choice: Any = _CHOICES.get(kind) if isinstance(kind, str) else None
    if kind == "tool":
        if not isinstance(name, str) or name not in [tool["function"].get("name") for tool in tools]:
            raise _error(f"tool_choice.name={show(name)} is the name of none of the {len(tools)} tools")
        choice = {"type": "function", "function": {"name": name}}
    if choice is None or (name is not None and kind != "tool"):
        raise _error(f"tool_choice={show(value)} is not supported: its type is auto, any, tool with a name, or none")
    if choice == "required" and not tools:
        raise _error("tool_choice.type='any' needs tools: give some")
    return {"tool_choice": choice, "parallel_tool_calls": not alone}


def _thinking(value: Any) -> dict[str, Any]:
    given = _object(value, "thinking", ("type", "budget_tokens", "display"))  # display: the reasoning is always sent
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive") or (budget is None) == (kind == "enabled"):
        raise _error(f"thinking={show(value)}: its type is not enabled with budget_tokens, disabled or adaptive")
    made = {"enable_thinking": kind != "disabled"}
    return made if budget is None else {**made, "thinking_token_budget": budget}


def _output(config: Mapping[str, Any], older: Any) -> dict[str, Any]:
    if older is not None and "format" in config:
        raise _error("output_config.format and output_format are both given: give one")
    fields = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if (form := config.get("format", older)) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return fields


# Responses -----------------------------------------------------------------------------------------------

_GROWS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip
"""The type of an event, and its field with the new text, by the kind of the part."""


def message_body(
    request: GenerationRequest, outputs: Sequence[RequestOutput], *, request_id: str, model: str, **_: Any
) -> dict[str, Any]:
    """Return the body of a successful response, for `json_strings`. Args as for `response_body`.

    A call that was cut off is left out: its input is not an object.
    """
    (o,) = outputs[0].outputs
    parts = [part for part in parts_of(o) if part.kind != "call" or ToolCall("", "", part.text).is_complete]
    stop = _stop(request, o, len(o.token_ids), any(part.kind == "call" for part in parts))
    used = _usage(len(outputs[0].prompt_token_ids), len(o.token_ids), o.num_reasoning_tokens)
    return _message(request_id, model, tuple(_block_of(part, part.text) for part in parts), stop, used)


class EventWriter(StreamWriter):
    """Encodes the events of one response. Args as for `StreamWriter`."""

    def __init__(self, request: GenerationRequest, *, request_id: str, model: str, **_: Any) -> None:
        self._request, self._id, self._model = request, request_id, model
        self._parts = Parts()
        self._num_prompt: int | None = None  # of the first output
        self._num_output = 0

    def events(self, found: Outputs, write: Write) -> Iterator[str]:
        """Yield the events of new outputs."""
        for _, output in found:
            if self._num_prompt is None:
                self._num_prompt = len(output.prompt_token_ids)
                message = _message(self._id, self._model, (), _NOT_STOPPED, _usage(self._num_prompt, 0, None))
                yield _event("message_start", f'"message":{encode(message)}')
            for o in output.outputs:
                self._num_output += len(o.token_ids)
                for verb, part, text in self._parts.read(o):
                    yield _part_event(verb, part, text)
                if o.finish_reason is not None:
                    yield self._last(o, self._num_prompt)

    def _last(self, o: CompletionOutput, num_prompt: int) -> str:
        calls = any(part.kind == "call" for part in self._parts.parts)
        stop = _stop(self._request, o, self._num_output, calls)
        used = _usage(num_prompt, self._num_output, o.num_reasoning_tokens)
        return _event("message_delta", f'"delta":{encode(stop)},"usage":{encode(used)}')

    def end(self) -> bytes:
        """Return the last event."""
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def error(self, error: NanoinferError) -> bytes:
        """Return the last event of a stream that has failed."""
        return f"event: error\ndata: {encode(anthropic_error(str(error), status_code(error)))}\n\n".encode()


SHAPE = Shape(parse_messages, message_body, EventWriter, messages_error)
"""Of /v1/messages."""
_NOT_STOPPED = {"stop_reason": None, "stop_sequence": None}


def _message(request_id: str, model: str, content: Any, stop: dict[str, Any], used: dict[str, Any]) -> dict[str, Any]:
    head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
    return {**head, "content": content, **stop, "usage": used}


def _stop(request: GenerationRequest, o: CompletionOutput, num_output: int, calls: bool) -> dict[str, Any]:
    """Return why an output has ended. Args: num_output: its tokens. calls: whether it has some."""
    if o.finish_reason == "stop" and isinstance(o.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": o.stop_reason}
    reason = "tool_use" if calls else "end_turn"
    if o.finish_reason != "stop":
        limit = request.params.max_tokens
        reason = "max_tokens" if limit is not None and num_output >= limit else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(num_prompt: int, num_output: int, num_reasoning: int | None) -> dict[str, Any]:
    """Return the token counts. Those of the prompt that were in the KV cache are not counted apart."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    found = {"input_tokens": num_prompt, **cached, "output_tokens": num_output}
    details = {"output_tokens_details": {"thinking_tokens": num_reasoning}}
    return found if num_reasoning is None else {**found, **details}


def _block_of(part: Part, text: str) -> dict[str, Any]:
    """Return the block of a part with its text, or with none at its beginning."""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": Json(text) if text else {}}


def _part_event(verb: str, part: Part, text: str) -> str:
    if verb == "grow":
        kind, name = _GROWS[part.kind]
        return _event(
            "content_block_delta", f'"index":{part.index},"delta":{{"type":"{kind}","{name}":{encode(text)}}}'
        )
    if verb == "begin":
        return _event("content_block_start", f'"index":{part.index},"content_block":{encode(_block_of(part, ""))}')
    return _event("content_block_stop", f'"index":{part.index}')


def _event(name: str, fields: str) -> str:
    """Return an event. Args: fields: JSON without braces."""
    return f'event: {name}\ndata: {{"type":"{name}",{fields}}}\n\n'
