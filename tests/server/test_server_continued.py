"""Streams that are cut after any chunk and continued by another server, with `output_token_ids`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.chat import HI
from helpers.server_client import Client, uncached
from helpers.tools import TWO, tools_folder
from nanoinfer import LLM
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, RESPONSES

SAMPLED: dict[str, Any] = {"seed": 3, "temperature": 1.0, "max_tokens": 60}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}, "return_token_ids": True}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": ["alpha", "beta gamma", ["delta"]]}}}
CHATS: dict[str, dict[str, Any]] = {
    "text": {},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "calls": {"tools": TWO, "tool_choice": "required", "enable_thinking": False},
    "calls with logprobs": {"tools": TWO, "tool_choice": "required", "enable_thinking": False, "logprobs": True},
    "text or calls": {"tools": TWO, "logit_bias": {"31": 5}},
    "reasoning": {"enable_thinking": True, "thinking_token_budget": 5},
    "reasoning, then calls": {
        "tools": TWO, "tool_choice": "required", "enable_thinking": True, "thinking_token_budget": 5,
    },
    "schema": {"response_format": SCHEMA, "enable_thinking": False},
}  # fmt: skip
COMPLETED: dict[str, dict[str, Any]] = {
    "text": {},
    "greedy": {"temperature": 0, "seed": None},
    "logprobs": {"logprobs": 2},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "top_k": 40},
    "stop": {"stop": ["ab", "e ", "t", "zzzz"], "include_stop_str_in_output": True},
    "slide": {"overflow": "slide", "slide_stride": 3},
    "schema": {"response_format": SCHEMA},
}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Client]]:
    folder = tools_folder(tmp_path_factory.mktemp("continued_server") / "tiny")
    made = [Client(LLM(str(folder), engine="native", max_num_seqs=4)) for _ in range(2)]
    yield made
    for client in made:
        client.async_llm.shutdown()


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a stream's chunks make, without the ids of calls, which are random."""
    made: dict[str, Any] = {"calls": [], "token_ids": [], "logprobs": [], "offsets": [], "ends": [], "usage": None}
    for chunk in chunks:
        made["usage"] = chunk["usage"] and uncached(chunk["usage"])
        for choice in chunk["choices"]:
            assert made["ends"] == []  # nothing follows the end
            made["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            made["token_ids"] += choice.get("token_ids", [])
            found = choice["logprobs"] or {}
            made["logprobs"] += found.get("content") or [*zip(*(found[k] for k in sorted(found)), strict=True)]
            for key, text in choice.get("delta", {"text": choice.get("text")}).items():
                if key != "tool_calls":
                    made[key] = made.get(key, "") + text
                    continue
                for part in text:
                    if part["index"] == len(made["calls"]):
                        assert part["id"]
                        made["calls"].append([part["function"]["name"], ""])
                    made["calls"][part["index"]][1] += part["function"]["arguments"]
    return made


def check_cuts(clients: list[Client], url: str, **body: Any) -> dict[str, Any]:
    """Cut a stream after each chunk with tokens; continue it with the other server. Return the uninterrupted one."""
    whole = clients[0].stream(url, **body, **USAGE)
    expected = joined(whole)
    for i, chunk in enumerate(whole, 1):
        if not any(choice.get("token_ids") for choice in chunk["choices"]):
            continue
        before = whole[:i]
        ids = joined(before)["token_ids"]
        rest = clients[1].stream(url, **body, **USAGE, output_token_ids=ids)
        if ids == expected["token_ids"]:  # the last chunk, which has the end, too
            assert joined(rest) | {"usage": expected["usage"]} == joined(rest)
            assert joined(rest)["ends"] == expected["ends"]
            assert joined(rest)["token_ids"] == []
        else:
            assert joined([*before, *rest]) == expected, i
    return expected


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_continued(clients: list[Client], name: str) -> None:
    found = check_cuts(clients, CHAT, messages=HI, **SAMPLED, **CHATS[name])
    assert len(found["token_ids"]) > 3
    assert bool(found["calls"]) == ("tool_choice" in CHATS[name])
    assert bool(found.get("reasoning")) == ("reasoning" in name)


@pytest.mark.parametrize("name", COMPLETED)
def test_a_completion_is_continued(clients: list[Client], name: str) -> None:
    found = check_cuts(clients, COMPLETIONS, prompt="the answer", **{**SAMPLED, **COMPLETED[name]})
    assert len(found["token_ids"]) > 3
    assert found["usage"]["completion_tokens"] == len(found["token_ids"])
    assert len(found["logprobs"]) == (len(found["token_ids"]) if name == "logprobs" else 0)


def test_with_speculation(clients: list[Client]) -> None:
    body = {"prompt": "the answer the answer the", "temperature": 0, "max_tokens": 40, "output_token_ids": [5, 6, 7]}
    (plain,) = clients[0].post(COMPLETIONS, **body, return_token_ids=True)["choices"]
    clients[1].llm.set_draft("prompt-lookup", speculate_k=3)
    try:
        (choice,) = clients[1].post(COMPLETIONS, **body, return_token_ids=True)["choices"]
        chunks = clients[1].stream(COMPLETIONS, **body, return_token_ids=True)
    finally:
        clients[1].llm.set_draft(None)
    assert (choice["token_ids"], choice["text"]) == (plain["token_ids"], plain["text"])
    assert choice["draft_accepted"][:3] == [False] * 3
    streamed = [c for chunk in chunks for c in chunk["choices"]]
    assert [t for c in streamed for t in c["token_ids"]] == plain["token_ids"][3:]
    assert [f for c in streamed for f in c["draft_accepted"]] == choice["draft_accepted"][3:]


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_a_whole_response_is_the_uninterrupted_one(clients: list[Client], url: str) -> None:
    body = {**({"messages": HI} if url == CHAT else {"prompt": "the"}), **SAMPLED, "return_token_ids": True}
    whole = clients[0].post(url, **body)
    ids = whole["choices"][0]["token_ids"]
    again = clients[1].post(url, **body, output_token_ids=ids[:20])
    assert (again["choices"], uncached(again["usage"])) == (whole["choices"], uncached(whole["usage"]))


def test_all_text_of_a_token_is_sent_before_its_id(clients: list[Client]) -> None:
    """A token may release several deltas, each of which is a chunk: the last one has the id."""
    body = {"messages": HI, **SAMPLED, "return_token_ids": True, **CHATS["reasoning, then calls"]}
    chunks = [c for chunk in clients[0].stream(CHAT, **body) for c in chunk["choices"]]
    ends = [c for c in chunks if "token_ids" in c]
    assert len(ends) < len(chunks) - 1  # some chunks have none, beside that of the role
    assert ends[-1] is chunks[-1]
    assert all(len(c["token_ids"]) >= 1 for c in ends)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"output_token_ids": 7}, "output_token_ids", "output_token_ids=7 is not a list"),
    ({"output_token_ids": [7, "a"]}, "output_token_ids", "output_token_ids='a' is not an integer"),
    ({"output_token_ids": [1 << 40]}, "output_token_ids", "is not less than vocab_size"),
    ({"output_token_ids": [7] * 3000}, "output_token_ids", "more than the context length 2048"),
    ({"output_token_ids": [7], "n": 2}, "output_token_ids", "leave out n, best_of and prompt_logprobs"),
    ({"output_token_ids": [7], "seed": None}, "output_token_ids", "needs the seed"),
    ({"output_token_ids": [7], "prompt_logprobs": 1}, "output_token_ids", "leave out n, best_of and prompt_logprobs"),
    ({"output_token_ids": [7] * 9, "max_tokens": 8}, "output_token_ids", "the output ends with token 8 (length)"),
    ({"output_token_ids": [7], "response_format": SCHEMA}, "output_token_ids", "token 1 of 1, 7: response_format"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body, param, message", BAD, ids=lambda value: str(value)[:50])
def test_what_cannot_be_continued_is_a_400(
    clients: list[Client], body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    for url, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        status, error = clients[0].error(url, **{**SAMPLED, **prompt, **body}, stream=stream)
        assert (status, error["param"]) == (400, param), error
        assert message in error["message"]
        assert "\n" not in error["message"]


def test_a_request_has_one_output_that_it_continues(clients: list[Client]) -> None:
    for body, param in (({"prompt": ["a", "b"]}, "prompt"), ({"prompt": "a", "echo": True}, "echo")):
        status, error = clients[0].error(COMPLETIONS, **body, temperature=0, output_token_ids=[7])
        assert (status, error["param"]) == (400, param)
    status, error = clients[0].error(RESPONSES, input="Hi", temperature=0, output_token_ids=[7])
    assert (status, error["param"]) == (400, "output_token_ids")
