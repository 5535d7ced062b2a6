"""The two forms of a line and of its record: this project's own, and OpenAI's batch files.

own      {"id": "a", "prompt": "To be", "max_tokens": 5}
         -> {"line": 1, "id": "a", "outputs": [{"index": 0, "text": ...}], "usage": {...}, "seed": 7, "error": null}
OpenAI   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "To be"}}
         -> {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

A record has no time and no random id, so that the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from nanoinfer.batch.files import MAX_LINE_BYTES, Line, Place
from nanoinfer.errors import NanoinferError, ResultError, show
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.protocols.errors import as_sent, error_body, status_code
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, EMBEDDINGS, SAMPLING, TEMPLATE, FieldError
from nanoinfer.protocols.output import plain_logprobs, response_body, usage
from nanoinfer.protocols.pooling import PoolingRequest, parse_pooling, pooling_body
from nanoinfer.protocols.requests import GenerationRequest, parse, with_fields
from nanoinfer.protocols.shared import Decode, Reply
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.files import decode_utf8, parse_json

PROMPT_KEYS = ("prompt", "prompt_token_ids")
OWN_KEYS = (*PROMPT_KEYS, *SAMPLING, *TEMPLATE, "messages", "id", "custom_id", "model")
OPENAI_KEYS = ("custom_id", "method", "url", "body")
"""Fields of a line in this project's form, and in OpenAI's."""
Record = dict[str, Any]


def read_form(line: Line, model: str, decode: Decode, several: bool) -> tuple[Form, NanoinferError | None]:
    """Return the form of a line, and why it cannot be read; None: it is a JSON object.

    Args:
        line: the line.
        model: name of the model, for OpenAI's records.
        decode: returns the text of token ids.
        several: whether there are several files, so that records name theirs.
    """
    fields: Mapping[str, Any] = {}
    try:
        fields = _read_object(line)
    except NanoinferError as e:
        return OwnForm(line.place, fields, several), e
    if "body" in fields or "url" in fields or "method" in fields:
        return OpenAIForm(line.place, fields, model, decode), None
    return OwnForm(line.place, fields, several), None


def derive_seed(seed: int, number: int, index: int) -> int:
    """Return the seed of a line without one: a function of the job's seed, the line's number and the prompt's index.

    It is a hash, so that jobs with consecutive seeds share no seeds of lines. 48 bits are exact in every JSON reader.
    """
    digest = hashlib.sha256(f"{seed} {number} {index}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def with_call_ids(o: CompletionOutput, number: int) -> CompletionOutput:
    """Return an output whose calls have ids made of the line's number: the same input gives the same bytes."""
    if o.message is None:
        return o
    calls = (replace(c, id=f"call_{number}_{o.index}_{i}") for i, c in enumerate(o.message.tool_calls))
    return replace(o, message=replace(o.message, tool_calls=tuple(calls)))


