"""/v1/messages, in Anthropic's shape: requests become the bodies of chats; responses are whole, or events.

{"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "model": "m"}
->  {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, ...], "max_tokens": 5, ...}

A block, a field of a block or a value that has no translation is an error, except for what is about tools that
Anthropic's servers run: agents send it in each request, and work without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from nanoinfer.errors import CONTEXT_LENGTH, NanoinferError, show, text_instead_of
from nanoinfer.outputs import CompletionOutput, RequestOutput, ToolCall
from nanoinfer.protocols.errors import anthropic_error, as_sent, renamed, status_code
from nanoinfer.protocols.fields import BLOCKS, CHAT, MESSAGE, MESSAGES, FieldError, read_fields, read_value
from nanoinfer.protocols.requests import GenerationRequest, parse
from nanoinfer.protocols.shared import Outputs, Part, Parts, Reply, Shape, StreamWriter, parts_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.json_pieces import encode

_KINDS = {"system": ("text",), "user": ("text", "tool_result"), "assistant": ("thinking", "text", "tool_use")}
"""The types of blocks that the messages of a role have."""
_RESULT = ("text", "image", "document")
"""The types of blocks that the result of a tool has. Images and documents become a text that says so."""
_BILLING = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that differs in each request: with it, no prefix would be found in the cache."""
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
"""Fields of a chat, too."""
_TOOL = ("name", "description", "input_schema", "strict")
_TOOL_HINTS = ("type", "cache_control", "eager_input_streaming")
"""Fields of a tool that have no effect. Others are left out, too, and named in the log."""
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
    if match := re.match(rf"the prompt has (.*) tokens, {CONTEXT_LENGTH} (\d+)", str(error)):
        return _error(f"prompt is too long: {match[1]} tokens > {match[2]} maximum: shorten the conversation")
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
    values = read_fields(url, body)
    chat = {name: values[name] for name in _SAME if name in values}
    chat["messages"] = messages = _conversation(values.get("system"), values["messages"], left_out)
    if messages and messages[-1]["role"] == "assistant":  # else all blocks are left out
        if "tool_calls" in messages[-1]:
            raise _error("messages: the last message has a tool_use without its tool_result: add a message with it")
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if "stop_sequences" in values:
        chat["stop"] = values["stop_sequences"]
    if "tools" in values:
        tools = (_tool(item, f"tools[{i}]", left_out) for i, item in enumerate(values["tools"]))
        chat["tools"] = [tool for tool in tools if tool is not None]
    if "tool_choice" in values:
        chat |= _tool_choice(values["tool_choice"], chat.get("tools", ()))
    if "thinking" in values:
        chat |= _thinking(values["thinking"])
    return chat | _output(values.get("output_config", {}))


def _error(message: str) -> FieldError:
    """Return an error about a field. Anthropic's errors have no place for its name but the message."""
    return FieldError(message, None)


# Messages ------------------------------------------------------------------------------------------------


