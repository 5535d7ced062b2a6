"""Rows of a dataset as lines, and records as columns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.errors import refuses

pa = pytest.importorskip("pyarrow")

from nanoinfer.ray.rows import add_records, to_lines  # noqa: E402


def fields(table: Any, number: str | None = None) -> list[Any]:
    return [json.loads(line.content or b"") for line in to_lines(table, number)]


def test_nulls_and_other_columns_are_no_fields() -> None:
    table = pa.table({"prompt": ["a", None], "prompt_token_ids": [None, [1, 2]], "title": ["x", "y"], "n": [2.0, None]})
    assert fields(table) == [{"prompt": "a", "n": 2}, {"prompt_token_ids": [1, 2]}]
    assert fields(pa.table({"prompt": ["a"], "temperature": [float("nan")], "top_p": [0.5]})) == [
        {"prompt": "a", "top_p": 0.5}
    ]


def test_messages_have_no_null_fields_and_may_be_text() -> None:
    messages = [[{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c"}]]
    assert fields(pa.table({"messages": messages})) == [{"messages": messages[0]}]
    assert fields(pa.table({"messages": [json.dumps(messages[0]), "[no JSON"]})) == [
        {"messages": messages[0]},
        {"messages": "[no JSON"},
    ]
    body = {"prompt": "a", "stop": ["b"]}
    openai = {"url": ["/v1/completions"], "method": ["POST"], "body": [json.dumps(body)], "prompt": ["other"]}
    assert fields(pa.table(openai)) == [{"url": "/v1/completions", "method": "POST", "body": body}]


def test_the_number_of_a_line_is_a_column_or_a_hash_of_its_fields() -> None:
    table = pa.table({"prompt": ["a", "b", "a"], "row": [7, 8, 9]})
    assert [line.place.number for line in to_lines(table, "row")] == [7, 8, 9]
    first, second, third = (line.place.number for line in to_lines(table, None))
    assert first == third != second
    assert [line.place.number for line in to_lines(table.slice(1), None)] == [second, third]
    refuses(lambda: to_lines(table, "rows"), "number='rows' is no column", "prompt, row")
    refuses(lambda: to_lines(table, "prompt"), "the number of a row, 'a', is not an integer")


def record(**fields: Any) -> bytes:
    return json.dumps({"line": 1, "id": None, **fields}).encode()


def test_the_columns_of_records_have_the_same_types_in_every_block() -> None:
    output = {"index": 0, "text": "x", "token_ids": [4], "finish_reason": "stop", "stop_reason": 4, "logprobs": [{}]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    good = record(outputs=[output], usage=usage, seed=2**64 - 1, error=None)
    bad = record(outputs=[], usage=None, seed=None, error="no")
    table = pa.table({"prompt": ["a"], "seed": [3], "title": ["t"]})
    made, failed = add_records(table, [good]), add_records(table, [bad])
    assert made.schema == failed.schema == add_records(table.slice(0, 0), []).schema
    (row,), (error,) = made.to_pylist(), failed.to_pylist()
    assert (row["prompt"], row["title"], row["seed"], row["usage"]) == ("a", "t", 2**64 - 1, usage)
    (found,) = row["outputs"]
    assert (found["text"], found["token_ids"], found["stop_reason"], found["logprobs"]) == ("x", [4], "4", "[{}]")
    assert (error["outputs"], error["usage"], error["error"]) == ([], None, "no")


def test_the_response_in_openai_form_is_text() -> None:
    table = pa.table({"custom_id": ["a"], "method": ["POST"], "url": ["/v1/embeddings"], "body": ["{}"]})
    response = {"status_code": 200, "body": {"data": []}}
    (row,) = add_records(table, [record(response=response, error=None)]).to_pylist()
    assert json.loads(row["response"]) == response
    assert [*row] == ["custom_id", "method", "url", "body", "response", "error"]
