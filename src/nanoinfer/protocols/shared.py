"""What the routes that generate share: their shapes, the writers of their streams, and the parts of a message.

Chat chunks have only deltas. Events of other routes say where a part (reasoning, text or call) begins and ends, too:

    [ReasoningDelta("a"), ContentDelta("b")], then the end  ->  begin, grow "a", end; begin, grow "b", end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import AnswerDelta, CallDelta, CompletionOutput, ContentDelta, ReasoningDelta, RequestOutput
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.sampling_params import SamplingParams

Decode = Callable[[Sequence[int]], str]
Outputs = Sequence[tuple[int, RequestOutput]]
"""Pairs of a prompt's index and what was generated for it."""


class Reply(NamedTuple):
    """What all responses have."""

    request_id: str
    """What follows "cmpl-" or "chatcmpl-" in the id."""
    model: str
    """Name of the model."""
    created: int
    """Time in seconds since 1970."""
    decode: Decode
    """Returns the text of token ids, for echo."""


class StreamWriter:
    """Encodes the server-sent events of one response. The routes' classes have `events`, `end` and `error`.

    Args:
        request: of the stream.
        reply: to it.
    """

    def __init__(self, request: GenerationRequest, reply: Reply) -> None:
        raise NotImplementedError

    def events(self, new: Outputs) -> Iterator[str]:
        """Yield the events of new outputs, in short strings. Raises ResultError: a log-probability is not finite."""
        raise NotImplementedError

    def num_values(self, new: Outputs) -> int:
        """Return about how many numbers and strings the events of new outputs have; 0 if a token has few."""
        return 0

    def write(self, new: Outputs) -> bytes:
        """Return the events of new outputs in UTF-8; half a surrogate pair becomes an escape. Raises as `events`."""
        return "".join(self.events(new)).encode(errors="backslashreplace")

    def end(self) -> bytes:
        """Return the events after those of the last outputs."""
        return b""

    def error(self, error: NanoinferError) -> bytes:
        """Return the last event of a stream that has failed. Args: error: from `Shape.as_sent`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Shape:
    """How the requests and responses of a route that generates are written."""

    parse: Callable[[Mapping[str, Any], SamplingParams], GenerationRequest]
    """Reads the body of a request; the second argument has the parameters that it does not have. Raises as `parse`."""
    body: Callable[..., dict[str, Any]]
    """Returns the body of a whole response, with the arguments of `response_body`."""
    writer: type[StreamWriter]
    as_sent: Callable[[NanoinferError, GenerationRequest], NanoinferError]
    """Returns an error of a parsed request with the names of the fields that the client has sent."""


Verb = Literal["begin", "grow", "end"]
Kind = Literal["reasoning", "text", "call"]


@dataclass
class Part:
    """A part of a message."""

    kind: Kind
    index: int
    """Index of the part in the message."""
    call_id: str = ""
    name: str = ""
    """Name of the function that is called."""
    pieces: list[str] = field(default_factory=list)
    """Pieces of the text; of a call, of the JSON of its arguments."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class Parts:
    """Follows the outputs of one streamed message."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        """Parts that have begun. The last one has not ended before the output is finished."""

    def read(self, o: CompletionOutput) -> Iterator[tuple[Verb, Part, str]]:
        """Yield what an output changes: what happens, to which part, and the new text if it grows.

        Args:
            o: with what is new since the one before.
        """
        plain = [ContentDelta(o.text)] if o.text else []
        for delta in plain if o.message_deltas is None else o.message_deltas:
            text = delta.arguments if isinstance(delta, CallDelta) else delta.text
            is_new_call = isinstance(delta, CallDelta) and delta.id is not None
            if not self.parts or is_new_call or self.parts[-1].kind != _kind(delta):
                yield from self._end()
                yield self._begin(delta)
            if text:
                self.parts[-1].pieces.append(text)
                yield "grow", self.parts[-1], text
        if o.finish_reason is not None:
            if not self.parts:
                yield self._begin(ContentDelta(""))
            yield from self._end()

    def _begin(self, delta: AnswerDelta) -> tuple[Verb, Part, str]:
        call_id, name = (delta.id or "", delta.name or "") if isinstance(delta, CallDelta) else ("", "")
        self.parts.append(Part(_kind(delta), len(self.parts), call_id, name))
        return "begin", self.parts[-1], ""

    def _end(self) -> Iterator[tuple[Verb, Part, str]]:
        if self.parts:
            yield "end", self.parts[-1], ""


def _kind(delta: AnswerDelta) -> Kind:
    return "call" if isinstance(delta, CallDelta) else "reasoning" if isinstance(delta, ReasoningDelta) else "text"


def parts_of(o: CompletionOutput) -> list[Part]:
    """Return the parts of a whole output: those that are not empty, or one empty text. Calls are last."""
    message = o.message
    if message is None:
        return [Part("text", 0, pieces=[o.text])]
    parts = [Part("reasoning", 0, pieces=[message.reasoning])] if message.reasoning else []
    if message.content or not (parts or message.tool_calls):
        parts.append(Part("text", len(parts), pieces=[message.content or ""]))
    for call in message.tool_calls:
        parts.append(Part("call", len(parts), call.id, call.name, [call.arguments]))
    return parts
