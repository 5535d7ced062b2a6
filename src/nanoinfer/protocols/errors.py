"""Errors in OpenAI's and in Anthropic's shape, with the name of the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanoinfer.errors import CONTEXT_LENGTH, NanoinferError, QueueFull, ResultError, TokensExcluded
from nanoinfer.protocols.fields import SAMPLING, TABLES, FieldError


def status_code(error: NanoinferError) -> int:
    """Return the HTTP status: 500 for a request that failed while it ran, 429 if the queue is full, or 4xx.

    It is 400 for an output that failed because of the request's grammar, or because its parameters exclude every token:
    the request is at fault.
    """
    if isinstance(error, FieldError):
        return error.status
    by_request = isinstance(error, TokensExcluded) or _param(error) in ("structured_outputs", "response_format")
    if isinstance(error, ResultError) and not by_request:
        return 500
    return 429 if isinstance(error, QueueFull) else 400


def error_body(error: NanoinferError) -> dict[str, Any]:
    """Return the body of a response to a request that failed or was refused."""
    code = error.code if isinstance(error, FieldError) else None
    if CONTEXT_LENGTH in str(error):
        code = "context_length_exceeded"
    return error_object(str(error), status_code(error), _param(error), code)


def as_sent(error: NanoinferError, *, response_format: str) -> NanoinferError:
    """Return an error about structured outputs with the name of the field that the request has.

    Args:
        error: "structured_outputs.json: ..."
        response_format: the field that structured_outputs stand for, as in `GenerationRequest`.
    """
    if not response_format:
        return error
    match = re.match(r"(.*?)structured_outputs(?!\.disable)(\.json_object|\.json)?", text := str(error), re.S)
    if match is None:
        return error
    name = response_format if match[2] == ".json" else "response_format"
    return type(error)(match[1] + name + text[match.end() :])


def renamed(error: NanoinferError, names: Mapping[str, str]) -> NanoinferError:
    """Return an error about a field of a chat with the name of the field that a request of another route has.

    Errors that are not about a field, and those of a server that is busy or fails, are returned as they are.

    Args:
        error: "max_tokens=-1 is not ...", or "message 2 of 3: ...", which is about messages.
        names: of the chat's field or of a part of it -> of the request's; the longest first.
    """
    param, status, text = _param(error), status_code(error), str(error)
    if param is None or status >= 429:
        return error
    match = next((old for old in names if re.match(rf"{re.escape(old)}\b", text)), None)
    name = names.get(match or param, param)
    text = name + text[len(match) :] if match else text if name == param else f"{name}: {text}"
    return FieldError(text, name, status, error.code if isinstance(error, FieldError) else None)


MAX_PARAM_CHARS = 200
"""Of the name of a field in an error: an unknown one may be as long as the body."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape.

    Args:
        message: one line.
        status: the HTTP status, which determines the type.
        param: name of the field, which is truncated.
        code: for programs.
    """
    param = None if param is None else param[:MAX_PARAM_CHARS]
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_ABOUT = {
    r"(the prompt|prompt|token id)\b": "prompt",
    r"(message|role|content|content part|messages|tool_calls|tool_call_id|reasoning_content)\b": "messages",
    r"tool '|\d+ tools:": "tools",
    r"the input\b": "input",
    r"model '": None,  # without a chat template
}
"""How messages begin that do not begin with the name of the field they are about."""


_NAMES = {*SAMPLING, *(name for table in TABLES.values() for name in table)}


def _param(error: NanoinferError) -> str | None:
    """Return the name of the field that an error is about, if it is known."""
    if isinstance(error, FieldError):
        return error.param
    text = re.sub(r"^prompt \d+ of \d+: ", "", str(error))
    for start, name in _ABOUT.items():
        if re.match(start, text):
            return name
    match = re.match(r"\w+", text)
    return match[0] if match and match[0] in _NAMES else None


_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def anthropic_error(message: str, status: int, request_id: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's shape, whose message has the name of the field.

    Args:
        message: one line.
        status: the HTTP status, which determines the type.
        request_id: of the response's X-Request-Id.
    """
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
