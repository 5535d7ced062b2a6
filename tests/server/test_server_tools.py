"""Tool calls and reasoning in /v1/chat/completions: whole responses, streams, errors, and batch files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.chat import HI
from helpers.server_client import Client, uncached
from helpers.tools import TWO, check_call, tools_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.protocols.fields import CHAT, RESPONSES

SAMPLED: dict[str, Any] = {"seed": 3, "temperature": 1.0, "max_tokens": 150}
CALLS: dict[str, Any] = {"tools": TWO, "parallel_tool_calls": False, "enable_thinking": False}
THINKS: dict[str, Any] = {"enable_thinking": True, "thinking_token_budget": 5}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    made = Client(LLM(str(tools_folder(tmp_path_factory.mktemp("tools") / "tiny")), engine="native", max_num_seqs=8))
    yield made
    made.async_llm.shutdown()


def merged(chunks: list[dict[str, Any]], n: int = 1) -> list[dict[str, Any]]:
    """Return the choices that a stream's chunks make, as OpenAI's clients put them together."""
    found: list[dict[str, Any]] = [{"message": {"tool_calls": []}, "finish_reason": None} for _ in range(n)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            made = found[choice["index"]]
            assert made["finish_reason"] is None  # nothing follows the last chunk of a choice
            made["finish_reason"] = choice["finish_reason"]
            message, delta = made["message"], choice["delta"]
            for key in delta.keys() - {"tool_calls"}:
                message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(message["tool_calls"]):
                    assert (part["type"], part["function"]["arguments"]) == ("function", "")
                    message["tool_calls"].append({**part, "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"}
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return found


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", [])]


def test_whole_responses_are_those_of_the_library(client: Client) -> None:
    made = client.post(CHAT, messages=HI, n=2, tool_choice="required", **CALLS, **SAMPLED)
    (expected,) = client.llm.chat(HI, SamplingParams(n=2, **SAMPLED), tool_choice="required", **CALLS)
    for choice, output in zip(made["choices"], expected.outputs, strict=True):
        assert output.message is not None
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert choice["message"].keys() == {"role", "content", "tool_calls"}
        assert calls_of(choice) == [(c.name, c.arguments) for c in output.message.tool_calls]
        for call in choice["message"]["tool_calls"]:
            assert call.keys() == {"id", "type", "function"}
            check_call(call["function"]["name"], call["function"]["arguments"], TWO)
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


NAMED = {"type": "function", "function": {"name": "weather"}}
BODIES: list[dict[str, Any]] = [
    {**CALLS, "tool_choice": "required"},
    {**CALLS, "tool_choice": NAMED, "n": 2},
    {"tools": TWO, "logit_bias": {"31": 5}},
    {"tools": TWO, "tool_choice": "none"},
    {"tools": TWO, "tool_choice": "required", **THINKS, "n": 2},
    {**THINKS, "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}},
    {
        "tools": TWO,
        "enable_thinking": False,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}},
    },
    {**CALLS, "tool_choice": NAMED, "logprobs": True, "top_logprobs": 1, "return_token_ids": True},
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: "-".join(body))
def test_streams_are_whole_responses(client: Client, body: dict[str, Any]) -> None:
    whole = client.post(CHAT, messages=HI, **body, **SAMPLED)
    chunks = client.stream(CHAT, messages=HI, stream_options={"include_usage": True}, **body, **SAMPLED)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert uncached(chunks[-1]["usage"]) == uncached(whole["usage"])
    for made, choice in zip(merged(chunks, body.get("n", 1)), whole["choices"], strict=True):
        assert made["finish_reason"] == choice["finish_reason"]
        assert calls_of(made) == calls_of(choice)
        assert made["message"]["content"] == (choice["message"]["content"] or "")
        for name in ("reasoning", "reasoning_content"):
            assert made["message"].get(name) == choice["message"].get(name)
        if "tool_choice" in body and body["tool_choice"] != "none":
            assert calls_of(choice)
    if "logprobs" in body:
        tokens = [t for c in chunks for x in c["choices"] if x.get("logprobs") for t in x["logprobs"]["content"]]
        assert tokens == whole["choices"][0]["logprobs"]["content"]
        ids = [i for c in chunks for x in c["choices"] for i in x.get("token_ids", [])]
        assert ids == whole["choices"][0]["token_ids"]


def test_a_named_function_is_called_once(client: Client) -> None:
    """As in OpenAI's API, and whatever parallel_tool_calls says: clients such as instructor rely on it."""
    body = {"messages": HI, "tools": TWO, "tool_choice": NAMED, "enable_thinking": False, "n": 4, **SAMPLED}
    for more in ({}, {"parallel_tool_calls": True}):
        for choice in client.post(CHAT, **body, **more)["choices"]:
            ((name, arguments),) = calls_of(choice)
            check_call(name, arguments, TWO)
            assert (name, choice["finish_reason"]) == ("weather", "tool_calls")


