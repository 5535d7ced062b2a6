"""Text that arrives in pieces, as generators: each `yield` waits for more text; and the message that is made of it."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from nanoinfer.inputs.answers.format import ID, STRING_MARK
from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta, ToolCall
from nanoinfer.structured.schemas import type_of

T = TypeVar("T")
Waiting = Generator[None, None, T]
Sink = Callable[[str], None]
Text = type[ContentDelta | ReasoningDelta]
_SPACE = re.compile(r"\s+")
_ID = re.compile(r"[\w.:-]+")
_TOKENS = re.compile(r"\w+|[^\w\s]")
_BARE_KEY = re.compile(r"([^\s:,{}\[\]\"]+)(\s*:)")


class Ended(Exception):
    """The answer ends here."""


class Malformed(Exception):
    """This is no call."""


class Markers:
    """Strings to look for in a text that arrives in pieces."""

    def __init__(self, markers: Iterable[str]) -> None:
        texts = sorted(filter(None, markers), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=1)

    def find(self, text: str, at: int, closed: bool) -> tuple[int, int, bool]:
        """Return begin and end of the first marker from `at`, and whether there is one.

        Without one, begin is where the text ends, or where a marker may begin that is not there as a whole.
        """
        begin = len(text)
        if not closed:
            first = max(at, begin - self._longest + 1)
            begin = next((i for i in range(first, begin) if text[i:] in self._beginnings), begin)
        match = self._pattern.search(text, at)
        if match is not None and match.start() < begin:
            return match.start(), match.end(), True
        return begin, begin, False


_BRACKETS = "{}[]"
_IN_OBJECTS = {mark: Markers((mark, *_BRACKETS)) for mark in ('"', STRING_MARK)}
_IN_STRINGS = {'"': Markers('"\\'), STRING_MARK: Markers([STRING_MARK])}


class Reader:
    """The text of an answer that was not read yet."""

    def __init__(self) -> None:
        self.closed = False
        """Whether the answer is complete."""
        self.raw: list[str] | None = None
        """What was read since it was set to a list."""
        self._text, self._at = "", 0

    def feed(self, text: str) -> None:
        """Append text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def take(self, count: int) -> str:
        """Read characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self.raw is not None:
            self.raw.append(text)
        return text

    def unread(self, text: str) -> None:
        """Put back what was read."""
        self._text, self._at = text + self._text[self._at :], 0

    def rest(self) -> str:
        """Read what is there."""
        return self.take(len(self._text) - self._at)

    def next(self) -> Waiting[str]:
        """Return the next character. Raises Ended."""
        while self._at == len(self._text):
            if self.closed:
                raise Ended
            yield
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Read what a repeated class of characters matches; it may be empty."""
        parts = []
        while True:
            match = pattern.match(self._text, self._at)
            parts.append(self.take(match.end() - self._at) if match is not None else "")
            if self._at < len(self._text) or self.closed:
                return "".join(parts)
            yield

    def space(self) -> Waiting[str]:
        """Read white space."""
        return (yield from self.run(_SPACE))

    def match(self, pattern: Any) -> Waiting[Any]:
        """Read what a pattern of the package `regex` matches; return the match, or None.

        The match is partial if the answer ends in it.
        """
        while (match := pattern.match(self._text, self._at, partial=True)) is not None and match.partial:
            if self.closed:
                break
            yield
        if match is not None:
            self.take(match.end() - self._at)
        return match

    def begins(self, text: str) -> Waiting[bool]:
        """Return whether a text is next."""
        while not self._text.startswith(text, self._at):
            if self.closed or not text.startswith(self._text[self._at :]):
                return False
            yield
        return True

    def skip(self, text: str) -> Waiting[bool]:
        """Read a text if it is next; return whether it was."""
        if is_next := (yield from self.begins(text)):
            self.take(len(text))
        return is_next

    def ends_within(self, texts: Iterable[str]) -> bool:
        """Return whether the answer ends here, or within one of some texts."""
        return self.closed and any(text.startswith(self._text[self._at :]) for text in texts)

    def piece(self, piece: str) -> Waiting[None]:
        """Read a piece of a format with any white space between its words. Raises Malformed and Ended."""
        for i, part in enumerate(piece.split(ID)):
            if i > 0:
                yield from self.run(_ID)
            for token in _TOKENS.findall(part):
                yield from self.space()
                if not (yield from self.skip(token)):
                    raise Ended if self.ends_within([token]) else Malformed

    def text(self, markers: Markers) -> Waiting[str]:
        """Read up to and including a marker; return the text before. Raises Ended."""
        parts: list[str] = []
        if (yield from self.until(markers, parts.append)) is None:
            raise Ended
        return "".join(parts)

    def until(self, markers: Markers, sink: Sink, partial: bool = False) -> Waiting[str | None]:
        """Read up to and including a marker; return it, None at the end of the answer.

        Args:
            markers: to look for.
            sink: gets the text before.
            partial: whether it gets the beginning of a marker at the end of the answer, too.
        """
        while True:
            begin, end, is_there = markers.find(self._text, self._at, self.closed and partial)
            if begin > self._at:
                sink(self.take(begin - self._at))
            if is_there:
                return self.take(end - begin)
            if self.closed:
                self.rest()
                return None
            yield

    def object(self, mark: str, sink: Sink) -> Waiting[None]:
        """Read an object whose strings stand between marks: JSON, or notation "gemma", whose keys have none.

        What the sink gets is JSON text, strings as they arrive. Raises Malformed and Ended; what stands between
        brackets and strings is not checked.
        """
        yield from self.space()
        if (yield from self.next()) != "{":
            raise Malformed
        depth = 0
        while True:
            parts: list[str] = []
            marker = yield from self.until(_IN_OBJECTS[mark], parts.append)
            if marker is None:
                raise Ended
            sink("".join(parts) if mark == '"' else _BARE_KEY.sub(r'"\1"\2', "".join(parts)))
            if marker == mark:
                yield from self._string(mark, sink)
                continue
            sink(marker)
            depth += 1 if marker in "{[" else -1
            if depth == 0:
                return

    def _string(self, mark: str, sink: Sink) -> Waiting[None]:
        """Read a string after its opening mark. Raises Ended."""
        sink('"')
        while True:
            marker = yield from self.until(_IN_STRINGS[mark], lambda text: sink(quoted(text)[1:-1]))
            if marker is None:
                raise Ended
            if marker == mark:
                return sink('"')
            yield from self.next()
            sink(marker + self.take(1))


