"""The body of a response to /v1/messages, and the server-sent events of a streamed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanoinfer.anthropic_protocol.errors import error_object
from nanoinfer.anthropic_protocol.requests import messages_error, parse_messages
from nanoinfer.errors import NanoinferError
from nanoinfer.openai_protocol import GenerationRequest, Shape, status_code
from nanoinfer.openai_protocol.chunks import Outputs
from nanoinfer.openai_protocol.parts import Part, Parts, parts_of
from nanoinfer.outputs import CompletionOutput, RequestOutput, ToolCall
from nanoinfer.utils.json_pieces import Json, encode

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
    return _message(request_id, model, tuple(_block(part, part.text) for part in parts), stop, used)


class EventWriter:
    """Encodes the events of one response. Args as for `ChunkWriter`."""

    def __init__(self, request: GenerationRequest, *, request_id: str, model: str, **_: Any) -> None:
        self._request, self._id, self._model = request, request_id, model
        self._parts = Parts()
        self._num_prompt: int | None = None  # of the first output
        self._num_output = 0

    def num_values(self, found: Outputs) -> int:
        """Return 0: a token has few values."""
        return 0

    def write(self, found: Outputs) -> bytes:
        """Return the events of new outputs."""
        return "".join(self.strings(found)).encode(errors="backslashreplace")

    def strings(self, found: Outputs) -> Iterator[str]:
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
        return f"event: error\ndata: {encode(error_object(str(error), status_code(error)))}\n\n".encode()


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


def _block(part: Part, text: str) -> dict[str, Any]:
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
        return _event("content_block_start", f'"index":{part.index},"content_block":{encode(_block(part, ""))}')
    return _event("content_block_stop", f'"index":{part.index}')


def _event(name: str, fields: str) -> str:
    """Return an event. Args: fields: JSON without braces."""
    return f'event: {name}\ndata: {{"type":"{name}",{fields}}}\n\n'