def to_bytes(record: Record) -> bytes:
    """Return a record as a line of JSON.

    Raises:
        ResultError: a number in it is not finite.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in an id or a message
        return json.dumps(record, allow_nan=False).encode() + b"\n"
    except ValueError:
        raise ResultError("a log-probability is not finite (nan or infinity): try --dtype float32") from None


class OwnForm:
    """A line with the names of `LLM.generate` and of SamplingParams."""

    def __init__(self, place: Place, fields: Mapping[str, Any], several: bool) -> None:
        self._fields = fields
        line_id = fields.get("id", fields.get("custom_id"))
        file = {"file": place.file} if several else {}
        self._start: Record = {"line": place.line, **file, "id": line_id if _is_id(line_id) else None}

    def request(self, defaults: SamplingParams) -> GenerationRequest:
        """Return the request of the line. Raises NanoinferError if a field is unknown or has a bad value."""
        fields = self._fields
        for name in fields:
            if name not in OWN_KEYS:
                raise NanoinferError(
                    f"the field {show(name)} is unknown: a line has prompt, prompt_token_ids or messages, id, and"
                    " fields of SamplingParams"
                )
        if "id" in fields and "custom_id" in fields:
            raise NanoinferError("id and custom_id are both given: give one")
        _check_id(fields.get("id", fields.get("custom_id")))
        prompt = {name: fields[name] for name in (*PROMPT_KEYS, "messages") if name in fields}
        if len(prompt) != 1:
            raise NanoinferError(
                f"the line has {' and '.join(prompt) or 'no prompt'}: give one of prompt, prompt_token_ids, messages"
            )
        params = with_fields(defaults, {name: fields[name] for name in SAMPLING if name in fields})
        model = fields.get("model")
        if model is not None and not isinstance(model, str):
            raise NanoinferError(f"model={show(model)} is not a string")
        if "messages" in prompt:
            template = {name: fields[name] for name in TEMPLATE if fields.get(name) is not None}
            return GenerationRequest(params, (), prompt["messages"], template, model=model)
        if names := [name for name in TEMPLATE if name in fields]:
            raise NanoinferError(f"{names[0]} needs messages: a prompt has no template")
        return GenerationRequest(params, [prompt], model=model)

    def record(self, outputs: Sequence[RequestOutput]) -> Record:
        """Return the record of a line that succeeded."""
        (output,) = outputs
        completions = [{name: value for name, value in vars(o).items() if value is not None} for o in output.outputs]
        for o in completions:
            if "logprobs" in o:
                o["logprobs"] = plain_logprobs(o["logprobs"])
            if "message" in o:
                o["message"] = asdict(o["message"])
        record = {**self._start, "outputs": completions, "usage": usage(outputs), "seed": output.seed, "error": None}
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
        if output.num_dropped_tokens:
            record["num_dropped_tokens"] = output.num_dropped_tokens
        return record

    def error(self, error: NanoinferError) -> Record:
        """Return the record of a line that failed."""
        return {**self._start, "outputs": [], "usage": None, "seed": None, "error": str(error)}


class OpenAIForm:
    """A line of an OpenAI batch file."""

    def __init__(self, place: Place, fields: Mapping[str, Any], model: str, decode: Decode) -> None:
        self._fields, self._decode = fields, decode
        self.model = model
        """Name of the model in the record."""
        self._number, self._line = place.number, place.line
        self._id = fields.get("custom_id") if _is_id(fields.get("custom_id")) else None
        self._request: GenerationRequest | PoolingRequest | None = None

    def request(self, defaults: SamplingParams) -> GenerationRequest | PoolingRequest:
        """Return the request of the line. Raises NanoinferError if a field is unknown or has a bad value."""
        fields = self._fields
        for name in fields:
            if name not in OPENAI_KEYS:
                raise FieldError(f"the field {show(name)} is unknown: use {', '.join(OPENAI_KEYS)}", name)
        _check_id(fields.get("custom_id"))
        if fields.get("method") != "POST":
            raise FieldError(f"method={show(fields.get('method'))} is not 'POST'", "method")
        url, body = fields.get("url"), fields.get("body")
        known = (COMPLETIONS, CHAT, EMBEDDINGS)
        if url not in known:
            raise FieldError(f"url={show(url)} is not one of {', '.join(known)}", "url")
        if not isinstance(body, dict):
            raise FieldError(f"body={show(body)} is not a JSON object", "body")
        self._request = parse_pooling(body) if url == EMBEDDINGS else parse(url, body, defaults)
        return self._request

    def record(self, outputs: Sequence[Any]) -> Record:
        """Return the record of a line that succeeded. Args: outputs: of `LLM.generate`, or embeddings."""
        assert self._request is not None
        reply = Reply(str(self._number), self.model, 0, self._decode)
        if isinstance(self._request, PoolingRequest):
            return self._response(200, pooling_body(self._request, outputs, reply))
        body = response_body(self._request, outputs, reply)
        del body["usage"]["prompt_tokens_details"]  # it depends on what ran before; the rest of a record does not
        return self._response(200, body)

    def error(self, error: NanoinferError) -> Record:
        """Return the record of a line that failed."""
        error = as_sent(error, response_format=getattr(self._request, "response_format", ""))
        body = error_body(error)
        body["error"]["message"] = f"line {self._line}: {error}"
        return self._response(status_code(error), body)

    def _response(self, status: int, body: Record) -> Record:
        response = {"status_code": status, "request_id": f"req_{self._number}", "body": body}
        return {"id": f"batch_req_{self._number}", "custom_id": self._id, "response": response, "error": None}


Form = OwnForm | OpenAIForm
"""A line that is being processed: its request, and how its record is written."""


def _read_object(line: Line) -> Mapping[str, Any]:
    """Return the JSON object of a line. Raises NanoinferError if it is too long, not UTF-8 or no object."""
    if line.content is None:
        raise NanoinferError(
            f"the line has {line.num_bytes} bytes; the limit is {MAX_LINE_BYTES}: split it, or shorten the prompt"
        )
    fields = parse_json(decode_utf8(line.content, "the line"), "the line is not JSON")
    if not isinstance(fields, dict):
        raise NanoinferError(f"the line {show(fields)} is not a JSON object: write {{'prompt': ...}}")
    return fields


def _is_id(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _check_id(value: Any) -> None:
    if value is not None and not _is_id(value):
        raise NanoinferError(f"id={show(value)} is neither a string nor an integer")
