"""The parts of a chat's message: reasoning, text and calls, each of which begins, grows and ends.

Chat chunks have only deltas. The events of other routes say where a part begins and ends, too:

    [ReasoningDelta("a"), ContentDelta("b")], then the end  ->  begin, grow "a", end; begin, grow "b", end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nanoinfer.outputs import AnswerDelta, CallDelta, CompletionOutput, ContentDelta, ReasoningDelta

Verb = Literal["begin", "grow", "end"]
Kind = Literal["reasoning", "text", "call"]


@dataclass
class Part:
    """A part of a message."""

    kind: Kind
    index: int
    """Of the part in the message."""
    call_id: str = ""
    name: str = ""
    """Of the function that is called."""
    pieces: list[str] = field(default_factory=list)
    """Of the text: of a call, the JSON of its arguments."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class Parts:
    """Follows the outputs of one streamed message."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        """Those that have begun. The last one has not ended before the output is finished."""
        self.num_chars = 0
        """Of all parts."""

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
                self.num_chars += len(text)
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
    found = [Part("reasoning", 0, pieces=[message.reasoning])] if message.reasoning else []
    if message.content or not (found or message.tool_calls):
        found.append(Part("text", len(found), pieces=[message.content or ""]))
    for call in message.tool_calls:
        found.append(Part("call", len(found), call.id, call.name, [call.arguments]))
    return found