def _conversation(system: Any, messages: Any, left_out: set[str]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Those of the same role in succession are one, as Anthropic has it."""
    if not messages:
        raise _error("messages=[] is not a list of one or more {'role': ..., 'content': ...}")
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    blocks = [] if system is None else _blocks(system, "system", "system", left_out)
    if kept := [block for block in blocks if not block["text"].startswith(_BILLING)]:
        turns.append(("system", kept))
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        message = read_value(where, message, MESSAGE)
        role = message["role"]
        blocks = _blocks(message["content"], f"{where}.content", role, left_out)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    chat: list[dict[str, Any]] = []
    for role, blocks in turns:
        chat += [_assistant(blocks)] if role == "assistant" else _user(role, blocks)
    return chat


def _blocks(content: Any, where: str, role: str, left_out: set[str]) -> list[dict[str, Any]]:
    """Return the checked blocks of a content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not (content or role == "assistant"):
        raise _error(f"{where}={show(content)} is neither a string nor a list of one or more blocks")
    blocks = [_block(item, f"{where}[{i}]", f"role {role}", _KINDS[role], left_out) for i, item in enumerate(content)]
    return [block for block in blocks if block is not None]


def _block(item: Any, where: str, of: str, kinds: tuple[str, ...], left_out: set[str]) -> dict[str, Any] | None:
    """Return a checked block of something that has these kinds; None for one that is left out."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and _NOT_RUN_BLOCKS.fullmatch(kind):
        left_out.add("blocks of tools that Anthropic's servers run")
        return None
    if kind not in kinds:
        reason = ", which only Anthropic can read," if kind == "redacted_thinking" else ""
        raise _error(f"{where}.type={show(kind)}{reason} is not supported for {of}: use {', '.join(kinds)}")
    if kind in ("image", "document"):
        return {"type": "text", "text": text_instead_of(kind)}
    block: dict[str, Any] = read_value(where, item, BLOCKS[kind])
    block.pop("cache_control", None)
    if kind == "tool_result" and not isinstance(block.setdefault("content", ""), str):
        if not isinstance(block["content"], list):
            raise _error(f"{where}.content={show(block['content'])} is not a string or a list of text blocks")
        parts = enumerate(block["content"])
        texts = [_block(part, f"{where}.content[{i}]", "results", _RESULT, left_out) for i, part in parts]
        block["content"] = "\n".join(text["text"] for text in texts if text is not None)
    return block


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the assistant."""
    texts = [block for block in blocks if block["type"] == "text"]
    calls = [
        {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": b["input"]}}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": texts or (None if calls else "")}
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


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
    if not isinstance(item, dict):
        raise _error(f"{where}={show(item)} is not an object with name and input_schema")
    if (kind := item.get("type")) not in (None, "custom"):
        left_out.add(f"tools of type {show(kind)}")
        return None
    left_out.update(f"{name} of tools" for name in item if item[name] and name not in (*_TOOL, *_TOOL_HINTS))
    if not isinstance(schema := item.get("input_schema"), dict):
        raise _error(f"{where}.input_schema={show(schema)} is not a JSON schema")
    function = {name: item[name] for name in ("name", "description", "strict") if item.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _tool_choice(choice: Mapping[str, Any], tools: Any) -> dict[str, Any]:
    kind, name, options = choice["type"], choice.get("name"), {}
    if choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    if kind == "tool":
        if name not in [tool["function"].get("name") for tool in tools]:
            raise _error(f"tool_choice.name={show(name)} is the name of none of the {len(tools)} tools")
        return {**options, "tool_choice": {"type": "function", "function": {"name": name}}}
    if kind == "any" and not tools:
        raise _error("tool_choice.type='any' needs tools: give some")
    return {**options, "tool_choice": _CHOICES[kind]}


def _thinking(value: Mapping[str, Any]) -> dict[str, Any]:
    kind, budget = value["type"], value.get("budget_tokens")
    if (budget is None) == (kind == "enabled"):
        raise _error(f"thinking={show(value)}: its type is not enabled with budget_tokens, disabled or adaptive")
    enabled = {"enable_thinking": kind != "disabled"}
    return enabled if budget is None else {**enabled, "thinking_token_budget": budget}


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if (form := config.get("format")) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return fields


# Responses -----------------------------------------------------------------------------------------------

_GROWS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip
"""The type of an event, and its field with the new text, by the kind of the part."""


def message_body(request: GenerationRequest, outputs: Sequence[RequestOutput], reply: Reply) -> dict[str, Any]:
    """Return the body of a successful response, for `json_strings`. Args as for `response_body`.

    A call that was cut off is left out: its input is not an object.
    """
    (o,) = outputs[0].outputs
    parts = [part for part in parts_of(o) if part.kind != "call" or ToolCall("", "", part.text).is_complete]
    stop = _stop(request, o, len(o.token_ids), any(part.kind == "call" for part in parts))
    used = _usage(len(outputs[0].prompt_token_ids), len(o.token_ids), o.num_reasoning_tokens)
    return _message(reply, tuple(_block_of(part, part.text) for part in parts), stop, used)


class EventWriter(StreamWriter):
    """Encodes the events of one response. Args as for `StreamWriter`."""

    def __init__(self, request: GenerationRequest, reply: Reply) -> None:
        self._request, self._reply = request, reply
        self._parts = Parts()
        self._num_prompt: int | None = None  # of the first output
        self._num_output = 0

    def events(self, new: Outputs) -> Iterator[str]:
        """Yield the events of new outputs."""
        for _, output in new:
            if self._num_prompt is None:
                self._num_prompt = len(output.prompt_token_ids)
                message = _message(self._reply, (), _NOT_STOPPED, _usage(self._num_prompt, 0, None))
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
_NOT_STOPPED = {"stop_reason": None, "stop_sequence": None}


def _message(reply: Reply, content: Any, stop: dict[str, Any], used: dict[str, Any]) -> dict[str, Any]:
    head = {"id": f"msg_{reply.request_id}", "type": "message", "role": "assistant", "model": reply.model}
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
    counts = {"input_tokens": num_prompt, **cached, "output_tokens": num_output}
    details = {"output_tokens_details": {"thinking_tokens": num_reasoning}}
    return counts if num_reasoning is None else {**counts, **details}


def _block_of(part: Part, text: str) -> dict[str, Any]:
    """Return the block of a part with its text, or with none at its beginning."""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json.loads(text) if text else {}}


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
