"""Large requests and responses: what grows with them is computed once, in pieces, in other threads than the loop."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from starlette.types import ASGIApp

from helpers.asgi import call, post, serve
from helpers.chat import chat_folder
from helpers.models import TINY, make_folder
from nanoinfer import LLM, AsyncLLM
from nanoinfer.core import output_processor as request_outputs
from nanoinfer.protocols.fields import CHAT, COMPLETIONS
from nanoinfer.server import http, routes, service
from nanoinfer.utils import json_pieces

LONG = replace(TINY, block_size=2048)
SLIDE = {"overflow": "slide", "max_tokens": 2, "temperature": 0}
PROMPT = "To be, or not to be " * 100
ECHO = {**SLIDE, "prompt": PROMPT, "echo": True, "logprobs": 4, "n": 4}


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(str(make_folder(tmp_path, LONG)), engine="native", max_num_seqs=4)


@pytest.fixture
def chat(tmp_path: Path) -> LLM:
    return LLM(str(chat_folder(tmp_path)), engine="native", max_num_seqs=4)


class Calls:
    """Records the calls of a function: how many there are in each thread, and the largest result."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, size: Callable[[Any], int]) -> None:
        self.of_thread: Counter[int] = Counter()
        """Size of the results of each thread."""
        self.num, self.largest = 0, 0
        function = getattr(owner, name)

        def record(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.num += 1
            self.largest = max(self.largest, size(result))
            self.of_thread[threading.get_ident()] += size(result)
            return result

        monkeypatch.setattr(owner, name, record)

    @property
    def here(self) -> int:
        """Size of the results in this thread, which runs the event loop."""
        return self.of_thread[threading.get_ident()]

    @property
    def total(self) -> int:
        """Size of all results."""
        return self.of_thread.total()


# Responses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": PROMPT * 5}),
        ("/detokenize", {"tokens": [i % 50 for i in range(10_000)]}),
        (COMPLETIONS, ECHO),
        (COMPLETIONS, ECHO | {"stream": True}),
        (COMPLETIONS, {**SLIDE, "prompt": PROMPT, "return_token_ids": True, "n": 4, "stream": True}),
    ],
    ids=["tokenize", "detokenize", "echo", "echo stream", "token ids"],
)
def test_a_large_response_is_encoded_in_a_thread_in_slices(
    llm: LLM, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = Calls(json_pieces, "_encode", monkeypatch, len)

    async def main(app: ASGIApp, model: AsyncLLM) -> Any:
        return await post(app, body, path)

    found = serve(llm, main)
    assert found.status == 200, found.content
    assert encoded.here < 5_000 < encoded.total  # the head of a stream, the last tokens
    assert encoded.largest < 50_000
    assert max(map(len, found.parts)) < 2 * json_pieces.PIECE_BYTES
    if not body.get("stream"):
        json.loads(found.content)


@pytest.mark.parametrize("count", [2, 3000])
async def test_a_log_probability_that_is_not_finite_is_an_error_not_half_a_response(
    count: int, monkeypatch: pytest.MonkeyPatch, app: ASGIApp
) -> None:
    describe = request_outputs.describe

    def broken(*args: Any) -> Any:
        return {token: replace(entry, logprob=-math.inf) for token, entry in describe(*args).items()}

    monkeypatch.setattr(request_outputs, "describe", broken)
    body = {**SLIDE, "prompt": "a", "logprobs": 1, "max_tokens": count}
    found = await post(app, body)
    assert (found.status, found.error["type"]) == (500, "server_error")
    found = await post(app, body | {"stream": True})
    assert "a log-probability is not finite" in json.loads(found.parts[-1][6:])["error"]["message"]


# Requests ------------------------------------------------------------------------------------------------


def test_a_large_body_is_read_and_checked_in_a_thread(chat: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [
        Calls(service.Service, "parse", monkeypatch, lambda _: 1),
        Calls(routes, "check_request", monkeypatch, lambda _: 1),
        Calls(http, "parse_json", monkeypatch, lambda _: 1),
    ]
    requests: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": [5] * 30_000, "truncate_prompt_tokens": -1, "max_tokens": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 3000, "truncate_prompt_tokens": -1, "max_tokens": 2}),
        ("/tokenize", {"prompt": "a" * 70_000}),
        ("/detokenize", {"tokens": [5] * 30_000}),
    ]

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        for path, body in requests:
            found = await post(app, body, path)
            assert found.status == 200, found.content

    serve(chat, main, max_body_bytes=1 << 20)
    assert [calls.here for calls in read] == [0, 0, 0]
    assert [calls.num for calls in read] == [2, 2, 4]


def test_messages_are_checked_in_a_thread(chat: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.entrypoints import async_llm

    checked = Calls(async_llm, "as_conversation", monkeypatch, len)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        found = await post(app, {"messages": [{"role": "user", "content": "a"}], **SLIDE}, CHAT)
        assert found.status == 200, found.content
        found = await post(app, {"messages": [{"role": "user"}], **SLIDE}, CHAT)
        assert (found.status, found.error["param"]) == (400, "messages")

    serve(chat, main)
    assert (checked.num, checked.here) == (1, 0)


async def test_an_error_message_shows_the_beginning_of_a_large_value(app: ASGIApp) -> None:
    values: list[Any] = [[[]] * 60_000, {str(i): i for i in range(60_000)}, "x" * 500_000]
    for value in values:
        found = await post(app, {"prompt": "a", "temperature": value})
        assert (found.status, found.error["param"]) == (400, "temperature")
        assert len(found.content) < 500


# The bound of log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (ECHO, ["logprobs=4 for 4 outputs of 2000 tokens in the prompt and up to 2 after it", "makes 40040 log-prob"]),
        (ECHO | {"stream": True}, ["makes 40040 log-probabilities"]),
        (ECHO | {"prompt": [PROMPT, "a"], "n": 1, "max_tokens": 1}, [" of 2: ", "makes 10"]),
        ({**SLIDE, "prompt": "a", "logprobs": 0, "max_tokens": 10_001}, ["logprobs=0 for 1 outputs", "makes 10001 "]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_logprob_entries", [10_000])
def test_more_log_probabilities_than_the_bound_are_refused_before_anything_is_scored(
    llm: LLM, body: dict[str, Any], words: list[str], max_logprob_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = Calls(llm.core, "submit", monkeypatch, lambda _: 1)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        found = await post(app, body)
        assert (found.status, found.error["param"]) == (400, "logprobs"), found.content
        for word in [*words, f"the server's max_logprob_entries is {max_logprob_entries}", "lower logprobs, n or"]:
            assert word in found.error["message"]
        assert submitted.num <= (len(body["prompt"]) if isinstance(body["prompt"], list) else 0)
        small = await post(app, body | {"prompt": "a", "n": 1, "max_tokens": 1})
        assert small.status == 200

    serve(llm, main, max_logprob_entries=max_logprob_entries)


def test_a_bound_that_is_reached_exactly_is_kept(llm: LLM) -> None:
    async def main(app: ASGIApp, model: AsyncLLM) -> list[int]:
        return [(await post(app, ECHO | {"max_tokens": count})).status for count in (2, 3)]

    assert serve(llm, main, max_logprob_entries=4 * 5 * 2002) == [200, 400]


def test_without_max_tokens_the_context_length_counts(chat: LLM) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}
    num_prompt = len(chat.apply_chat_template(body["messages"]))  # type: ignore[arg-type]
    entries = 2 * (chat.config.block_size + 1 - num_prompt)

    async def main(app: ASGIApp, model: AsyncLLM) -> int:
        return (await post(app, body, CHAT)).status

    assert serve(chat, main, max_logprob_entries=entries) == 200
    assert serve(chat, main, max_logprob_entries=entries - 1) == 400


async def test_of_a_prompt_that_slides_the_last_tokens_are_kept(llm: LLM, app: ASGIApp) -> None:
    (whole,) = json.loads((await post(app, {**SLIDE, "prompt": "a" * 10 + PROMPT + "b" * 48})).content)["choices"]
    sent = {**SLIDE, "prompt": PROMPT + "b" * 48}
    assert json.loads((await post(app, sent)).content)["choices"] == [whole]
    found = json.loads((await post(app, {**SLIDE, "prompt": [5] * 3000, "n": 4})).content)
    assert found["usage"]["prompt_tokens"] == llm.config.block_size


async def test_a_list_of_many_lists_is_refused_before_it_is_parsed(app: ASGIApp) -> None:
    body = b'{"prompt":[' + b"[]," * 100_000 + b"[]]}"
    found = await call(app, "POST", COMPLETIONS, body=body)
    assert "the body has 100003 lists and objects; the limit is 65536" in found.error["message"]
