"""/v1/responses: a request becomes the body of a chat, which `parse` reads; responses are whole, or events.

instructions "Be brief.", input "Hi"  ->  messages [{"role": "system", ...}, {"role": "user", "content": "Hi"}]
reasoning, message of the assistant, function_call, function_call, in this order  ->  one message of the assistant

The items of a response are the parts of its message: reasoning, message, function_call. In a stream each part begins,
grows and ends, and its item and texts are in the events of its end and of the response's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nanoinfer.errors import NanoinferError, only_text, show, text_instead_of
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.protocols.errors import as_sent, error_body, renamed, status_code
from nanoinfer.protocols.fields import CHAT, RESPONSES, SAMPLING_OF, TABLES, FieldError, read_fields
from nanoinfer.protocols.output import token_counts, usage
from nanoinfer.protocols.requests import GenerationRequest, parse
from nanoinfer.protocols.shared import Outputs, Part, Parts, Reply, Shape, StreamWriter, Verb, parts_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.json_pieces import encode

_SAME = ({*SAMPLING_OF[RESPONSES], *TABLES[RESPONSES]} & {*SAMPLING_OF[CHAT], *TABLES[CHAT]}) - {"tools", "tool_choice"}
"""Fields that mean the same in a chat."""
_RENAMED = {
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
}
_CALLS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
           "additionalProperties": False}  # fmt: skip
"""Parameters of the function that a custom tool, whose input is any text, becomes."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text",
          "summary_text": "text", "refusal": "refusal"}  # fmt: skip
"""Types of parts with a text, and the name of the text."""
_NOT_RUN = re.compile(r"\w+_(call|call_output|output|list_tools|approval_request|approval_response)")
"""Types of items, but for those of `_message`, that are about tools which OpenAI's server runs."""


def parse_responses(body: Mapping[str, Any], defaults: SamplingParams) -> GenerationRequest:
    """Read the body of a request. Args and Raises as `parse`, with the names that this request has."""
    values = read_fields(RESPONSES, body)
    chat = {name: value for name, value in values.items() if name in _SAME}
    left_out: set[str] = set()
    chat |= {"messages": _messages(values, left_out), **_tools(values, left_out), **_formats(values)}
    if "max_output_tokens" in values:
        chat["max_tokens"] = values["max_output_tokens"]
    try:
        request = parse(CHAT, chat, defaults, streams=True)
    except NanoinferError as e:
        raise renamed(e, _RENAMED) from None
    return replace(request, echoed=_echoed(values, request), left_out=left_out)


def responses_as_sent(error: NanoinferError, request: GenerationRequest) -> NanoinferError:
    """Return an error of a parsed request with the names of the fields that the client has sent."""
    return renamed(as_sent(error, response_format=request.response_format), _RENAMED)


