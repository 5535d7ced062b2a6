"""The parts of a chat's message, put together from what a parser finds, and the deltas that say the same."""

from __future__ import annotations

import secrets

from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta, ToolCall

Text = type[ContentDelta | ReasoningDelta]


class MessageBuilder:
    """Collects the parts of one message."""

    def __init__(self) -> None:
        self.forget()
        self._space: list[str] = []  # at the end of the text, released only when more text follows
        self._begins = False
        self.blank = True
        """Whether no text was written since `begin`."""

    def forget(self) -> None:
        """Begin the message again, in the middle of its text."""
        self._deltas: list[AnswerDelta] = []
        self._texts: dict[Text, list[str]] = {ContentDelta: [], ReasoningDelta: []}
        self._calls: list[tuple[str, str, list[str]]] = []

    def take(self) -> list[AnswerDelta]:
        """Return the deltas since it was called last."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def message(self) -> ChatMessage:
        """Return the message so far."""
        content, reasoning = ("".join(self._texts[kind]) for kind in (ContentDelta, ReasoningDelta))
        calls = tuple(ToolCall(id, name, "".join(arguments)) for id, name, arguments in self._calls)
        return ChatMessage(content or (None if calls else ""), reasoning or None, calls)

    # Text -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin another text of the same kind or the other: white space before this place and after it is left out."""
        self._space, self._begins, self.blank = [], True, True

    def write(self, kind: Text, text: str, *, join: str = "\n", strips: bool = True) -> None:
        """Add text, without white space at its end until more follows.

        Args:
            kind: of the text.
            text: the next piece.
            join: what stands between texts of a kind.
            strips: whether white space at the beginning and the end is left out.
        """
        kept = text.rstrip() if strips else text
        if kept and self._begins:
            self.add(kind, (join if self._texts[kind] else "") + (kept.lstrip() if strips else kept))
        elif kept:
            self.add(kind, "".join(self._space) + kept)
        if kept:
            self._space, self._begins, self.blank = [], False, False
        self._space.append(text[len(kept) :])

    def write_apart(self, text: str) -> None:
        """Add text as it is to the content, on a line of its own."""
        self._space, self._begins, self.blank = [], False, True
        self.write(ContentDelta, ("\n" if self._texts[ContentDelta] else "") + text)

    def end(self, kind: Text) -> None:
        """Add the white space at the end of the answer."""
        if not self._begins:
            self.add(kind, "".join(self._space))

    def add(self, kind: Text, text: str) -> None:
        """Add text as it is."""
        if not text:
            return
        self._texts[kind].append(text)
        if self._deltas and isinstance(last := self._deltas[-1], kind):
            text = last.text + text
            self._deltas.pop()
        self._deltas.append(kind(text))

    # Calls ----------------------------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return len(self._calls)

    def call(self, name: str, arguments: str = "") -> None:
        """Begin a call."""
        self._calls.append((f"call_{secrets.token_hex(12)}", name, []))
        self._deltas.append(CallDelta(len(self._calls) - 1, *self._calls[-1][:2], ""))
        self.add_arguments(arguments)

    def add_arguments(self, text: str) -> None:
        """Add arguments to the last call."""
        if not text:
            return
        self._calls[-1][2].append(text)
        if self._deltas and isinstance(last := self._deltas[-1], CallDelta) and last.id is None:
            text = last.arguments + text
            self._deltas.pop()
        self._deltas.append(CallDelta(len(self._calls) - 1, None, None, text))
