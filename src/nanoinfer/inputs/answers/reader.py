"""Text that arrives in pieces, and the values in it, as generators: each `yield` waits for more text.

`Values` translates arguments from the notations that models write to JSON text, piece by piece. What it has emitted is
always a prefix of JSON text: strings are emitted as they arrive, numbers and words when they are complete.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from nanoinfer.inputs.answers.format import COUNT, ID, PLACEHOLDER, STRING_MARK
from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta, ToolCall
from nanoinfer.structured.schemas import type_of

T = TypeVar("T")
Waiting = Generator[None, None, T]
Sink = Callable[[str], None]
Text = type[ContentDelta | ReasoningDelta]
MAX_DEPTH = 128
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"[\w.+-]+")
_SPACE = re.compile(r"\s+")
_PLACEHOLDERS = {ID: re.compile(r"[\w.:-]+"), COUNT: re.compile(r"\d+")}
_TOKENS = re.compile(r'"[^"\s]*"?|[{}\[\],:()]|[^\s"{}\[\],:()]+')
_PYTHON_ESCAPES = dict(zip("ntrbfav0'", "\n\t\r\b\f\a\v\0'", strict=True)) | {"\n": ""}
_QUOTES = {"json": "\"'", "python": "\"'", "gemma": "<"}
_BARE_KEY = {colon: re.compile(rf"[^\s{colon},()\[\]{{}}\"]+") for colon in ":="}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


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
        found = self._pattern.search(text, at)
        if found is not None and found.start() < begin:
            return found.start(), found.end(), True
        return begin, begin, False


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

    def peek(self) -> Waiting[str]:
        """Return the next character; empty at the end of the answer."""
        while self._at == len(self._text):
            if self.closed:
                return ""
            yield
        return self._text[self._at]

    def next(self) -> Waiting[str]:
        """Read white space; return the next character. Raises Ended."""
        yield from self.space()
        if not (found := (yield from self.peek())):
            raise Ended
        return found

    def one(self) -> Waiting[str]:
        """Read a character. Raises Ended."""
        if not (yield from self.peek()):
            raise Ended
        return self.take(1)

    def run(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Read what a repeated class of characters matches; it may be empty."""
        parts = []
        while (yield from self.peek()):
            if (found := pattern.match(self._text, self._at)) is None:
                break
            parts.append(self.take(found.end() - self._at))
        return "".join(parts)

    def space(self) -> Waiting[str]:
        """Read white space."""
        return (yield from self.run(_SPACE))

    def begins(self, *texts: str) -> Waiting[bool]:
        """Return whether one of some texts is next."""
        while not self._text.startswith(texts, self._at):
            if self.closed or not any(text.startswith(self._text[self._at :]) for text in texts):
                return False
            yield
        return True

    def skip(self, text: str) -> Waiting[bool]:
        """Read a text if it is next; return whether it was."""
        if found := (yield from self.begins(text)):
            self.take(len(text))
        return found

    def rest(self) -> str:
        """Read what is there."""
        return self.take(len(self._text) - self._at)

    def ends_within(self, texts: Iterable[str]) -> bool:
        """Return whether the answer ends here, or within one of some texts."""
        return self.closed and any(text.startswith(self._text[self._at :]) for text in texts)

    def expect(self, *texts: str) -> Waiting[None]:
        """Read white space and one of some texts. Raises Malformed if something else is next."""
        yield from self.space()
        for text in sorted(texts, key=len, reverse=True):
            if (yield from self.skip(text)):
                return
        raise Ended if self.ends_within(texts) else Malformed

    def piece(self, piece: str) -> Waiting[None]:
        """Read a piece of a format with any white space between its parts. Raises Malformed."""
        for part in PLACEHOLDER.split(piece):
            if part in _PLACEHOLDERS:
                yield from self.run(_PLACEHOLDERS[part])
                continue
            for token in _TOKENS.findall(part) if '"' in part else part.split():
                yield from self.expect(token)

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
            begin, end, found = markers.find(self._text, self._at, self.closed and partial)
            if begin > self._at:
                sink(self.take(begin - self._at))
            if found:
                return self.take(end - begin)
            if self.closed:
                self.rest()
                return None
            yield


