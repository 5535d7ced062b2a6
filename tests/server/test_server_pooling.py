"""/v1/embeddings answers what the library returns, and refuses what it cannot do."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `server` is not installed")

from starlette.types import ASGIApp

from helpers.asgi import call, serve
from helpers.async_llm import freed
from helpers.models import TINY
from nanoinfer import LLM, AsyncLLM, NanoinferError, PoolingParams
from nanoinfer.protocols.fields import EMBEDDINGS, MAX_INPUTS, TABLES
from nanoinfer.protocols.pooling import parse_pooling
from nanoinfer.server import limits

TEXTS = ["To be", "or not", "a" * 20]


def ask(llm: LLM, *requests: tuple[str, Any], **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return the status and the body of each response."""

    async def main(app: ASGIApp, model: AsyncLLM) -> list[tuple[int, dict[str, Any]]]:
        found = [await call(app, "POST", url, body=json.dumps(body).encode()) for url, body in requests]
        await freed(model)
        return [(f.status, json.loads(f.content)) for f in found]

    return serve(llm, main, served_model_name=("m",), **options)  # type: ignore[no-any-return]


def one(llm: LLM, url: str, body: Any) -> dict[str, Any]:
    ((status, found),) = ask(llm, (url, body))
    assert status == 200, found
    return found


def test_embeddings(llm: LLM) -> None:
    outputs = llm.embed(TEXTS)
    found = one(llm, EMBEDDINGS, {"model": "m", "input": TEXTS, "user": "x"})
    assert (found["object"], found["model"], found["id"][:5]) == ("list", "m", "embd-")
    assert [(d["index"], d["object"]) for d in found["data"]] == [(i, "embedding") for i in range(3)]
    assert [d["embedding"] for d in found["data"]] == [o.outputs.embedding for o in outputs]
    num_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    coded = one(llm, EMBEDDINGS, {"input": TEXTS, "encoding_format": "base64"})["data"]
    for item, output in zip(coded, outputs, strict=True):
        assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() == output.outputs.embedding


@pytest.mark.parametrize(("given", "prompts"), [
    ("To be", ["To be"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]]), (["a", [5]], ["a", [5]]),
])  # fmt: skip
def test_forms_of_input(llm: LLM, given: Any, prompts: list[Any]) -> None:
    body = {"input": given, "dimensions": 4, "use_activation": False, "truncate_prompt_tokens": 4.0}
    params = PoolingParams(dimensions=4, use_activation=False, truncate_prompt_tokens=4)
    expected = [o.outputs.embedding for o in llm.embed(prompts, params)]
    assert [d["embedding"] for d in one(llm, EMBEDDINGS, body)["data"]] == expected


BAD: list[tuple[str, Any, str, str | None]] = [
    (EMBEDDINGS, {}, "input is missing", "input"),
    (EMBEDDINGS, {"input": []}, "input has 0 items", "input"),
    (EMBEDDINGS, {"input": ["a"] * (MAX_INPUTS + 1)}, f"input has {MAX_INPUTS + 1} items", "input"),
    (EMBEDDINGS, {"input": ""}, "input='' is neither", "input"),
    (EMBEDDINGS, {"input": ["a", 5]}, "input=5 is neither", "input"),
    (EMBEDDINGS, {"input": [[]]}, "neither a text nor a list", "input"),
    (EMBEDDINGS, {"input": [[True]]}, "token id True", None),
    (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format='int8'", "encoding_format"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions=0", "dimensions"),
    (EMBEDDINGS, {"input": "a", "dimensions": 17}, "dimensions=17 is more than the model's 16", "dimensions"),
    (EMBEDDINGS, {"input": "a", "temperature": 0}, "temperature", "temperature"),
    (EMBEDDINGS, {"input": "a", "cache_salt": ""}, "cache_salt=''", "cache_salt"),
    (EMBEDDINGS, {"input": ["a", "b" * 40]}, "prompt 2 of 2: the input has 40 tokens", "input"),
    (EMBEDDINGS, {"input": [[5] * 33]}, "the input has 33 tokens", None),
]  # fmt: skip


def test_bad_requests(llm: LLM) -> None:
    found = ask(llm, *((url, body) for url, body, _, _ in BAD), (EMBEDDINGS, {"input": "a", "model": "other"}))
    for (_, _, message, param), (status, answer) in zip(BAD, found, strict=False):
        assert status == 400
        assert message in answer["error"]["message"]
        assert param is None or answer["error"]["param"] == param
        assert "\n" not in answer["error"]["message"]
    assert (found[-1][0], found[-1][1]["error"]["code"]) == (404, "model_not_found")


def test_what_all_embeddings_hold_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_EMBEDDING_VALUES", 2 * (TINY.n_embd + limits.INPUT_VALUES))
    three, two, after = ask(llm, *((EMBEDDINGS, {"input": TEXTS[:count]}) for count in (3, 2, 1)))
    assert (three[0], three[1]["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (two[0], after[0]) == (200, 200)  # nothing is held any more


def test_metrics_and_keys(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> str:
        for body in ({"input": TEXTS}, {"input": "b" * 50}):
            await call(app, "POST", EMBEDDINGS, body=json.dumps(body).encode())
        return (await call(app, "GET", "/metrics")).content.decode()

    found = serve(llm, main, served_model_name=("m",))
    lines = dict(line.rsplit(" ", 1) for line in found.splitlines() if not line.startswith("#"))
    label = '{model_name="m"}'
    assert lines[f"nanoinfer:request_prompt_tokens_count{label}"] == "3.0"
    assert lines[f"nanoinfer:e2e_request_latency_seconds_count{label}"] == "3.0"
    assert lines[f"nanoinfer:time_to_first_token_seconds_count{label}"] == "0.0"
    assert lines['nanoinfer:request_success_total{finished_reason="stop",model_name="m"}'] == "3.0"


async def test_a_client_that_leaves_ends_its_requests(app: ASGIApp, model: AsyncLLM) -> None:
    body = json.dumps({"input": ["a" * 30] * 2000}).encode()
    task = asyncio.ensure_future(call(app, "POST", EMBEDDINGS, body=body))
    while not model.num_unfinished_requests:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await freed(model)


def test_large_answers_are_written_in_pieces(llm: LLM) -> None:
    texts = [f"{chr(97 + i % 26)}" * (1 + i % 30) for i in range(600)]
    expected = [o.outputs.embedding for o in llm.embed(texts)]
    assert [d["embedding"] for d in one(llm, EMBEDDINGS, {"input": texts})["data"]] == expected


@pytest.mark.parametrize("name", TABLES[EMBEDDINGS])
def test_every_field_is_read(name: str) -> None:
    """A value of a wrong type is an error, or the field takes any value."""
    body = {"input": "a", name: {"no": "such value"}}
    if name == "user":
        assert len(parse_pooling(body).inputs) == 1
    else:
        with pytest.raises(NanoinferError, match=name):
            parse_pooling(body)