def _echoed(values: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:
    """Return what the response has of the request."""
    params = request.params
    return {
        "background": False,
        "instructions": values.get("instructions"),
        "max_output_tokens": params.max_tokens if "max_output_tokens" in values else None,
        "metadata": values.get("metadata", {}),
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": values.get("reasoning", {}).get("effort"), "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": values.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": tuple(values.get("tools", ())),
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }


# Fields of the chat ----------------------------------------------------------------------------------------


def _tools(values: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return tools and tool_choice, whose functions are in objects of their own."""
    options: dict[str, Any] = {name: values[name] for name in ("tools", "tool_choice") if name in values}
    if "tools" in options:
        tools = options["tools"] if isinstance(options["tools"], list) else [options["tools"]]
        options["tools"] = [tool for i, item in enumerate(tools) if (tool := _tool(item, f"tools[{i}]", left_out))]
    choice: Any = options.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom") and "name" in choice:
        options["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(choice, dict) and kind not in ("none", "auto", "required"):
        raise FieldError(f"tool_choice={show(choice)} is not supported: use none, auto, required or {{'type':"
                         " 'function', 'name': ...}", "tool_choice")  # fmt: skip
    return options


def _tool(item: Any, at: str, left_out: set[str]) -> dict[str, Any] | None:
    """Return a tool of a chat; None for one that is left out."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        raise FieldError(f"{at}: {show(item)} is not supported: give a list of functions, {{'type': 'function', 'name':"
                         " ..., 'parameters': ...}", "tools")  # fmt: skip
    if kind not in ("function", "custom"):
        left_out.add(f"tools of type {kind[:64]}")
        return None
    function = {k: v for k, v in item.items() if k != "type" and v not in (None, False)}
    if function.pop("defer_loading", None):
        left_out.add("defer_loading of tools")
    if kind == "custom":
        if function.pop("format", {"type": "text"}) != {"type": "text"}:
            left_out.add("the format of custom tools")
        function["parameters"] = _CUSTOM
    return {"type": "function", "function": function}


def _formats(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return response_format and reasoning_effort."""
    fields = {}
    if (form := values.get("text", {}).get("format")) is not None:
        fields["response_format"] = form
        if form["type"] == "json_schema":
            described = {name: value for name, value in form.items() if name != "type"}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
    if (effort := values.get("reasoning", {}).get("effort")) is not None:
        fields["reasoning_effort"] = effort
    return fields


# Messages --------------------------------------------------------------------------------------------------


def _messages(values: Mapping[str, Any], left_out: set[str]) -> list[dict[str, Any]]:
    """Return the conversation as the messages of a chat."""
    items = values["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise FieldError(f"input={show(items)} is not supported: give a string or a list of items", "input")
    messages: list[dict[str, Any]] = []
    if instructions := values.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in _CALLS and _NOT_RUN.fullmatch(kind):
            left_out.add(f"items of type {kind[:64]}")
        elif (message := _message(kind, item, f"input[{i}]")) is not None:
            _add(messages, message)
    return messages


def _message(kind: Any, item: Any, at: str) -> dict[str, Any] | None:
    """Return the message of a chat that an item stands for; None if it has nothing."""
    if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
        return {"role": item["role"], "content": _text(item.get("content"), f"{at}.content")}
    if kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or [], at)
        if not text and item.get("encrypted_content"):
            raise FieldError(f"{at}: encrypted_content cannot be read: send the item with its content", "input")
        return {"role": "assistant", "content": None, "reasoning_content": text} if text else None
    if kind in ("function_call", "custom_tool_call"):
        argument = "arguments" if kind == "function_call" else "input"
        call_id, name, arguments = (_string(item, key, at) for key in ("call_id", "name", argument))
        if argument == "input":
            arguments = json.dumps({"input": arguments}, ensure_ascii=False)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id, content = _string(item, "call_id", at), _text(item.get("output"), f"{at}.output", is_result=True)
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    raise FieldError(
        f"{at}={show(item)} is not supported: give a message with the role user, assistant, system or developer, a"
        " function_call, a function_call_output or a reasoning item", "input",
    )  # fmt: skip


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message, or its text or call to the last one, if both are of the assistant."""
    last = messages[-1] if messages else message
    is_part = last["role"] == message["role"] == "assistant" and "reasoning_content" not in message
    if last is message or not is_part or None not in (last["content"], message["content"]):
        messages.append(message)
    elif "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    else:
        last["content"] = message["content"]


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
            text = text_instead_of(kind)
        if not isinstance(text, str):
            raise FieldError(
                f"{at}[{i}]={show(part)} is not {{'type': 'input_text', 'text': ...}}: {only_text(part)}", "input"
            )
        texts.append(text)
    return "\n".join(texts)


def _string(item: Mapping[str, Any], key: str, at: str) -> str:
    if not isinstance(value := item.get(key), str):
        raise FieldError(f"{at}: {key}={show(value)} is not a string", "input")
    return value


# Responses -------------------------------------------------------------------------------------------------

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_EVENTS = {
    "reasoning": "response.reasoning_text", "text": "response.output_text", "call": "response.function_call_arguments"
}  # fmt: skip


def responses_body(request: GenerationRequest, outputs: Sequence[RequestOutput], reply: Reply) -> dict[str, Any]:
    """Return the body of a successful response. Args as for `response_body`."""
    (o,) = outputs[0].outputs
    end, parts = _end(o), parts_of(o)
    custom = _custom_tools(request)
    status = end["status"]
    items = [_item(part, reply.request_id, status if part is parts[-1] else "completed", custom) for part in parts]
    counts = _usage(usage(outputs), outputs[0].num_cached_tokens)
    return _head(request, reply) | end | {"output": tuple(items), "usage": counts}


class EventWriter(StreamWriter):
    """Encodes the events of one response. Args as for `StreamWriter`; the request is from `parse_responses`."""

    def __init__(self, request: GenerationRequest, reply: Reply) -> None:
        self._id, self._head = reply.request_id, _head(request, reply)
        self._custom = _custom_tools(request)
        self._num_events = 0
        self._parts = Parts()
        self._items: list[dict[str, Any]] = []  # of the parts that have ended
        self._first: RequestOutput | None = None
        self._num_output, self._num_reasoning = 0, 0

    def events(self, new: Outputs) -> Iterator[str]:
        """Yield the events of new outputs."""
        for name, fields in self._events(new):
            yield self._event(name, fields)

    def error(self, error: NanoinferError) -> bytes:
        """Return the last event of a stream that has failed, and the first if no output was written."""
        code = "server_error" if status_code(error) >= 500 else "invalid_prompt"
        failed = {"status": "failed", "error": {"code": code, "message": error_body(error)["error"]["message"]}}
        names = ("response.failed",) if self._num_events else ("response.created", "response.failed")
        heads = {"response.created": self._head, "response.failed": self._head | failed}
        events = (self._event(name, {"response": heads[name]}) for name in names)
        return "".join(events).encode(errors="backslashreplace")

    def _events(self, new: Outputs) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and fields of the events of new outputs."""
        for _, output in new:
            if self._first is None:
                self._first = output
                for name in ("response.created", "response.in_progress"):
                    yield name, {"response": self._head}
            (o,) = output.outputs
            self._num_output += len(o.token_ids)
            self._num_reasoning += o.num_reasoning_tokens or 0
            end = _end(o)
            ended: Part | None = None  # its events follow when it is known whether it is the last one
            for verb, part, text in self._parts.read(o):
                if ended is not None:
                    yield from self._changes("end", ended, "", "completed")
                ended = part if verb == "end" else None
                if verb != "end":
                    yield from self._changes(verb, part, text, "")
            if o.finish_reason is not None:
                if ended is not None:
                    yield from self._changes("end", ended, "", end["status"])
                counts = token_counts(len(self._first.prompt_token_ids), self._num_output, self._num_reasoning)
                end |= {"output": tuple(self._items), "usage": _usage(counts, self._first.num_cached_tokens)}
                yield f"response.{end['status']}", {"response": self._head | end}

    def _changes(self, verb: Verb, part: Part, text: str, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and fields of the events of a change. Args: status: of the item, if it ends."""
        at = {"item_id": _item_id(part, self._id), "output_index": part.index}
        if part.kind != "call":
            at["content_index"] = 0
        if verb == "begin":
            item = _item(part, self._id, "in_progress", self._custom)
            yield "response.output_item.added", {"output_index": part.index, "item": item}
            if part.kind != "call":
                yield "response.content_part.added", {**at, "part": _content(part)}
        elif verb == "grow" and part.name not in self._custom:
            yield f"{_EVENTS[part.kind]}.delta", {**at, "delta": text, **_logprobs(part)}
        elif verb == "end":
            whole = {"name": part.name, "arguments": part.text} if part.kind == "call" else {"text": part.text}
            item, name = _item(part, self._id, status, self._custom), _EVENTS[part.kind]
            if part.name in self._custom:  # the text within the JSON of the arguments is known when they are whole
                name, whole = "response.custom_tool_call_input", {"input": item["input"]}
                yield f"{name}.delta", {**at, "delta": item["input"]}
            yield f"{name}.done", {**at, **whole, **_logprobs(part)}
            if part.kind != "call":
                yield "response.content_part.done", {**at, "part": item["content"][0]}
            yield "response.output_item.done", {"output_index": part.index, "item": item}
            self._items.append(item)

    def _event(self, name: str, fields: Mapping[str, Any]) -> str:
        text = encode({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return f"event: {name}\ndata: {text}\n\n"


def _head(request: GenerationRequest, reply: Reply) -> dict[str, Any]:
    """Return a response that has just begun."""
    return {
        "id": f"resp_{reply.request_id}", "object": "response", "created_at": reply.created, "status": "in_progress",
        "error": None, "incomplete_details": None, "model": reply.model, "output": (), "usage": None, **request.echoed,
    }  # fmt: skip


def _end(o: CompletionOutput) -> dict[str, Any]:
    """Return how a response has ended."""
    details = {"reason": "max_output_tokens"} if o.finish_reason == "length" else None
    is_complete = o.finish_reason == "stop" and (o.message is None or not o.message.ends_in_call)
    return {"status": "completed" if is_complete else "incomplete", "incomplete_details": details}


def _usage(counts: Mapping[str, Any], num_cached: int) -> dict[str, Any]:
    """Return token counts in the shape of these responses."""
    details = counts.get("completion_tokens_details") or {"reasoning_tokens": 0}
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": counts["total_tokens"],
    }


def _item_id(part: Part, request_id: str) -> str:
    return f"{_PREFIXES[part.kind]}_{request_id}_{part.index}"


def _custom_tools(request: GenerationRequest) -> Collection[str]:
    """Return the names of the tools whose input is any text: to the model they are functions of one string."""
    return [tool.get("name") for tool in request.echoed["tools"] if tool["type"] == "custom"]


def _input(arguments: str) -> str:
    """Return the input of a custom tool: '{"input": "a"}' -> 'a'; of a call that was cut off, the JSON as it is."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        return str(json.loads(arguments)["input"])
    return arguments


def _item(part: Part, request_id: str, status: str, custom: Collection[str]) -> dict[str, Any]:
    """Return the item of a part. One that is in progress has no content yet. `custom`: names of custom tools."""
    content = () if status == "in_progress" else (_content(part),)
    item: dict[str, Any] = {"id": _item_id(part, request_id), "status": status}
    if part.kind == "call":
        item |= {"call_id": part.call_id, "name": part.name}
        if part.name in custom:
            return item | {"type": "custom_tool_call", "input": _input(part.text)}
        return item | {"type": "function_call", "arguments": part.text}
    if part.kind == "reasoning":
        return item | {"type": "reasoning", "summary": (), "content": content, "encrypted_content": None}
    return item | {"type": "message", "role": "assistant", "content": content}


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": (), **_logprobs(part)}


def _logprobs(part: Part) -> dict[str, Any]:
    """Return the log-probabilities that the texts of a message have in this shape; here they are empty."""
    return {"logprobs": ()} if part.kind == "text" else {}


SHAPE = Shape(parse_responses, responses_body, EventWriter, responses_as_sent)
