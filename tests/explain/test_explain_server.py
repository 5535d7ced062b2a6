"""The server's route that generates a request again and records its steps, beside the requests of others."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install '.[server]'")

from starlette.types import ASGIApp

from helpers.asgi import Response, call, post, serve, until
from helpers.async_llm import freed
from helpers.chat import HI, chat_folder
from nanoinfer import LLM, AsyncLLM, SamplingParams
from nanoinfer.core.step import Observer
from nanoinfer.explain import record
from nanoinfer.server.routes import CHAT

PATH = "/page/explain"
BODY: dict[str, Any] = {"prompt": "O Romeo, what is", "max_tokens": 12, "n": 2, "temperature": 0.8, "seed": 3}
SHOWN = {"stream": True, "logprobs": 5, "return_token_ids": True, "stream_options": {"include_usage": True}}
OTHERS = [{"prompt": f"{i} O Romeo, what", "max_tokens": 40, "seed": i, "return_token_ids": True} for i in range(5)]


@pytest.fixture(scope="module", params=["native", "paged"])
def llm(request: pytest.FixtureRequest) -> LLM:
    """A model with room for three sequences: other requests wait, and are preempted."""
    options = {"draft": "prompt-lookup"} if request.param == "native" else {}
    return LLM("shakespeare", engine=request.param, dtype="float32", device="cpu", max_num_seqs=3, **options)


def outputs(response: Response) -> list[list[int]]:
    assert response.status == 200, response.content
    return [choice["token_ids"] for choice in json.loads(response.content)["choices"]]


def recorded(response: Response) -> list[list[int]]:
    assert response.status == 200, response.content
    found = json.loads(response.content)
    rows = [row for step in found["steps"] for row in step["rows"]]
    return [[t for row in rows if row["sequence"] == i for t in row["tokens"]] for i in range(len(found["sequences"]))]


def check_detached(llm: LLM) -> None:
    assert type(llm.core.observer) is Observer
    assert {"extend", "fork", "truncate", "close"}.isdisjoint(vars(llm.engine))


def test_a_request_is_recorded_and_others_are_neither_changed_nor_shown(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        expected = [outputs(await post(app, body)) for body in [BODY | {"return_token_ids": True}, *OTHERS]]
        for _ in range(2):  # the second time, the prefix cache has the first one
            tasks = [asyncio.create_task(post(app, body)) for body in OTHERS]
            response = await post(app, BODY | SHOWN, PATH)
            found = json.loads(response.content)
            assert recorded(response) == expected[0]
            assert [outputs(await task) for task in tasks] == expected[1:]
            assert found["prompts"] == [llm.tokenize(BODY["prompt"])]
            assert found["sequences"] == [[0, 0], [0, 1]]
            first = found["steps"][0]
            assert [row["num_new"] for row in first["rows"]] == [len(found["prompts"][0]), 0]
            shown = {name for step in found["steps"] for name in step["tables"] if not name.startswith("kept")}
            assert shown == {"0", "1"}
            assert {block for step in found["steps"] for table in step["tables"].values() for block in table} <= {
                *range(8)
            }
            await until(lambda: type(llm.core.observer) is Observer)
        await freed(model)

    serve(llm, main)
    check_detached(llm)


@pytest.mark.parametrize("fault", ["steps", "values", "sampled"])
def test_a_recording_that_fails_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    message = "lower max_tokens or n"
    if fault == "sampled":
        message = "recording failed: ZeroDivisionError"
        monkeypatch.setattr(record, "_candidates", lambda *row: 1 // 0)
    else:
        monkeypatch.setattr(record, f"MAX_{fault.upper()}", 2)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        (expected,) = outputs(await post(app, OTHERS[0]))
        other = asyncio.create_task(post(app, OTHERS[0]))
        response = await post(app, BODY | {"max_tokens": 200}, PATH)
        assert response.status == 400
        assert message in response.error["message"]
        assert outputs(await other) == [expected]
        await freed(model)

    serve(llm, main)
    check_detached(llm)


def test_one_at_a_time_and_a_client_that_leaves_ends_it(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        gone = asyncio.Event()
        long = BODY | {"max_tokens": 1000, "overflow": "slide", "ignore_eos": True}
        first = asyncio.create_task(post(app, long, PATH, disconnect=gone))
        await until(lambda: bool(llm.core.scheduler.running))
        second = await post(app, BODY, PATH)
        assert (second.status, second.headers["retry-after"]) == (429, "1")
        assert "1 recording" in second.error["message"]
        with pytest.raises(ValueError, match="another generation is recorded"):
            await asyncio.to_thread(record.record, llm, ["a"], SamplingParams(max_tokens=1))
        gone.set()
        await first
        await freed(model)
        assert (await post(app, BODY, PATH)).status == 200

    serve(llm, main)
    check_detached(llm)


def test_keys_origins_and_bodies(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        key = {"authorization": "Bearer a"}
        page = await call(app, "GET", "/page/explain.html")
        assert (page.status, page.content.count(b'id="recording"></script>')) == (200, 1)
        assert (await post(app, BODY, PATH)).status == 401
        assert (await post(app, BODY, PATH, headers={**key, "origin": "http://other.example"})).status == 403
        for body, param in (
            ({**BODY, "prompt": ["a", "b"]}, "prompt"), ({**BODY, "n": 4}, "n"), ({**BODY, "model": "x"}, "model"),
            ({**BODY, "temperature": -1}, "temperature"), ({**BODY, "unknown": 1}, "unknown"), ({}, "prompt"),
        ):  # fmt: skip
            response = await post(app, body, PATH, headers=key)
            assert (response.status in (400, 404), response.error["param"]) == (True, param)
        assert (await post(app, BODY, PATH, headers=key)).status == 200

    serve(llm, main, api_key=("a",))
    check_detached(llm)


def test_a_chat(tmp_path: Any) -> None:
    llm = LLM(str(chat_folder(tmp_path / "tiny")), engine="native")
    body = {"messages": HI, "max_tokens": 5, "temperature": 0, "ignore_eos": True}

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        answer = outputs(await post(app, body | {"return_token_ids": True}, CHAT))
        response = await post(app, body | SHOWN | {"logprobs": True, "top_logprobs": 5}, PATH)
        assert recorded(response) == answer
        assert json.loads(response.content)["prompts"] == [llm.apply_chat_template(HI)]

    serve(llm, main)


def test_steps_are_not_overlapped_while_they_are_recorded() -> None:
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        check_overlap()


def check_overlap() -> None:
    from helpers.models import TINY, make_model
    from helpers.overlap import make_core

    core = make_core(make_model(TINY), recorded=False)
    model = SimpleNamespace(quantization=None, dtype="float32", block_formats={}, vocab_size=TINY.vocab_size)
    fake: Any = SimpleNamespace(core=core, config=TINY, model=model, engine=core.engine, tokenizer=None)
    params = SamplingParams(max_tokens=20, temperature=0)
    first, second = (core.make(None, [1, 2, 3], params, seed=0, salt=salt) for salt in (None, "a"))
    alone = core.make(None, [1, 2, 3], params, seed=0)
    core.submit([alone])
    while not alone.finished:
        core.step()
    core.submit([first])
    for _ in range(4):
        core.step()
    assert core._in_flight is not None
    recorder = record.Recorder(fake, salt="a")
    recorder.attach()
    core.submit([second])
    while not second.finished:
        core.step()
        assert core._in_flight is None
    recorder.detach()
    assert first.sequences[0].token_ids == second.sequences[0].token_ids == alone.sequences[0].token_ids
    assert [t for step in recorder._steps for row in step.rows for t in row.tokens] == alone.sequences[0].token_ids[3:]
