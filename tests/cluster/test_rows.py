"""Rows of a dataset as lines, and records as columns."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from helpers.models import refuses

pa = pytest.importorskip("pyarrow")

from nanoinfer.batch.records import read_form  # noqa: E402
from nanoinfer.ray.generator import add_records, to_lines  # noqa: E402


def fields(table: Any, number: str | None = None) -> list[Any]:
    return [json.loads(line.content or b"") for line in to_lines(table, number)]


def test_nulls_and_other_columns_are_no_fields() -> None:
    table = pa.table({"prompt": ["a", None], "prompt_token_ids": [None, [1, 2]], "title": ["x", "y"], "n": [2.0, None]})
    assert fields(table) == [{"prompt": "a", "n": 2}, {"prompt_token_ids": [1, 2]}]
    assert fields(pa.table({"prompt": ["a"], "temperature": [float("nan")], "top_p": [0.5]})) == [
        {"prompt": "a", "top_p": 0.5}
    ]


def test_bytes_are_text() -> None:
    messages = b'[{"role": "user", "content": "a"}]'
    table = pa.table({"prompt": [b"To be", None], "stop": [[b"\xc3\xa9"], None], "messages": [None, messages]})
    assert fields(table) == [{"prompt": "To be", "stop": ["\xe9"]}, {"messages": json.loads(messages)}]


@pytest.mark.slow  # imports Ray
def test_tensors_of_ray_are_lists() -> None:
    """A batch of NumPy arrays becomes such a column."""
    block = pytest.importorskip("ray.data.block").BlockAccessor.batch_to_block(
        {"prompt_token_ids": np.eye(2, dtype=int)}
    )
    assert fields(block) == [{"prompt_token_ids": [1, 0]}, {"prompt_token_ids": [0, 1]}]


def test_bytes_that_are_no_text_are_the_error_of_their_line() -> None:
    lines = to_lines(pa.table({"prompt": [b"\xff", b"a"], "messages": [None, b'["\\ud800"]']}), None)
    errors = [read_form(line, "m", lambda ids: "", False)[1] for line in lines]
    assert [str(e).partition(":")[0] for e in errors] == [
        "the line is not UTF-8 (byte 12",
        "the line is not UTF-8 (byte 30",
    ]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("prompt", pa.array([Decimal("1.5")])),
        ("stop", pa.array([[Decimal(1)]])),
        ("chat_template_kwargs", pa.array([{"date": datetime(2026, 1, 1)}])),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else value,
)
def test_a_column_that_a_line_cannot_contain_is_refused(name: str, column: Any) -> None:
    """Another column may have any type."""
    table = pa.table({name: column, "prompt" if name != "prompt" else "title": ["a"]})
    refuses(lambda: to_lines(table, None), "a line cannot contain all values of ", name, "is not JSON serializable")
    assert fields(table.rename_columns(["other", *table.column_names[1:]]))


def test_two_columns_of_one_name() -> None:
    table = pa.table([pa.array(["a"])] * 4, ["prompt", "title", "title", "outputs"])
    assert fields(table) == [{"prompt": "a"}]
    twice = table.rename_columns(["prompt", "title", "title", "prompt"])
    refuses(lambda: to_lines(twice, None), "2 columns are named 'prompt': rename all but one of them")
    refuses(lambda: to_lines(table, "title"), "2 columns are named 'title'")
    replaced = add_records(
        table.rename_columns(["prompt", "title", "error", "error"]), [record(outputs=[], error="no")]
    )
    assert replaced.column_names[:3] == ["prompt", "title", "outputs"]
    assert replaced["error"].to_pylist() == ["no"]


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
