"""Write JSON in pieces: a large document then delays no other thread.

Python's encoder holds the interpreter's lock until it returns, which takes 100 ms for 10 MB. Here, one call of it
encodes a slice of a list.

    json_strings({"text": "ab", "ids": [0, 1, 2]})  ->  '{"text":' '"ab"' ',"ids":' '[' '0,1,2' ']' '}'
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nanoinfer.errors import ResultError

PIECE_BYTES = 1 << 16
SLICE_ITEMS = 32  # that one call encodes: numbers, strings, or the log-probabilities of a token

encode_text = json.encoder.encode_basestring  # of C: the text of each token of a stream
_any = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _encode(value: Any) -> str:
    return encode_text(value) if type(value) is str else _any(value)


def encode(value: Any) -> str:
    """Return a small value as JSON.

    Raises:
        ResultError: a number in it is not finite.
    """
    try:
        return _encode(value)
    except ValueError:
        raise ResultError("a log-probability is not finite (nan or infinity): try --dtype float32") from None


def json_strings(document: Any) -> Iterator[str]:
    """Yield the JSON of a document in short strings.

    Args:
        document: its dicts and tuples may be large and nested; a list has small items.

    Raises:
        ResultError: a number in it is not finite.
    """
    if isinstance(document, Mapping):
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
    elif isinstance(document, list):
        yield "["
        for at in range(0, len(document), SLICE_ITEMS):
            yield ("," if at else "") + encode(document[at : at + SLICE_ITEMS])[1:-1]
        yield "]"
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