def test_objects_may_be_any_tool_choice(client: Client) -> None:
    body = {"messages": HI, "tools": TWO, **SAMPLED, "enable_thinking": False}
    for choice in ("auto", "none", "required"):
        made = client.post(CHAT, **body, tool_choice={"type": choice})
        expected = client.post(CHAT, **body, tool_choice=choice)
        assert made["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert calls_of(made["choices"][0]) == calls_of(expected["choices"][0])


def test_a_call_that_a_stop_string_cuts_is_not_complete(client: Client) -> None:
    body = {"messages": HI, "tools": TWO, "tool_choice": NAMED, "enable_thinking": False, "stop": ['"city"'], **SAMPLED}
    (whole,), (streamed,) = client.post(CHAT, **body)["choices"], merged(client.stream(CHAT, **body))
    for choice in (whole, streamed):
        assert (calls_of(choice), choice["finish_reason"]) == ([("weather", "{")], "stop")
    del body["messages"], body["max_tokens"]
    body |= {"input": "Hi", "tool_choice": "required", "tools": [{"type": "function", **TWO[1]["function"]}]}
    made = client.post(RESPONSES, **body)
    assert (made["status"], made["output"][-1]["arguments"]) == ("incomplete", "{")
    assert made["output"][-1]["status"] == "incomplete"


def test_reasoning_has_both_names_and_is_counted(client: Client) -> None:
    made = client.post(CHAT, messages=HI, **THINKS, **SAMPLED)
    message = made["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"]
    assert "</think>" not in message["content"]
    assert 0 < made["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 5 + len("</think>")
    effort = client.post(CHAT, messages=HI, reasoning_effort="none", **SAMPLED)
    off = client.post(CHAT, messages=HI, enable_thinking=False, **SAMPLED)
    assert effort["choices"] == off["choices"]


def test_a_conversation_goes_on_with_what_was_answered(client: Client) -> None:
    first = client.post(CHAT, messages=HI, tool_choice="required", **CALLS, **SAMPLED)
    said = {**first["choices"][0]["message"], "refusal": None}
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "7"}
    second = client.post(CHAT, messages=[*HI, said, result], tools=TWO, tool_choice="none", **SAMPLED)
    assert second["choices"][0]["message"]["content"]
    other = client.post(CHAT, messages=[*HI, said, {**result, "tool_call_id": "x"}], **SAMPLED)
    assert other["usage"]["prompt_tokens"] > 0


def as_tool(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(20):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": TWO, "tool_choice": "sub"}, "tool_choice", "tool_choice='sub' is unknown"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TWO, "tool_choice": {"type": "any"}}, "tool_choice", "tool_choice={'type': 'any'} is unknown"),
    ({"tools": [as_tool({"type": "object"})] * 129}, "tools", "129 tools: give a list of at most 128"),
    ({"tools": [as_tool({"type": "object"})] * 2}, "tools", "tools[1]: name='f' is the name of another tool"),
    ({"tools": [as_tool({"type": "array"})]}, "tools", "is not the JSON schema of an object"),
    ({"tools": [as_tool({"type": "object"}, name="a b")]}, "tools", "name='a b' is not 1 to 64"),
    ({"tools": [as_tool({"type": "object", "properties": {"a": {"type": "object", "x": "y" * 70_000}}})]}, "tools",
     "the limit is 65536"),
    ({"tools": [*TWO, as_tool({"properties": {"a": {"$ref": "#/x"}}}, strict=True)]}, "tools", "'f'"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "thinking_token_budget=-1"),
    ({"enable_thinking": 1}, "enable_thinking", "enable_thinking=1 is not a bool"),
    ({"reasoning_effort": 1}, "reasoning_effort", "reasoning_effort=1"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls", "parallel_tool_calls='x'"),
]  # fmt: skip


def has(schema: Any) -> dict[str, Any]:
    """Return the schema of an object whose required property is this."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (has({"$ref": "#/x"}), "Pointer '/x' does not exist"),
    (has({"$ref": "http://127.0.0.1:9/x.json"}), "Default retriever does not fetch resources"),
    (has({"$ref": "file:///etc/passwd"}), "Default retriever does not fetch resources"),
    (has({"type": "string", "pattern": "("}), "unclosed group"),
    (has({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (has({"type": "integer", "minimum": 5, "maximum": 4}), "required property 'a' is unsatisfiable"),
    (has({"enum": []}), "required property 'a' is unsatisfiable"),
    (has(False), "required property 'a' is unsatisfiable"),
    (has({"not": {"type": "string"}}), "not"),
    (has({"type": "strin"}), "Invalid type: strin"),
    (has({"type": "integer", "multipleOf": 0}), "multiple"),
    (has({"allOf": [{"anyOf": [{"minimum": i + j} for i in range(12)]} for j in range(12)]}), "too large"),
    ({"type": "object", "properties": [1]}, "properties=[1] is not an object"),
]
"""Schemas that cannot be compiled, and the reason, which tools with `strict` are refused for."""
COMPILED: list[dict[str, Any]] = [
    has({"$ref": "#/properties/a"}),
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    has({"type": "string", "pattern": "(a{1000}){1000}"}),
    has({"type": "string", "minLength": 10**9}),
    has({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    {"type": "object", "properties": {"\u202e\x00\n</tool_call>": {}}, "required": ["\u202e\x00\n</tool_call>"]},
]
"""Schemas without a finite value, or with odd names: an answer ends at max_tokens."""


def test_hostile_schemas_disturb_no_neighbour(client: Client) -> None:
    """Every second request is one whose answer is known."""
    good = {"messages": HI, "tool_choice": "required", **CALLS, **SAMPLED}
    expected = calls_of(client.post(CHAT, **good)["choices"][0])
    assert expected
    bodies = [
        {**good, "tools": [*TWO, as_tool(schema, strict=strict)], "tool_choice": choice}
        for schema, _ in REFUSED
        for strict, choice in ((True, "required"), (False, "auto"))
    ]
    named = {"function": {"name": "f"}}
    bodies += [{**good, "tools": [*TWO, as_tool(schema)], "tool_choice": named} for schema in COMPILED]
    with ThreadPoolExecutor(4) as pool:
        hostile = [
            pool.submit(client.request, "POST", CHAT, json={**body, "max_tokens": 20, "overflow": "slide"})
            for body in bodies
        ]
        neighbours = [pool.submit(client.post, CHAT, **good) for _ in bodies]
        for i, response in enumerate(made.result() for made in hostile):
            if i >= 2 * len(REFUSED):
                assert (response.status_code, response.json()["choices"][0]["finish_reason"]) == (200, "length")
                continue
            if i % 2:
                assert response.status_code == 200, response.text
                continue
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools")
            assert error["message"].removeprefix("tools: ").startswith("tool 'f': ")
            assert REFUSED[i // 2][1] in error["message"]
            assert "\n" not in error["message"]
        assert all(calls_of(made.result()["choices"][0]) == expected for made in neighbours)
    assert client.async_llm.num_unfinished_requests == 0


ODD_NAMES = ["", "a b", "é", "a" * 65, "a\n", "auto", "<tool_call>", 'a"b', "../x", None, 5, ["a"]]


@pytest.mark.parametrize("name", ODD_NAMES, ids=repr)
def test_odd_names_are_refused(client: Client, name: Any) -> None:
    status, error = client.error(CHAT, messages=HI, tools=[as_tool({"type": "object"}, name=name)])
    assert (status, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools[0]: ")


def test_as_many_tools_as_there_may_be(client: Client) -> None:
    """128, whose names have all characters that a name may have."""
    tools = [{"type": "function", "function": {"name": f"t{i}.-_Z"}} for i in range(128)]
    body = {**CALLS, "tools": tools, "overflow": "slide", **SAMPLED}
    made = client.post(CHAT, messages=HI, tool_choice="required", **body)
    ((name, arguments),) = calls_of(made["choices"][0])
    assert (name in [t["function"]["name"] for t in tools], arguments) == (True, "{}")


@pytest.mark.parametrize("result", [{}, {"tool_call_id": ["x"]}, {"tool_call_id": {"x": 1}}])
def test_results_without_the_id_of_a_call_are_refused(client: Client, result: dict[str, Any]) -> None:
    status, error = client.error(CHAT, messages=[*HI, {"role": "tool", "content": "7", **result}])
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].startswith("message 2 of 2: tool_call_id ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body, param, message", ERRORS, ids=lambda x: json.dumps(x)[:50])
def test_errors_name_the_field(client: Client, body: dict[str, Any], param: str, message: str, stream: bool) -> None:
    status, error = client.error(CHAT, messages=HI, stream=stream, **body)
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert client.async_llm.num_unfinished_requests == 0


def test_deep_schemas_are_compiled_or_refused(client: Client) -> None:
    body = {**CALLS, "tools": [as_tool(DEEP)], "tool_choice": "required"}
    made = client.post(CHAT, messages=HI, **body, **SAMPLED)
    assert calls_of(made["choices"][0])
