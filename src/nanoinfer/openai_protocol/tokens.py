"""Bodies of requests to /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.openai_protocol.fields import DETOKENIZE, TEMPLATE, TOKENIZE, FieldError
from nanoinfer.openai_protocol.requests import given_fields, template_options
from nanoinfer.utils.checks import require_bool, show


@dataclass(frozen=True)
class TokenizeRequest:
    """What to tokenize: a text or the messages of a chat."""

    model: Any = None
    prompt: str | None = None
    messages: Any = None
    """Not checked yet; None: a prompt is given."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """How to apply the chat template: the fields of TEMPLATE that are given."""
    add_special_tokens: bool = True
    return_token_strs: bool = False


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Read the body of a request to /tokenize. Raises FieldError."""
    given = given_fields(TOKENIZE, body)
    options = {name: value for name, value in given.items() if name not in TEMPLATE}
    request = TokenizeRequest(**options, template=template_options(given))
    for name in ("add_special_tokens", "return_token_strs"):
        require_bool(name, getattr(request, name))
    if (request.prompt is None) == (request.messages is None):
        raise FieldError("give one of prompt and messages", "prompt")
    if request.prompt is not None and not isinstance(request.prompt, str):
        raise FieldError(f"prompt={show(request.prompt)} is not a string", "prompt")
    return request


def parse_detokenize(body: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Return the model and the token ids of a request to /detokenize. Raises FieldError."""
    given = given_fields(DETOKENIZE, body)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise FieldError(f"tokens={show(tokens)} is not a list of token ids", "tokens")
    return given.get("model"), tokens
