"""Long texts: refused before they are tokenized if they cannot fit, else tokenized apart from others, one at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.async_llm import run, running
from helpers.batch import run_on
from helpers.chat import chat_folder
from helpers.models import make_folder, refuses
from nanoinfer import LLM, AsyncLLM, NanoinferError, SamplingParams, StructuredOutputsParams
from nanoinfer.entrypoints.async_llm import LONG_TEXT
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.utils import processes

LONG = "To be, or not to be: " * (LONG_TEXT // 10)
SLIDE = SamplingParams(max_tokens=4, temperature=0, overflow="slide")
SHORT = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(str(make_folder(tmp_path)), engine="native", max_num_seqs=4)


@pytest.fixture
def chat(tmp_path: Path) -> LLM:
    return LLM(str(chat_folder(tmp_path)), engine="native", max_num_seqs=4)


# Refused before they are tokenized -----------------------------------------------------------------------


@pytest.fixture
def no_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Any, text: str) -> list[int]:
        raise AssertionError("a text was tokenized")

    for kind in (tokenizers.CharTokenizer, tokenizers.ByteLevelTokenizer, tokenizers.GenericTokenizer):
        monkeypatch.setattr(kind, "encode", encode)


TOO_LONG = ("the prompt has at least ", " tokens, the maximum context length is 32 tokens: shorten it")


@pytest.mark.usefixtures("no_tokenization")
def test_a_prompt_that_cannot_fit_is_not_tokenized(llm: LLM) -> None:
    text = LONG[:2100]
    for prompt in (text, [text], {"prompt": text}):
        refuses(lambda prompt=prompt: llm.generate(prompt, SHORT), *TOO_LONG)  # type: ignore[misc]
    refuses(lambda: llm.generate([text, "a"], SHORT), "prompt 1 of 2: the prompt has at least 2100 tokens")
    refuses(lambda: llm.generate([text, text], [SHORT, SHORT]), "prompt 1 of 2: ")
    refuses(lambda: llm.stream(text, SHORT), *TOO_LONG)
    refuses(lambda: llm.stream_outputs(text, SHORT), *TOO_LONG)


@pytest.mark.usefixtures("no_tokenization")
def test_a_conversation_that_cannot_fit_is_not_tokenized(chat: LLM) -> None:
    message = {"role": "user", "content": LONG}
    refuses(lambda: chat.chat([message], SHORT), "the prompt has at least ", "the maximum context length is")
    refuses(lambda: chat.chat([[message], [message]], SHORT), "conversation 1 of 2: the prompt has at least")
    refuses(lambda: chat.chat([[message]] * 2, [SHORT] * 3), "2 prompts, but 3 SamplingParams")


@pytest.mark.usefixtures("no_tokenization")
def test_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("shakespeare", engine="native", max_num_seqs=1)
    refuses(lambda: llm.generate("é" * 20_000, SHORT), "the prompt has at least ", "the maximum context length is 512")


def test_a_short_text_is_counted(llm: LLM) -> None:
    refuses(lambda: llm.generate("a" * 33, SHORT), "the prompt has 33 tokens, the maximum context length is 32")


def test_a_text_without_a_bound_is_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers.CharTokenizer, "least_tokens", lambda self, text: 0)
    refuses(lambda: llm.generate(LONG, SHORT), f"the prompt has {len(LONG)} tokens, the maximum context length is 32")


async def test_a_prompt_that_slides_may_have_any_length(llm: LLM) -> None:
    ids = llm.tokenize(LONG)
    (expected,) = llm.generate([ids], SLIDE)
    (found,) = llm.generate(LONG, SLIDE)
    assert found.outputs == expected.outputs
    assert (found.prompt, found.prompt_token_ids) == (LONG, ids)
    async with AsyncLLM.from_llm(llm) as model:
        outputs = [output async for output in model.generate(LONG, SLIDE, output_kind="final_only")]
        assert outputs[0].outputs == expected.outputs
        assert (outputs[0].prompt, outputs[0].prompt_token_ids) == (LONG, ids)


def test_token_ids_that_cannot_fit_are_copied_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.core import core

    made: list[int] = []
    sequence = core.Sequence

    def record(*args: Any) -> Any:
        made.append(1)
        return sequence(*args)

    monkeypatch.setattr(core, "Sequence", record)
    refuses(lambda: llm.generate([5] * 1000, SamplingParams(n=4)), "the prompt has 1000 tokens")
    assert len(made) == 1


# Tokenized one at a time ---------------------------------------------------------------------------------


class Encoding:
    """A tokenizer that waits within each long text until `go` is set."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), 0
        self.running = self.most = 0
        assert llm.tokenizer is not None
        encode = llm.tokenizer.encode

        def wait(text: str) -> list[int]:
            if len(text) <= LONG_TEXT:
                return encode(text)
            self.begun += 1
            self.running += 1
            self.most = max(self.most, self.running)
            assert self.go.wait(30)
            self.running -= 1
            return encode(text)

        monkeypatch.setattr(llm.tokenizer, "encode", wait)


