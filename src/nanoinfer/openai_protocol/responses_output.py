"""Responses of /v1/responses: whole, and as events.

The items of a response are the parts of its message: reasoning, message, function_call. In a stream each part begins,
grows and ends, and its item and texts are in the events of its end and of the response's: these events are large, and
are counted by `EventWriter.num_values`. Log-probabilities are those of all tokens of the answer until the text ends, as
in chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.openai_protocol.chunks import Outputs
from nanoinfer.openai_protocol.errors import error_body, status_code
from nanoinfer.openai_protocol.parts import Part, Parts, Verb, parts_of
from nanoinfer.openai_protocol.requests import GenerationRequest, num_top
from nanoinfer.openai_protocol.responses import Decode, chat_logprobs, check_finite, num_values, token_counts, usage
from nanoinfer.openai_protocol.responses_input import CUSTOM_INPUT
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.utils.json_pieces import Items, encode, json_strings

Steps = Sequence[Mapping[int, Logprob]]
Write = Callable[[Any], Iterable[str]]
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_EVENTS = {
    "reasoning": "response.reasoning_text", "text": "response.output_text", "call": "response.function_call_arguments"
}  # fmt: skip
_CUSTOM_EVENTS = "response.custom_tool_call_input"
_CHARS_OF_VALUE = 16
"""Characters of a text that take about as long to write as a number."""


def responses_body(
    request: GenerationRequest,
    outputs: Sequence[RequestOutput],
    *,
    request_id: str,
    model: str,
    created: int,
    decode: Decode,
) -> dict[str, Any]:
    """Return the body of a successful response. Args as for `response_body`."""
    (o,) = outputs[0].outputs
    end, parts, custom = _end(o), parts_of(o), _custom_tools(request)
    text = next((part for part in parts if part.kind == "text"), None)
    items = []
    for part in parts:
        status = end["status"] if part is parts[-1] else "completed"
        logprobs = _logprobs(request, o.logprobs if part is text else ())
        items.append(_item(part, request_id, status, custom, logprobs))
    counts = _usage(usage(outputs), outputs[0].num_cached_tokens)
    return _head(request, request_id, model, created) | end | {"output": tuple(items), "usage": counts}


class EventWriter:
    """Encodes the events of one response.

    Args:
        request: from `parse_responses`, with stream=true.
        request_id, model, created, decode: as for `response_body`.
    """

    def __init__(
        self, request: GenerationRequest, *, request_id: str, model: str, created: int, decode: Decode
    ) -> None:
        self._request, self._id, self._custom = request, request_id, _custom_tools(request)
        self._head = _head(request, request_id, model, created)
        self._num_events = 0
        self._parts = Parts()
        self._items: list[dict[str, Any]] = []  # of the parts that have ended
        self._new: list[Mapping[int, Logprob]] = []  # log-probabilities that no delta has
        self._steps: list[Mapping[int, Logprob]] = []  # those of the deltas of the last text
        self._num_step_values = 0
        self._first: RequestOutput | None = None
        self._num_output, self._num_reasoning = 0, 0

    def num_values(self, found: Outputs) -> int:
        """Return about how many numbers and strings the events of new outputs have; 0 if a token has few."""
        values = num_values(self._request, [output for _, output in found])
        ends = any(output.finished for _, output in found)
        if self._first is None or ends:
            echoed = self._request.echoed
            values += len(echoed["instructions"] or "") // _CHARS_OF_VALUE + 1024 * len(echoed["tools"])
        if ends:
            values += 4 * (self._num_step_values + self._parts.num_chars // _CHARS_OF_VALUE)
        return values

    def write(self, found: Outputs) -> bytes:
        """Return the events of new outputs. Raises ResultError: a log-probability is not finite."""
        return _bytes(self._events(found, lambda document: (encode(document),)))

    def strings(self, found: Outputs) -> Iterator[str]:
        """Yield the events of new outputs, which are large, in short strings. Raises as `write`."""
        return self._events(found, json_strings)

    def end(self) -> bytes:
        """Return nothing: the events of the last outputs end the response."""
        return b""

    def error(self, error: NanoinferError) -> bytes:
        """Return the last event of a stream that has failed, and the first if no output was written."""
        code = "server_error" if status_code(error) >= 500 else "invalid_prompt"
        failed = {"status": "failed", "error": {"code": code, "message": error_body(error)["error"]["message"]}}
        names = ("response.failed",) if self._num_events else ("response.created", "response.failed")
        heads = {"response.created": self._head, "response.failed": self._head | failed}
        return _bytes(text for name in names for text in self._event(name, {"response": heads[name]}, json_strings))

    def _events(self, found: Outputs, write: Write) -> Iterator[str]:
        for _, output in found:
            check_finite([output])  # before its first event
            if self._first is None:
                self._first = output
                for name in ("response.created", "response.in_progress"):
                    yield from self._event(name, {"response": self._head}, write)
            (o,) = output.outputs
            self._num_output += len(o.token_ids)
            self._num_reasoning += o.num_reasoning_tokens or 0
            self._new += o.logprobs or ()
            self._num_step_values += num_values(self._request, [output])
            end = _end(o)
            ended: Part | None = None  # its events follow when it is known whether it is the last one
            for verb, part, text in self._parts.read(o):
                if ended is not None:
                    yield from self._change("end", ended, "", "completed", write)
                ended = part if verb == "end" else None
                if verb != "end":
                    yield from self._change(verb, part, text, "", write)
            if o.finish_reason is not None:
                if ended is not None:
                    yield from self._change("end", ended, "", end["status"], write)
                counts = token_counts(len(self._first.prompt_token_ids), self._num_output, self._num_reasoning)
                end |= {"output": tuple(self._items), "usage": _usage(counts, self._first.num_cached_tokens)}
                yield from self._event(f"response.{end['status']}", {"response": self._head | end}, write)

    def _change(self, verb: Verb, part: Part, text: str, status: str, write: Write) -> Iterator[str]:
        for name, fields in self._changes(verb, part, text, status):
            yield from self._event(name, fields, write)

    def _changes(self, verb: Verb, part: Part, text: str, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and fields of the events of a change. Args: status: of the item, if it ends."""
        at = {"item_id": _item_id(part, self._id), "output_index": part.index}
        logprobs: dict[str, Any] = {}
        if part.kind != "call":
            at["content_index"] = 0
        if part.kind == "text" and verb != "begin":
            new, self._new = self._new, []
            self._steps += new
            logprobs["logprobs"] = _logprobs(self._request, new if verb == "grow" else self._steps)
        if verb == "begin":
            item = _item(part, self._id, "in_progress", self._custom)
            yield "response.output_item.added", {"output_index": part.index, "item": item}
            if part.kind != "call":
                yield "response.content_part.added", {**at, "part": _content(part)}
        elif part.name in self._custom:
            if verb == "end":  # the text within the JSON of the arguments is known when they are whole
                item = _item(part, self._id, status, self._custom)
                yield f"{_CUSTOM_EVENTS}.delta", {**at, "delta": item["input"]}
                yield f"{_CUSTOM_EVENTS}.done", {**at, "input": item["input"]}
                yield from self._done(part, item)
        elif verb == "grow":
            yield f"{_EVENTS[part.kind]}.delta", {**at, "delta": text, **logprobs}
        else:
            self._steps = []
            whole = {"name": part.name, "arguments": part.text} if part.kind == "call" else {"text": part.text}
            item = _item(part, self._id, status, self._custom, **logprobs)
            yield f"{_EVENTS[part.kind]}.done", {**at, **whole, **logprobs}
            if part.kind != "call":
                yield "response.content_part.done", {**at, "part": item["content"][0]}
            yield from self._done(part, item)

    def _done(self, part: Part, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "response.output_item.done", {"output_index": part.index, "item": item}
        self._items.append(item)

    def _event(self, name: str, fields: Mapping[str, Any], write: Write) -> Iterator[str]:
        yield f"event: {name}\ndata: "
        yield from write({"type": name, "sequence_number": self._num_events, **fields})
        yield "\n\n"
        self._num_events += 1


def _head(request: GenerationRequest, request_id: str, model: str, created: int) -> dict[str, Any]:
    """Return a response that has just begun."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": (),
        "usage": None,
        **request.echoed,
    }


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
        return str(json.loads(arguments)[CUSTOM_INPUT])
    return arguments


def _item(
    part: Part, request_id: str, status: str, custom: Collection[str], logprobs: Items | Sequence[Any] = ()
) -> dict[str, Any]:
    """Return the item of a part. One that is in progress has no content yet. `custom`: names of custom tools."""
    content = () if status == "in_progress" else (_content(part, logprobs),)
    item: dict[str, Any] = {"id": _item_id(part, request_id), "status": status}
    if part.kind == "call":
        item |= {"call_id": part.call_id, "name": part.name}
        if part.name in custom:
            return item | {"type": "custom_tool_call", "input": _input(part.text)}
        return item | {"type": "function_call", "arguments": part.text}
    if part.kind == "reasoning":
        return item | {"type": "reasoning", "summary": (), "content": content, "encrypted_content": None}
    return item | {"type": "message", "role": "assistant", "content": content}


def _content(part: Part, logprobs: Items | Sequence[Any] = ()) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": (), "logprobs": logprobs}


def _logprobs(request: GenerationRequest, steps: Steps | None) -> Items | Sequence[Any]:
    """Return log-probabilities of tokens, the sampled token first in each."""
    return chat_logprobs(steps, num_top(request.params.logprobs, steps))["content"] if steps else ()


def _bytes(strings: Iterable[str]) -> bytes:
    return "".join(strings).encode(errors="backslashreplace")
