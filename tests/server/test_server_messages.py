"""/v1/messages and its count_tokens: a translation of chats, in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers import asgi
from helpers.chat import chat_folder
from helpers.server_client import Client
from helpers.tools import TWO, check_call, tools_folder
from nanoinfer import LLM
from nanoinfer.errors import ResultError
from nanoinfer.protocols.fields import CHAT, COUNT_TOKENS, MESSAGES, REQUIRED, TABLES
from nanoinfer.protocols.messages import SHAPE, parse_messages
from nanoinfer.protocols.shared import Reply
from nanoinfer.server.app import build_app
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Refusal

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
    for f in (tool["function"] for tool in TWO)
]
ANY = {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
OFF = {"thinking": {"type": "disabled"}}
ON = {"thinking": {"type": "enabled", "budget_tokens": 5}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tools_folder(tmp_path_factory.mktemp("messages") / "tiny")
    made = Client(LLM(str(folder), engine="native", max_num_seqs=8), served_model_name=("tiny",))
    yield made
    made.async_llm.shutdown()


def body(messages: Any = HI, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 40, "temperature": 0, "messages": messages, **fields}


def events(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the data of a stream's events, whose names are their types."""
    response = client.request("POST", MESSAGES, json=body(stream=True, **fields))
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events make, as Anthropic's clients put them together."""
    message: dict[str, Any] = dict(found[0]["message"])
    blocks: list[dict[str, Any]] = []
    ended = 0
    for event in found[1:-2]:
        assert event["index"] == (len(blocks) if event["type"] == "content_block_start" else ended)
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(blocks[-1].pop("json"))
            ended += 1
        elif event["delta"]["type"] == "input_json_delta":
            blocks[-1]["json"] = blocks[-1].get("json", "") + event["delta"]["partial_json"]
        else:
            name = {"text_delta": "text", "thinking_delta": "thinking"}[event["delta"]["type"]]
            blocks[-1][name] += event["delta"][name]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert ended == len(blocks)
    return message | {"content": blocks} | found[-2]["delta"] | {"usage": found[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def error(client: Client, url: str = MESSAGES, **fields: Any) -> tuple[int, str, str]:
    """Return the status, the type and the message of an error."""
    response = client.request("POST", url, json={k: v for k, v in body(**fields).items() if v != "none"})
    found = response.json()
    assert (found.keys(), found["type"]) == ({"type", "error", "request_id"}, "error")
    assert found["request_id"] == response.headers["x-request-id"]
    assert "\n" not in found["error"]["message"]
    return response.status_code, found["error"]["type"], found["error"]["message"]


CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]


def test_text_is_that_of_a_chat(client: Client) -> None:
    made = client.post(MESSAGES, **body(CONVERSATION, system="Be brief.", **OFF))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}, *CONVERSATION[1:]]
    expected = client.post(CHAT, messages=chat, max_tokens=40, temperature=0, enable_thinking=False)
    assert made.pop("id").startswith("msg_")
    assert made == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": expected["choices"][0]["message"]["content"]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": expected["usage"]["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 40,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_sampling_parameters_are_those_of_a_chat(client: Client) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.8, "top_k": 9, "seed": 4, "max_tokens": 12}
    made = client.post(MESSAGES, **body(**OFF) | sampled)
    expected = client.post(CHAT, messages=HI, enable_thinking=False, **sampled)
    assert made["content"] == [{"type": "text", "text": expected["choices"][0]["message"]["content"]}]


BODIES: list[dict[str, Any]] = [
    OFF,
    {**ANY, **OFF, "max_tokens": 150},
    {**ON, "max_tokens": 60},
    {**ANY, **ON, "max_tokens": 150},
    {"tools": TOOLS, "tool_choice": {"type": "none"}},
    {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}, **OFF, "max_tokens": 150},
    {"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["a", "b"]}}}, **OFF},
]


@pytest.mark.parametrize("fields", BODIES, ids=lambda fields: "-".join(fields))
def test_streams_are_whole_responses(client: Client, fields: dict[str, Any]) -> None:
    whole = client.post(MESSAGES, **body(**fields))
    found = events(client, **fields)
    assert found[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert without_ids(put_together(found)) == without_ids(whole)


def test_any_tool_is_a_call_that_matches(client: Client) -> None:
    made = client.post(MESSAGES, **body(max_tokens=150, **ANY, **OFF))
    (block,) = made["content"]
    assert (made["stop_reason"], block["type"], block.keys()) == (
        "tool_use",
        "tool_use",
        {"type", "id", "name", "input"},
    )
    check_call(block["name"], json.dumps(block["input"]), TWO)


def test_a_call_that_is_cut_off_is_left_out(client: Client) -> None:
    whole = client.post(MESSAGES, **body(max_tokens=150, **ANY, **OFF))
    cut = {**ANY, **OFF, "max_tokens": whole["usage"]["output_tokens"] - len("}}\n</tool_call><end>")}
    made = client.post(MESSAGES, **body(**cut))
    assert (made["content"], made["stop_reason"]) == ([], "max_tokens")
    found = events(client, **cut)
    kinds = [event["type"] for event in found]
    assert (kinds[1], kinds[-3:]) == ("content_block_start", ["content_block_stop", "message_delta", "message_stop"])
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


def test_thinking_is_a_block_within_its_budget(client: Client) -> None:
    made = client.post(MESSAGES, **body(**ON))
    first, second = made["content"]
    assert (first["type"], first["signature"], second["type"]) == ("thinking", "", "text")
    expected = client.post(
        CHAT, messages=HI, max_tokens=40, temperature=0, enable_thinking=True, thinking_token_budget=5
    )
    message = expected["choices"][0]["message"]
    assert (first["thinking"], second["text"]) == (message["reasoning"], message["content"])
    counted = expected["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert made["usage"]["output_tokens_details"] == {"thinking_tokens": counted}
    adaptive = client.post(MESSAGES, **body(thinking={"type": "adaptive"}))
    effort = client.post(MESSAGES, **body(output_config={"effort": "low"}))
    assert adaptive["content"] == effort["content"]
    assert adaptive["content"][0]["type"] == "thinking"


def prompt(client: Client, **fields: Any) -> str:
    """Return the text of the prompt of a request, which has its tokens."""
    ids = client.post(CHAT, max_tokens=1, return_token_ids=True, **fields)["prompt_token_ids"]
    return client.llm.decode(ids)


def test_a_conversation_goes_on_with_results(client: Client) -> None:
    first = client.post(MESSAGES, **body(max_tokens=150, **ANY, **ON))
    call = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "7"}]}
    messages = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    fields = {"tools": TOOLS, "tool_choice": {"type": "none"}, **OFF}
    second = client.post(MESSAGES, **body(messages, **fields))
    function = {"name": call["name"], "arguments": json.dumps(call["input"])}
    said = {
        "role": "assistant",
        "content": None,
        "reasoning_content": first["content"][0]["thinking"],
        "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
    }
    tools = [{**t, "function": {"description": "", **t["function"]}} for t in TWO]
    answered = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
    options = {"tools": tools, "tool_choice": "none", "enable_thinking": False, "temperature": 0, "max_tokens": 40}
    expected = client.post(CHAT, messages=[*HI, said, answered], **options)
    assert second["content"] == [{"type": "text", "text": expected["choices"][0]["message"]["content"]}]
    assert second["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    failed = [
        *messages[:-1],
        {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "?"}]},
    ]
    count = client.post(COUNT_TOKENS, model="tiny", messages=failed, **fields)["input_tokens"]
    answered["content"] = "Error: 7"
    chat = [*HI, said, answered, {"role": "user", "content": "?"}]
    assert count == client.post(CHAT, messages=chat, **options)["usage"]["prompt_tokens"]


