"""Answers that take long to read: by a response template with patterns, or long ones.

They are read in a thread, so that the event loop goes on. Each search of the template waits for a gate here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.async_llm import freed
from helpers.chat import HI, chat_folder
from helpers.response_templates import TEMPLATES
from helpers.tools import tools_folder
from nanoinfer import LLM, AsyncLLM, AsyncOutputStream, SamplingParams
from nanoinfer.entrypoints import chat
from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.answers.response_template import ResponseTemplate
from nanoinfer.outputs import ChatMessage, RequestOutput

TICKS = 10
GIVE_UP_SEC = 20.0  # a gate that is not opened opens, so that the test ends
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = chat_folder(tmp_path_factory.mktemp("patterns") / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": TEMPLATES["tags"]}))
    return LLM(str(folder), engine="native", max_num_seqs=4)


class Gate:
    """Holds the threads that search by the template."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.fails: Callable[[Any], Exception | None] = lambda arguments: None

        def gated(search: Callable[..., Any], template: ResponseTemplate, *arguments: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            self.entered.set()
            assert self.open.wait(GIVE_UP_SEC), "the event loop has waited"
            if (error := self.fails(arguments)) is not None:
                raise error
            return search(template, *arguments)

        find = ResponseTemplate.find
        monkeypatch.setattr(ResponseTemplate, "find", lambda *arguments: gated(find, *arguments))


async def outputs(stream: AsyncOutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


def text_of(found: list[RequestOutput]) -> str:
    return "".join(d.text for output in found for d in output.outputs[0].message_deltas or [])  # type: ignore[union-attr]


async def entered(gate: Gate) -> None:
    """Wait until a thread searches by the template, and let the loop run while it waits."""
    while not gate.entered.is_set():
        await asyncio.sleep(0.001)
    for _ in range(TICKS):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
async def test_the_event_loop_goes_on_while_a_template_reads(
    llm: LLM, model: AsyncLLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.chat(HI, PARAMS)[0].outputs[0].message
    gate = Gate(monkeypatch)
    task = asyncio.ensure_future(outputs(model.chat(HI, PARAMS, output_kind=kind)))
    await entered(gate)
    assert not task.done()
    gate.open.set()
    found = await task
    assert isinstance(expected, ChatMessage)
    assert found[-1].outputs[0].message == expected
    assert kind != "delta" or text_of(found) == expected.content
    assert set(gate.threads) == {"nanoinfer-answers"}


async def test_a_task_is_cancelled_while_a_template_reads(
    llm: LLM, model: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.chat(HI, PARAMS)[0].outputs[0].message
    gate = Gate(monkeypatch)
    stream = model.chat(HI, SamplingParams(max_tokens=200, ignore_eos=True), output_kind="delta")
    task = asyncio.ensure_future(anext(stream))
    await entered(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.finished
    await freed(model)
    gate.open.set()
    assert (await outputs(model.chat(HI, PARAMS, output_kind="delta")))[-1].outputs[0].message == expected


async def test_an_error_of_reading_is_that_of_its_request(
    llm: LLM, model: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.chat(HI, PARAMS)[0].outputs[0].message
    gate = Gate(monkeypatch)
    gate.open.set()
    gate.fails = lambda arguments: OSError("broken") if "other" in str(arguments) else None
    other = [{"role": "user", "content": "other"}]
    asked = [outputs(model.chat(messages, PARAMS, output_kind="delta")) for messages in (HI, other, HI)]
    results: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
    first, second, third = results
    assert (type(second), str(second)) == (OSError, "broken")
    assert first[-1].outputs[0].message == third[-1].outputs[0].message == expected


async def test_an_answer_that_is_not_read_before_the_end_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    model = AsyncLLM.from_llm(llm)
    stream = model.chat(HI, PARAMS, output_kind="final_only")
    arrived = asyncio.Event()
    stream.begin(arrived.set)
    await arrived.wait()
    model.shutdown()
    with pytest.raises(NanoinferError, match="the AsyncLLM is closed"):
        await anext(stream)
    assert gate.threads == []


@pytest.mark.parametrize("kind", ["delta", "final_only"])
@pytest.mark.parametrize("quick_size", [chat.QUICK_SIZE, 30])
async def test_short_texts_are_read_in_the_event_loop(
    kind: str, quick_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tools_folder(tmp_path / "tools")), engine="native", max_num_seqs=4)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, n=2, ignore_eos=True)
    expected = [o.message for o in llm.chat(HI, params, thinking_token_budget=8)[0].outputs]
    monkeypatch.setattr(chat, "QUICK_SIZE", quick_size)
    threads: list[tuple[str, bool]] = []
    read = chat.AnswerReader.read

    def noted(reader: chat.AnswerReader, output: RequestOutput) -> RequestOutput:
        threads.append((threading.current_thread().name, reader.is_quick(output)))
        return read(reader, output)

    monkeypatch.setattr(chat.AnswerReader, "read", noted)
    async with AsyncLLM.from_llm(llm) as model:
        found = await outputs(model.chat(HI, params, output_kind=kind, thinking_token_budget=8))
    last = {o.index: o.message for output in found for o in output.outputs if o.message is not None}
    assert [last[0], last[1]] == expected
    assert {*threads} <= {("MainThread", True), ("nanoinfer-answers", False)}
    assert threads[-1][1] == (quick_size != 30)
