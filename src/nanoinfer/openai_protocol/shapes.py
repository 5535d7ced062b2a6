"""What differs between the routes that generate: one `Shape` for each URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from nanoinfer.errors import NanoinferError
from nanoinfer.openai_protocol.chunks import ChunkWriter, Outputs
from nanoinfer.openai_protocol.errors import as_sent, renamed
from nanoinfer.openai_protocol.fields import CHAT, COMPLETIONS, RESPONSES
from nanoinfer.openai_protocol.requests import GenerationRequest, parse
from nanoinfer.openai_protocol.responses import response_body
from nanoinfer.openai_protocol.responses_input import parse_responses, responses_as_sent
from nanoinfer.openai_protocol.responses_output import EventWriter, responses_body
from nanoinfer.sampling_params import SamplingParams


class Writer(Protocol):
    """Encodes the server-sent events of one response."""

    def num_values(self, found: Outputs) -> int:
        """Return about how many numbers and strings the events of new outputs have; 0 if a token has few."""

    def write(self, found: Outputs) -> bytes:
        """Return the events of new outputs. Raises ResultError: a log-probability is not finite."""

    def strings(self, found: Outputs) -> Iterator[str]:
        """Yield the events of new outputs, which are large, in short strings. Raises as `write`."""

    def end(self) -> bytes:
        """Return the events after those of the last outputs."""

    def error(self, error: NanoinferError) -> bytes:
        """Return the last event of a stream that has failed. Args: error: from `Shape.as_sent`."""


@dataclass(frozen=True)
class Shape:
    """How the requests and responses of a route are written."""

    parse: Callable[[Mapping[str, Any], SamplingParams], GenerationRequest]
    """Reads the body of a request; the second argument has the parameters that it does not have. Raises as `parse`."""
    body: Callable[..., dict[str, Any]]
    """Returns the body of a whole response, with the arguments of `response_body`."""
    writer: Callable[..., Writer]
    """Returns the writer of a stream, with the arguments of `ChunkWriter`."""
    as_sent: Callable[[NanoinferError, GenerationRequest], NanoinferError]
    """Returns an error of a parsed request with the names of the fields that the client has sent."""


def _openai(url: str) -> Shape:
    names = {"prompt": "messages"} if url == CHAT else {}

    def error_as_sent(error: NanoinferError, request: GenerationRequest) -> NanoinferError:
        return renamed(as_sent(error, response_format=request.response_format), names)

    return Shape(partial(parse, url, streams=True), response_body, ChunkWriter, error_as_sent)


SHAPES: dict[str, Shape] = {
    **{url: _openai(url) for url in (COMPLETIONS, CHAT)},
    RESPONSES: Shape(parse_responses, responses_body, EventWriter, responses_as_sent),
}