def test_a_last_message_of_the_assistant_is_continued(client: Client) -> None:
    made = client.post(MESSAGES, **body([*HI, {"role": "assistant", "content": "the"}]))
    continued = {"continue_final_message": True, "add_generation_prompt": False, "temperature": 0, "max_tokens": 40}
    expected = client.post(CHAT, messages=[*HI, {"role": "assistant", "content": "the"}], **continued)
    assert made["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_messages_of_a_role_in_succession_are_one(client: Client) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts[:1]},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "c"},
    ]
    one = [{"role": "user", "content": parts}, {"role": "system", "content": [{"type": "text", "text": "c"}]}]
    assert client.post(MESSAGES, **body(messages))["content"] == client.post(MESSAGES, **body(one))["content"]


def test_the_stop_sequence_is_reported(client: Client) -> None:
    text = client.post(MESSAGES, **body(**OFF))["content"][0]["text"]
    stop = text[5:8]
    assert stop not in text[:5]
    made = client.post(MESSAGES, **body(stop_sequences=["zzz", stop], **OFF))
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", stop)
    assert made["content"][0]["text"] == text[: text.index(stop)]
    found = events(client, stop_sequences=["zzz", stop], **OFF)
    assert without_ids(put_together(found)) == without_ids(made)


def test_a_prompt_that_is_too_long_has_anthropics_message(client: Client) -> None:
    for text in ("Hi " * 5000, "ab " * 2000):
        status, kind, message = error(client, messages=[{"role": "user", "content": text}])
        assert (status, kind) == (400, "invalid_request_error")
        assert re.fullmatch(r"prompt is too long: .*\d+ tokens > 2048 maximum: shorten the conversation", message)