class Values:
    """Reads values of one notation and emits them as JSON.

    Args:
        reader: of the answer.
        notation: "json", "python" or "gemma".
        sink: gets pieces of JSON text.
    """

    def __init__(self, reader: Reader, notation: str, sink: Sink) -> None:
        self._reader, self._notation, self._sink = reader, notation, sink

    def arguments(self) -> Waiting[None]:
        """Read all arguments of a call. Raises Malformed and Ended."""
        if self._notation == "python":
            yield from self._items(")", "=")
            return
        first = yield from self._reader.next()
        if first == '"' and self._notation == "json":  # an object as a string of JSON
            text = yield from self.text()
            if not is_object(text):
                raise Malformed
            self._sink(text)
        elif first == "{":
            yield from self.value()
        else:
            raise Malformed

    def text(self) -> Waiting[str]:
        """Return a JSON string."""
        parts: list[str] = []
        yield from Values(self._reader, "json", parts.append)._string()
        found: str = json.loads("".join(parts))
        return found

    def value(self, depth: int = 0) -> Waiting[None]:
        """Read a value. Raises Malformed and Ended."""
        reader = self._reader
        first = yield from reader.next()
        if depth > MAX_DEPTH:
            raise Malformed
        if first in "{[":
            reader.take(1)
            yield from self._items(*(("}", ":") if first == "{" else ("]", "")), depth)
        elif first in _QUOTES[self._notation]:
            yield from self._string()
        else:
            word = yield from reader.run(_WORD)
            if not (yield from reader.peek()):
                raise Ended
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise Malformed
            self._sink(_WORDS.get(word, word))

    def _items(self, end: str, colon: str, depth: int = 0) -> Waiting[None]:
        """Read the values of a list, or with a colon the members of an object or the arguments of a Python call."""
        reader, is_first = self._reader, True
        self._sink("{" if colon else "[")
        while (yield from reader.next()) != end:
            if not is_first:
                yield from reader.expect(",")
                self._sink(", ")
            is_first = False
            if colon:
                yield from self._key(colon)
                yield from reader.expect(colon)
                self._sink(": ")
            yield from self.value(depth + 1)
        if end != ")":  # a parenthesis belongs to the format
            reader.take(1)
        self._sink("}" if colon else "]")

    def _key(self, colon: str) -> Waiting[None]:
        if (yield from self._reader.next()) in "\"'<" and colon == ":":
            yield from self._string()
            return
        key = "" if self._notation == "json" else (yield from self._reader.run(_BARE_KEY[colon]))
        yield from self._reader.next()  # else it may be longer
        if not key:
            raise Malformed
        self._sink(json.dumps(key, ensure_ascii=False))

    def _string(self) -> Waiting[None]:
        reader = self._reader
        if self._notation == "gemma":
            yield from reader.expect(STRING_MARK)
            quote = STRING_MARK
        else:
            quote = yield from reader.one()
            if quote not in _QUOTES[self._notation]:
                raise Malformed
        ends = Markers([quote] if self._notation == "gemma" else [quote, "\\"])
        self._sink('"')
        while (found := (yield from reader.until(ends, self._sink_text))) == "\\":
            yield from self._escape(python=self._notation == "python" or quote == "'")
        if found is None:
            raise Ended
        self._sink('"')

    def _sink_text(self, text: str) -> None:
        self._sink(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self, python: bool) -> Waiting[None]:
        """Read what follows a backslash. Args: python: whether it may be one of Python's."""
        reader = self._reader
        kind = yield from reader.one()
        if kind == "u" or (python and kind in _HEX_DIGITS):
            digits = ""
            for _ in range(_HEX_DIGITS[kind]):
                digits += yield from reader.one()
            if not re.fullmatch("[0-9a-fA-F]+", digits) or (code := int(digits, 16)) > 0x10FFFF:
                raise Malformed
            self._sink(f"\\u{code:04x}" if code < 0x10000 else chr(code))
        elif kind in '"\\/bfnrt':
            self._sink("\\" + kind)
        elif python:
            self._sink_text(_PYTHON_ESCAPES.get(kind, "\\" + kind))
        else:
            raise Malformed


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(strict_json(text), dict)
    except (ValueError, RecursionError):
        return False


def to_json(text: str, permitted: set[str] | None) -> str:
    """Return a value that was written without quotes as JSON: as it is if its type is permitted, else as a string.

    Lists, dicts and words of Python, such as ['a'] and True, become those of JSON.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    word = text.strip()
    if permitted is not None and permitted <= {"string", "null"}:
        return "null" if "null" in permitted and _WORDS.get(word) == "null" else quoted
    try:
        found = type_of(strict_json(word))
    except (ValueError, RecursionError):
        if (made := _from_python(word)) is None:
            return quoted
        word, found = made, type_of(strict_json(made))
    if permitted is None or "string" not in permitted or found in permitted:
        return word
    return word if found == "integer" and "number" in permitted else quoted


def _from_python(text: str) -> str | None:
    """Return a list, dict or word of Python as JSON; None if a text is none."""
    if text[:1] not in ("[", "{") and text not in _WORDS:
        return None
    reader, parts = Reader(), list[str]()
    reader.feed(text + "\n")  # which ends a word
    reader.closed = True
    try:
        for _ in Values(reader, "python", parts.append).value():
            pass
    except (Ended, Malformed):
        return None
    return None if reader.rest().strip() else "".join(parts)


def strict_json(text: str) -> Any:
    """Return what a JSON text says. Raises ValueError, for NaN and Infinity too, and RecursionError."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


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
