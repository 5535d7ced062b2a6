"""OpenAI's shapes of requests and responses, for batch files and for the HTTP server.

fields.py     the fields of a request: what each means, or why it has no effect; also for the OpenAPI document
requests.py   `parse` reads the body of a request to /v1/completions or /v1/chat/completions
responses.py  the body of its response
chunks.py     the chunks of a streamed response
parts.py      the parts of a message, for routes whose events say where one begins and ends
responses_input.py, responses_output.py  /v1/responses
shapes.py     what differs between the routes that generate
errors.py     the body of an error

Besides OpenAI's own fields, a request may have all fields of `SamplingParams` (vLLM's extra fields: top_k, min_p, ...).
A field that is null has its default. A field that is not supported is an error.
"""

from nanoinfer.openai_protocol.chunks import ChunkWriter
from nanoinfer.openai_protocol.errors import as_sent, error_body, error_object, renamed, status_code
from nanoinfer.openai_protocol.fields import CHAT, COMPLETIONS, RESPONSES, SAMPLING, TEMPLATE, FieldError
from nanoinfer.openai_protocol.requests import GenerationRequest, parse, with_fields
from nanoinfer.openai_protocol.responses import (
    Decode,
    check_finite,
    num_values,
    plain_logprobs,
    response_body,
    usage,
)
from nanoinfer.openai_protocol.shapes import SHAPES, Shape, Writer

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "RESPONSES",
    "SAMPLING",
    "SHAPES",
    "TEMPLATE",
    "ChunkWriter",
    "Decode",
    "FieldError",
    "GenerationRequest",
    "Shape",
    "Writer",
    "as_sent",
    "check_finite",
    "error_body",
    "error_object",
    "num_values",
    "parse",
    "plain_logprobs",
    "renamed",
    "response_body",
    "status_code",
    "usage",
    "with_fields",
]