def test_the_end_of_the_context_has_a_reason_of_its_own(client: Client) -> None:
    made = client.post(MESSAGES, **body([{"role": "user", "content": "Hi" * 1000}], **OFF) | {"max_tokens": 2000})
    assert made["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(
    "fields", [{}, ANY, ON, {"system": [{"type": "text", "text": "s"}]}], ids=lambda f: "-".join(f)
)
def test_counted_tokens_are_those_of_the_prompt(client: Client, fields: dict[str, Any]) -> None:
    for messages in (HI, CONVERSATION, [*HI, {"role": "assistant", "content": "the"}]):
        made = client.post(MESSAGES, **body(messages, **fields))
        count = client.post(COUNT_TOKENS, model="tiny", messages=messages, **fields)
        assert count == {"input_tokens": made["usage"]["input_tokens"]}


def test_the_billing_header_is_no_part_of_the_prompt(client: Client) -> None:
    """Claude Code's first system block, which differs from request to request."""
    plain = client.post(COUNT_TOKENS, model="tiny", messages=HI, system="s")
    for i in range(2):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={i};"}
        sent = {"messages": HI, "system": [header, {"type": "text", "text": "s"}]}
        assert client.post(COUNT_TOKENS, model="tiny", **sent) == plain
        assert client.post(MESSAGES, **body(**sent))["usage"]["input_tokens"] == plain["input_tokens"]
    alone = client.post(COUNT_TOKENS, model="tiny", messages=HI, system=[header])
    assert alone == client.post(COUNT_TOKENS, model="tiny", messages=HI)


def test_fields_without_effect_are_accepted(client: Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    tools = [{**TOOLS[0], "type": "custom", **cached, "eager_input_streaming": True, "strict": True}, TOOLS[1]]
    plain = client.post(MESSAGES, **body(tools=TOOLS, system="s", **OFF))
    made = client.post(
        f"{MESSAGES}?beta=true",
        **body(tools=tools, system=[{"type": "text", "text": "s", **cached}], metadata={"user_id": "u"}, **cached),
        service_tier="auto",
        context_management={"edits": []},
        mcp_servers=[],
        thinking={"type": "disabled", "display": "summarized"},
    )
    assert without_ids(made) == without_ids(plain)


def test_what_the_server_cannot_run_is_left_out_with_one_warning(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, {"type": "tool_reference"}, image]}
    sent = body([*said(search, found, USE), *user(result)], **OFF) | {"betas": ["a"]}
    hints = {"defer_loading": True, "input_examples": [{}], "allowed_callers": ["direct"]}
    sent["tools"] = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, {**TOOLS[0], **hints}]
    shown = "a\n[image: left out, because this model reads text only]"
    plain = body([*said(USE), *user({**result, "content": shown})], tools=TOOLS[:1], **OFF)
    expected = client.post(MESSAGES, **plain)
    with caplog.at_level("WARNING", "nanoinfer.server"):
        for _ in range(2):
            assert without_ids(client.post(MESSAGES, **sent)) == without_ids(expected)
    lines = sorted(record.getMessage() for record in caplog.records if record.name == "nanoinfer.server")
    whats = [
        "tools of type 'web_search_20250305'",
        "blocks of tools that Anthropic's servers run",
        *(f"{h} of tools" for h in hints),
    ]
    assert lines == sorted(f"/v1/messages: left out, because this server cannot run it: {w}" for w in whats)