def whole_object(text: str, mark: str) -> str:
    """Return a text with its first object as JSON. Args: mark: as in `Reader.object`. Raises Malformed and Ended."""
    reader, parts = Reader(), list[str]()
    reader.feed(text)
    reader.closed = True
    for _ in reader.object(mark, parts.append):
        pass
    return "".join(parts) + reader.rest()


def quoted(text: str) -> str:
    """Return a text as a string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def strict_json(text: str) -> Any:
    """Return what a JSON text says. Raises ValueError, for NaN and Infinity too, and RecursionError."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def to_json(text: str, permitted: set[str] | None) -> str:
    """Return a value that was written without quotes as JSON: as it is if its type is permitted, else as a string.

    Lists, dicts and words of Python, such as ['a'] and True, become those of JSON.
    """
    word = text.strip()
    try:
        kind = type_of(strict_json(word))
    except (ValueError, RecursionError):
        if word[:1] not in tuple("[{TFN"):
            return quoted(text)
        try:
            value = ast.literal_eval(word)
            kind, word = type_of(value), json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return quoted(text)
    others = None if permitted is None else permitted - {"string"} | ({"integer"} if "number" in permitted else set())
    return word if others is None or "string" not in (permitted or ()) or kind in others else quoted(text)


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
        released = text.rstrip() if strips else text
        if released and self._begins:
            self.add(kind, (join if self._texts[kind] else "") + (released.lstrip() if strips else released))
        elif released:
            self.add(kind, "".join(self._space) + released)
        if released:
            self._space, self._begins, self.blank = [], False, False
        self._space.append(text[len(released) :])

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