@pytest.fixture
def encoding(chat: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    made = Encoding(chat, monkeypatch)
    yield made
    made.go.set()


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError


async def whole(stream: Any) -> Any:
    outputs = [output async for output in stream]
    return outputs[-1]


@pytest.fixture
def model(chat: LLM) -> Iterator[AsyncLLM]:
    with running(chat) as model:
        yield model


async def test_short_requests_do_not_wait_for_long_texts(chat: LLM, encoding: Encoding, model: AsyncLLM) -> None:
    message = {"role": "user", "content": LONG}
    few = [{"role": "user", "content": "Go"}]
    calls: list[Any] = [
        *(whole(model.generate(LONG, SLIDE)) for _ in range(2)),
        *(whole(model.chat([message], SLIDE)) for _ in range(2)),
        *(model.tokenize(LONG) for _ in range(2)),
        *(model.tokenize({"prompt": LONG}) for _ in range(2)),
        *(model.apply_chat_template([message]) for _ in range(2)),
    ]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await until(lambda: encoding.begun == 1)
    await whole(model.generate("To be", SHORT))
    await whole(model.chat(few, SHORT))
    await whole(model.generate("To be", SamplingParams(max_tokens=2, prompt_logprobs=1)))
    assert await model.decode(await model.tokenize("To be")) == "To be"
    assert await model.apply_chat_template(few)
    with pytest.raises(NanoinferError, match="the prompt has at least"):
        await whole(model.generate(LONG, SHORT))
    assert encoding.begun == 1
    encoding.go.set()
    await asyncio.gather(*tasks)
    assert (encoding.begun, encoding.most) == (len(calls), 1)


async def test_a_grammar_does_not_wait_for_long_texts(chat: LLM, encoding: Encoding, model: AsyncLLM) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    choice = StructuredOutputsParams(choice=("a",))
    long = SamplingParams(max_tokens=2, overflow="slide", structured_outputs=choice)
    tasks = [asyncio.ensure_future(whole(model.generate(LONG, long))) for _ in range(3)]
    await until(lambda: encoding.begun == 1)
    output = await whole(model.generate("Go", SamplingParams(structured_outputs=choice)))
    assert output.outputs[0].text == "a"
    encoding.go.set()
    assert [task.outputs[0].text for task in await asyncio.gather(*tasks)] == ["a"] * 3
    assert encoding.most == 1


async def test_the_text_of_a_client_that_has_left_is_not_tokenized(
    chat: LLM, encoding: Encoding, model: AsyncLLM
) -> None:
    message = {"role": "user", "content": LONG}
    first = asyncio.ensure_future(whole(model.generate(LONG, SLIDE)))
    await until(lambda: encoding.begun == 1)
    calls = [whole(model.generate(LONG, SLIDE)), whole(model.chat([message], SLIDE)), model.tokenize(LONG),
             model.apply_chat_template([message])]  # fmt: skip
    tasks = [asyncio.ensure_future(call) for call in calls]
    for _ in range(50):
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    encoding.go.set()
    await first
    await whole(model.generate(LONG, SLIDE))  # it comes after those that have left
    assert encoding.begun == 2
    assert model.num_unfinished_requests == 0


def test_a_check_of_the_number_of_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after tokenization, before a request is made, in another thread than the event loop."""
    made: list[object] = []
    make = llm.core.make
    monkeypatch.setattr(llm.core, "make", lambda *given: made.append(given) or make(*given))
    threads: list[int] = []

    def check(num_tokens: int) -> None:
        threads.append(threading.get_ident())
        if num_tokens > 5:
            raise NanoinferError(f"{num_tokens} are too many")

    async def main(model: AsyncLLM) -> None:
        await whole(model.generate("To be", SHORT, check=check))
        assert len(made) == 1
        for prompt in ("To be,", [1, 2, 3, 4, 5, 6]):
            with pytest.raises(NanoinferError, match="6 are too many"):
                await whole(model.generate(prompt, SamplingParams(prompt_logprobs=1), check=check))
        assert len(made) == 1
        assert len(threads) == 3
        assert threading.get_ident() not in threads

    run(main, llm)


# Memory --------------------------------------------------------------------------------------------------


def test_memory_is_released_after_a_huge_text(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(processes, "trim_memory", lambda: released.append(1))
    llm = LLM("shakespeare", engine="native", max_num_seqs=1)
    llm.tokenize("a" * (tokenizers.HUGE_TEXT - 1))
    assert released == []
    llm.tokenize("a" * tokenizers.HUGE_TEXT)
    assert released == [1]


def test_memory_may_be_released_at_any_time() -> None:
    processes.trim_memory()


# Batch files ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tokenization")
def test_a_batch_does_not_tokenize_what_cannot_fit(tmp_path: Path, chat: LLM) -> None:
    lines = [{"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run_on(chat, str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        assert "the prompt has at least " in json.loads(line)["error"]
