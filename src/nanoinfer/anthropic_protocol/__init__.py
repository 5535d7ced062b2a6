"""Anthropic's shapes of requests and responses, as a translation of OpenAI's.

fields.py     the fields of a request; also for the OpenAPI document
requests.py   a request becomes one to /v1/chat/completions
responses.py  the body of its response, and the events of a stream
errors.py     the body of an error
"""

from nanoinfer.anthropic_protocol.errors import error_object
from nanoinfer.anthropic_protocol.fields import COUNT_TOKENS, MESSAGES, REQUIRED, TABLES
from nanoinfer.anthropic_protocol.requests import messages_error, parse_messages
from nanoinfer.anthropic_protocol.responses import SHAPE

__all__ = [
    "COUNT_TOKENS",
    "MESSAGES",
    "REQUIRED",
    "SHAPE",
    "TABLES",
    "error_object",
    "messages_error",
    "parse_messages",
]
