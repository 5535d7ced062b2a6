"""JSON in pieces: the same bytes as from one call of the encoder, made when they are written, in bounded slices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import ResultError
from nanoinfer.utils import json_pieces
from nanoinfer.utils.json_pieces import Items, Joined, Text, json_bytes, json_strings, plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(SCALARS) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def whole(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=plain).encode(
        errors="backslashreplace"
    )


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_the_bytes_are_those_of_the_encoder(document: Any) -> None:
    assert json_bytes(document) == whole(document)


LARGE: dict[str, Any] = {
    "numbers": list(range(5000)),
    "strings": {"a": ["é\n\ud800" * 9] * 3000},
    "a long string": 'é"\\\n\ud83d\ude00\ud800' * 10_000,
    "made": {"a": Items(lambda: range(5000)), "b": Text(lambda: "é\n" * 20_000, lambda: "", lambda: "b")},
    "joined": Joined(Items(lambda: range(3)), Items(lambda: []), Items(lambda: iter(range(3000)), 100)),
    "nothing": ({}, [], (), "", Text(), Items(lambda: []), Joined()),
    "large items": tuple({"index": i, "ids": list(range(2000))} for i in range(5)),
}


@pytest.mark.parametrize("document", LARGE.values(), ids=LARGE)
def test_large_documents_are_encoded_in_slices(document: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, calls = whole(document), []
    encode = json_pieces._encode

    def record(value: Any) -> str:
        calls.append(len(text := encode(value)))
        return text

    monkeypatch.setattr(json_pieces, "_encode", record)
    made = list(json_pieces.json_pieces(json_strings(document)))
    assert b"".join(made) == expected
    assert max(calls, default=0) <= 150_000
    assert max(map(len, made)) <= json_pieces.PIECE_BYTES + 200_000
    assert len(made) >= len(expected) // (json_pieces.PIECE_BYTES + 200_000)


def test_items_are_made_when_they_are_written_and_kept_if_they_are_written_again() -> None:
    made: list[str] = []

    def make(name: str) -> Any:
        for i in range(3 * json_pieces.SLICE_ITEMS):
            made.append(name)
            yield i

    once, kept = Items(lambda: make("once")), Items(lambda: make("kept"), keep=True)
    written = json_strings((once, once, kept, kept))
    assert made == []
    for _ in range(3):
        next(written)
    assert len(made) == 2 * json_pieces.SLICE_ITEMS
    assert "".join(written).endswith(f"{3 * json_pieces.SLICE_ITEMS - 1}]]")
    assert made.count("kept") == 3 * json_pieces.SLICE_ITEMS
    assert made.count("once") == 6 * json_pieces.SLICE_ITEMS


@pytest.mark.parametrize("value", [float("nan"), [1.0, float("inf")], {"a": Items(lambda: [float("-inf")])}])
def test_numbers_that_json_does_not_have_are_an_error(value: Any) -> None:
    with pytest.raises(ResultError, match="a log-probability is not finite"):
        json_bytes(value)
