"""Write JSON in pieces: a large document then delays no other thread, and is never in memory as a whole.

Python's encoder holds the interpreter's lock until it returns, which takes 100 ms for 10 MB. Here, one call of it
encodes a slice of a list or of a string. Lists and strings that are made for a document (`Items`, `Text`) are made as
they are written.

    json_strings({"text": "ab", "ids": Items(lambda: range(3))})  ->  '{"text":' '"ab"' ',"ids":' '[' '0,1,2' ']' '}'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from nanoinfer.errors import ResultError

PIECE_BYTES = 1 << 16
SLICE_ITEMS = 1024  # numbers or short strings that one call encodes: 0.1 ms
SLICE_CHARS = 1 << 14


def plain(value: Any) -> Any:
    """Return what is made for a document as a list or a string: the `default` of `json.dumps`."""
    if not isinstance(value, (Items, Text)):
        raise TypeError(f"{type(value).__name__} is not a type of JSON")
    return value.plain()


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain).encode


def encode(value: Any) -> str:
    """Return a small value as JSON.

    Raises:
        ResultError: a number in it is not finite.
    """
    try:
        return _encode(value)
    except ValueError:
        raise ResultError("a log-probability is not finite (nan or infinity): try --dtype float32") from None


class Items:
    """A JSON array whose items are made when it is written. `plain` returns it as a list.

    Args:
        make: returns the items, each of which is small.
        weight: about how many numbers or strings an item has.
        keep: keep the JSON for the next time: the array is part of several documents.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], weight: int = 1, *, keep: bool = False) -> None:
        self._make, self._size, self._keep = make, max(1, SLICE_ITEMS // weight), keep
        self._kept: list[str] | None = None

    def plain(self) -> list[Any]:
        """Return the items."""
        return list(self._make())

    def slices(self) -> Iterator[str]:
        """Yield the items as JSON, in slices whose items are separated by commas."""
        if self._kept is not None:
            yield from self._kept
            return
        made: list[str] = []
        items = iter(self._make())
        while part := list(islice(items, self._size)):
            made.append(text := encode(part)[1:-1])
            yield text
            if not self._keep:
                made.clear()
        self._kept = made if self._keep else None


class Joined(Items):
    """The items of several arrays as one."""

    def __init__(self, *parts: Items) -> None:
        self._parts = parts

    def plain(self) -> list[Any]:
        """Return the items."""
        return [item for part in self._parts for item in part.plain()]

    def slices(self) -> Iterator[str]:
        """Yield the items as JSON, in slices."""
        return chain.from_iterable(part.slices() for part in self._parts)


class Text:
    """A JSON string whose parts are made when it is written."""

    def __init__(self, *parts: Callable[[], str]) -> None:
        self._parts = parts

    def plain(self) -> str:
        """Return the string."""
        return "".join(part() for part in self._parts)

    def strings(self) -> Iterator[str]:
        """Yield the JSON."""
        yield '"'
        for part in self._parts:
            text = part()
            for at in range(0, len(text), SLICE_CHARS):
                yield encode(text[at : at + SLICE_CHARS])[1:-1]
        yield '"'


class Json:
    """A value that is JSON already."""

    def __init__(self, text: str) -> None:
        self.text = text


def json_strings(document: Any) -> Iterator[str]:
    """Yield the JSON of a document in short strings.

    Args:
        document: its dicts and tuples may be large and nested; a list has small items.

    Raises:
        ResultError: a number in it is not finite.
    """
    if isinstance(document, Text):
        yield from document.strings()
    elif isinstance(document, Json):
        yield document.text
    elif isinstance(document, str) and len(document) > SLICE_CHARS:
        yield from Text(lambda: document).strings()
    elif isinstance(document, Mapping):
        before = "{"
        for name, value in document.items():
            yield f"{before}{encode(name)}:"
            yield from json_strings(value)
            before = ","
        yield "}" if document else "{}"
    elif isinstance(document, tuple):
        before = "["
        for value in document:
            yield before
            yield from json_strings(value)
            before = ","
        yield "]" if document else "[]"
    elif isinstance(document, (list, Items)):
        items = document if isinstance(document, Items) else Items(lambda: document)
        before = "["
        for text in items.slices():
            yield before + text
            before = ","
        yield "]" if before == "," else "[]"
    else:
        yield encode(document)


def json_pieces(strings: Iterable[str]) -> Iterator[bytes]:
    """Yield strings of JSON as UTF-8, in pieces of about PIECE_BYTES. Half a surrogate pair becomes an escape."""
    parts: list[str] = []
    size = 0
    for text in strings:
        parts.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield "".join(parts).encode(errors="backslashreplace")
            parts, size = [], 0
    if parts:
        yield "".join(parts).encode(errors="backslashreplace")


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON in UTF-8. Raises as `json_strings`."""
    return b"".join(json_pieces(json_strings(document)))
