"""What routes with events for each part of a message share: parts that begin, grow and end, and renamed errors.

JSON in pieces: the same bytes as from one call of the encoder, in bounded slices."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.errors import NanoinferError, QueueFull, ResultError
from nanoinfer.outputs import (
    AnswerDelta,
    CallDelta,
    ChatMessage,
    CompletionOutput,
    ContentDelta,
    Logprob,
    ReasoningDelta,
    ToolCall,
)
from nanoinfer.protocols.errors import renamed
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, FieldError
from nanoinfer.protocols.output import ChunkWriter
from nanoinfer.protocols.requests import parse
from nanoinfer.protocols.shared import Parts, Reply, parts_of
from nanoinfer.utils import json_pieces
from nanoinfer.utils.json_pieces import json_bytes, json_strings


def output(text: str = "", deltas: list[AnswerDelta] | None = None, finish_reason: str | None = None) -> Any:
    return CompletionOutput(0, text, [], finish_reason, message_deltas=deltas)


def read(*outputs: CompletionOutput) -> list[tuple[str, str, int, str]]:
    parts = Parts()
    return [(verb, part.kind, part.index, text) for o in outputs for verb, part, text in parts.read(o)]


def test_parts_begin_grow_and_end() -> None:
    found = read(
        output(deltas=[ReasoningDelta("a"), ReasoningDelta("b")]),
        output(deltas=[ContentDelta("c"), CallDelta(0, "call_1", "f", "")]),
        output(deltas=[CallDelta(0, None, None, "{"), CallDelta(0, None, None, "}"), CallDelta(1, "call_2", "g", "")]),
        output(deltas=[], finish_reason="stop"),
    )
    assert found == [
        ("begin", "reasoning", 0, ""), ("grow", "reasoning", 0, "a"), ("grow", "reasoning", 0, "b"),
        ("end", "reasoning", 0, ""), ("begin", "text", 1, ""), ("grow", "text", 1, "c"), ("end", "text", 1, ""),
        ("begin", "call", 2, ""), ("grow", "call", 2, "{"), ("grow", "call", 2, "}"), ("end", "call", 2, ""),
        ("begin", "call", 3, ""), ("end", "call", 3, ""),
    ]  # fmt: skip


def test_plain_text_is_one_part() -> None:
    expected = [("begin", "text", 0, ""), ("grow", "text", 0, "a"), ("grow", "text", 0, "b"), ("end", "text", 0, "")]
    assert read(output("a"), output(), output("b", finish_reason="length")) == expected
    assert read(output(finish_reason="stop")) == [("begin", "text", 0, ""), ("end", "text", 0, "")]


def test_chunks_of_a_message_have_as_many_top_logprobs_as_other_chunks() -> None:
    step = {5: Logprob(-1.5, 2, "a"), 6: Logprob(-0.5, 1, "b"), 7: Logprob(-2.5, 3, "c")}
    for top, expected in ((-1, "bac"), (2, "ba"), (0, "")):
        body = {"messages": [], "logprobs": True, "top_logprobs": top}
        for deltas in (None, [ReasoningDelta("a")]):
            o = CompletionOutput(0, "a", [5], None, logprobs=[step], message_deltas=deltas)  # type: ignore[arg-type]
            (content,) = json.loads(last_event(CHAT, body, o))["choices"][0]["logprobs"]["content"]
            assert "".join(entry["token"] for entry in content["top_logprobs"]) == expected


def last_event(url: str, body: dict[str, Any], o: CompletionOutput) -> bytes:
    writer = ChunkWriter(parse(url, {**body, "stream": True}, SamplingParams(), streams=True), Reply("1", "m", 0, str))
    found: Any = SimpleNamespace(prompt_token_ids=[1], num_cached_tokens=0, prompt_logprobs=None, outputs=[o])
    return writer.write([(0, found)]).split(b"data: ")[-1]


@pytest.mark.parametrize("url, prompt", [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": []})])
def test_chunks_of_plain_text_have_the_bytes_of_one_call_of_the_encoder(url: str, prompt: dict[str, Any]) -> None:
    event = last_event(url, {**prompt, "return_token_ids": True}, CompletionOutput(0, '"é\n\ud800', [5, 600], "stop"))
    assert event == whole(json.loads(event)) + b"\n\n"


def test_parts_of_whole_messages() -> None:
    call = ToolCall("call_1", "f", "{}")
    for message, expected in (
        (ChatMessage("a", "b", (call,)), [("reasoning", "b"), ("text", "a"), ("call", "{}")]),
        (ChatMessage(None, None, (call, call)), [("call", "{}"), ("call", "{}")]),
        (ChatMessage("", "b"), [("reasoning", "b")]),
        (ChatMessage(""), [("text", "")]),
    ):
        found = parts_of(CompletionOutput(0, "raw", [], "stop", message=message))
        assert [(part.index, part.kind, part.text) for part in found] == [(i, *e) for i, e in enumerate(expected)]
        assert all((part.call_id, part.name) == ("call_1", "f") for part in found if part.kind == "call")


NAMES = {"response_format.json_schema": "text.format.schema", "response_format": "text.format", "messages": "input",
         "max_tokens": "max_output_tokens"}  # fmt: skip


@pytest.mark.parametrize(
    "error, message, param",
    [
        (NanoinferError("max_tokens=-1 is bad"), "max_output_tokens=-1 is bad", "max_output_tokens"),
        (NanoinferError("message 2 of 3: x"), "input: message 2 of 3: x", "input"),
        (FieldError("response_format='x' is bad", "response_format"), "text.format='x' is bad", "text.format"),
        (ResultError("response_format.json_schema: bad"), "text.format.schema: bad", "text.format.schema"),
        (NanoinferError("temperature=9 is bad"), "temperature=9 is bad", "temperature"),
    ],
)
def test_errors_get_the_names_of_the_request(error: NanoinferError, message: str, param: str) -> None:
    found = renamed(error, NAMES)
    assert isinstance(found, FieldError)
    assert (str(found), found.param, found.status) == (message, param, 400)


def test_other_errors_are_kept() -> None:
    for error in (QueueFull("max_tokens: busy"), ResultError("logits are not finite"), NanoinferError("closed")):
        assert renamed(error, NAMES) is error


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