def test_thinking_has_no_effect_on_a_model_without_reasoning(tmp_path: Path) -> None:
    client = Client(LLM(str(chat_folder(tmp_path / "tiny")), engine="native"))
    plain = {"model": "tiny", "messages": HI, "max_tokens": 5, "temperature": 0}
    expected = client.post(MESSAGES, **plain)
    assert without_ids(client.post(MESSAGES, **plain, **ON)) == without_ids(expected)
    assert (
        client.post(COUNT_TOKENS, model="tiny", messages=HI, **ON)["input_tokens"] == expected["usage"]["input_tokens"]
    )
    status, found = client.error(CHAT, messages=HI, thinking_token_budget=5)
    assert (status, found["param"]) == (400, "thinking_token_budget")
    client.async_llm.shutdown()


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*blocks]}]


def said(*blocks: Any) -> list[dict[str, Any]]:
    return [*HI, {"role": "assistant", "content": [*blocks]}]


USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
TEXT = {"type": "text", "text": "a"}
SCHEMA = {"type": "json_schema", "schema": {}}
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"model": "none"}, "model is missing: /v1/messages needs model, messages, max_tokens"),
    ({"max_tokens": "none"}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens=0 is not an integer >= 1"),
    ({"n": 2}, "the field 'n' is not supported for /v1/messages"),
    ({"container": "c"}, "the field 'container' is not supported"),
    ({"stop_sequences": "a"}, "stop_sequences='a' is not a list"),
    ({"stop_sequences": [""]}, "stop_sequences='' is not a non-empty string"),
    ({"temperature": -1}, "temperature=-1"),
    ({"messages": []}, "messages=[] is not a list of one or more"),
    ({"messages": ["a"]}, "messages[0]='a' is not an object"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role='tool' is not supported: use one of user"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0]: the field 'name' is not supported"),
    ({"messages": [{"role": "user"}]}, "messages[0]={'role': 'user'} has no content"),
    ({"messages": user({"type": "mcp_tool_result"})}, "messages=[] is not a conversation"),
    ({"messages": user()}, "messages[0].content=[] is neither a string nor"),
    ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0].type='image' is not supported for"),
    ({"messages": user(TEXT, {"type": "document"})}, "messages[0].content[1].type='document' is not supported"),
    ({"messages": user({**TEXT, "citations": [1]})}, "messages[0].content[0]: the field 'citations' is not"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0]={'type': 'text'} has no text"),
    ({"messages": user({"type": "text", "text": 5})}, "messages[0].content[0].text=5 is not a string"),
    ({"messages": [*said(USE), *user({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "video"}]})]},
     "messages[2].content[0].content[0].type='video' is not supported for results: use text, image, document"),
    ({"messages": said({"type": "redacted_thinking", "data": "x"})}, "'redacted_thinking', which only Anthropic can"
     " read, is not supported for role assistant"),
    ({"messages": said(USE)}, "messages: the last message has a tool_use without its tool_result"),
    ({"messages": said({**USE, "input": "{}"})}, "messages[1].content[0].input='{}' is not an object"),
    ({"messages": said({"type": "thinking", "thinking": "a"}, USE)}, "without its tool_result"),
    ({"system": 5}, "system=5 is neither a string nor"),
    ({"system": [{"type": "image"}]}, "system[0].type='image' is not supported"),
    ({"tools": {}}, "tools={} is not a list"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema=None is not a JSON schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0]: name='a b' is not 1 to 64"),

    ({"tools": [*TOOLS, {"name": "f", "input_schema": {"type": "array"}}]}, "tools[2]: parameters={'type': "),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type='any' needs tools"),
    ({"tool_choice": "auto"}, "tool_choice='auto' is not an object"),
    ({"tool_choice": {"type": "sub"}}, "tool_choice.type='sub' is not supported: use one of auto, any"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name='sub' is the name of none"),
    ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use=1"),
    ({"thinking": {"type": "enabled"}}, "thinking={'type': 'enabled'}: its type is not enabled with budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type='between_tools' is not supported"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens=-1 is not an integer >= 0"),
    ({"output_config": {"task_budget": 1}}, "output_config: the field 'task_budget' is not supported"),
    ({"output_config": {"effort": 1}}, "output_config.effort=1"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format={'type': 'text'} has no schema"),

    ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}}, "output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields, message", ERRORS, ids=lambda x: json.dumps(x)[:60])
