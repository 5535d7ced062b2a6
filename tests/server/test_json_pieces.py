"""JSON in pieces: the same bytes as from one call of the encoder, in bounded slices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import ResultError
from nanoinfer.utils import json_pieces
from nanoinfer.utils.json_pieces import json_bytes, json_strings

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(SCALARS) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def whole(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


@settings(max_examples=50, deadline=None)
@given(DOCUMENTS)
def test_the_bytes_are_those_of_the_encoder(document: Any) -> None:
    assert json_bytes(document) == whole(document)


LARGE: dict[str, Any] = {
    "numbers": list(range(5000)),
    "strings": {"a": ["é\n\ud800" * 9] * 3000},
    "a long string": 'é"\\\n\ud83d\ude00\ud800' * 10_000,
    "nothing": ({}, [], (), ""),
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


@pytest.mark.parametrize("value", [float("nan"), [1.0, float("inf")], {"a": [float("-inf")]}])
def test_numbers_that_json_does_not_have_are_an_error(value: Any) -> None:
    with pytest.raises(ResultError, match="a log-probability is not finite"):
        json_bytes(value)