def test_errors_name_what_is_wrong(client: Client, fields: dict[str, Any], message: str, stream: bool) -> None:
    status, kind, found = error(client, stream=stream, **fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert message in found
    assert client.async_llm.num_unfinished_requests == 0


def test_count_tokens_has_the_same_errors(client: Client) -> None:
    assert error(client, COUNT_TOKENS)[2].startswith("the field 'max_tokens' is not supported for")
    status, kind, message = error(client, COUNT_TOKENS, max_tokens="none", temperature="none", tools=[TOOLS[0]] * 2)
    assert (status, kind) == (400, "invalid_request_error")
    assert message == "tools[1]: name='add' is the name of another tool, too: names are unique"


def test_other_statuses_have_anthropics_types(client: Client) -> None:
    assert error(client, model="other")[:2] == (404, "not_found_error")
    assert error(client, COUNT_TOKENS, model="other", max_tokens="none", temperature="none")[:2] == (
        404,
        "not_found_error",
    )
    response = client.request("GET", MESSAGES)
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
    other = client.request("GET", "/v1/message")
    assert other.json()["error"].keys() == {"message", "type", "param", "code"}


TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 408: "invalid_request_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


@pytest.mark.parametrize("status, kind", TYPES.items())
def test_refusals_by_path(status: int, kind: str) -> None:
    refusal = Refusal(status, "no", code="c")
    scope = {"path": COUNT_TOKENS, "state": {"request_id": "r"}}
    expected = {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "r"}
    assert json.loads(refusal.content(scope)) == expected
    assert refusal.event(scope) == b"event: error\ndata: " + refusal.content(scope) + b"\n\n"
    for other in (refusal.content({"path": CHAT}), refusal.content(), refusal.event({"path": CHAT})[6:]):
        assert json.loads(other)["error"]["code"] == "c"


def test_middleware_answers_in_anthropics_shape(client: Client) -> None:
    app = build_app(client.async_llm, ServerConfig(api_key=("a-key",), max_body_bytes=200, allowed_host=("x",)))
    small = json.dumps(body(max_tokens=1)).encode()

    async def statuses() -> list[tuple[int, str]]:
        found = []
        for headers, content in (
            ({}, small),
            ({"x-api-key": "b-key"}, small),
            ({"host": "evil"}, small),
            ({"x-api-key": "a-key"}, b" " * 201),
            ({"x-api-key": "a-key"}, b"[]"),
            ({"x-api-key": "a-key", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}, small),
        ):
            response = await asgi.call(app, "POST", MESSAGES, headers, content)
            made = json.loads(response.content)
            found.append((response.status, made["error"]["type"] if made["type"] == "error" else made["type"]))
        return found

    assert asyncio.run(statuses()) == [
        (401, "authentication_error"), (401, "authentication_error"), (403, "permission_error"),
        (413, "request_too_large"), (400, "invalid_request_error"), (200, "message"),
    ]  # fmt: skip


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    request = parse_messages(body())
    writer = SHAPE.writer(request, Reply("1", "tiny", 0, str))
    event = writer.error(SHAPE.as_sent(ResultError("logits are not finite"), request)).decode()
    assert event.startswith("event: error\ndata: {")
    assert json.loads(event.partition("data: ")[2])["error"] == {
        "type": "api_error",
        "message": "logits are not finite",
    }


def test_the_document_has_the_fields_that_the_parser_knows(client: Client) -> None:
    paths = client.get("/openapi.json")["paths"]
    for url in (MESSAGES, COUNT_TOKENS):
        operation = paths[url]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == {*TABLES[url]}
        assert set(schema["required"]) == {*REQUIRED[url]}
