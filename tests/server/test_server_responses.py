"""/v1/responses: whole responses and events, which are the answers of /v1/chat/completions; conversations; errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.chat import HI
from helpers.server_client import Client
from helpers.tools import TWO, check_call, tools_folder
from nanoinfer import LLM, ResultError, SamplingParams
from nanoinfer.outputs import CallDelta, CompletionOutput, RequestMetrics, RequestOutput
from nanoinfer.protocols.fields import CHAT, RESPONSES, SAMPLING_OF, TABLES
from nanoinfer.protocols.shared import Reply
from nanoinfer.server.service import SHAPES

SAMPLED: dict[str, Any] = {"seed": 3, "temperature": 1.0, "max_output_tokens": 150}
FLAT: list[dict[str, Any]] = [{"type": "function", "strict": None, **tool["function"]} for tool in TWO]
THINKS: dict[str, Any] = {"enable_thinking": True, "thinking_token_budget": 5}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    made = Client(LLM(str(tools_folder(tmp_path_factory.mktemp("tools") / "tiny")), engine="native", max_num_seqs=8))
    yield made
    made.async_llm.shutdown()


def events_of(client: Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    response = client.request("POST", RESPONSES, json={**body, "stream": True})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for i, event in enumerate(events):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert (name, found[-1]["sequence_number"]) == (f"event: {found[-1]['type']}", i)
    return found


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that the deltas of a stream make; checks that what is done is what the deltas were."""
    items: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert (event["output_index"], is_open) == (len(items), False)
            is_open = True
            items.append(json.loads(json.dumps(event["item"])))
            assert items[-1]["status"] == "in_progress"
            continue
        if "output_index" in event:
            assert (event["output_index"], is_open) == (len(items) - 1, True)
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
        if kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif kind == "output_item.done":
            items[-1]["status"], is_open = event["item"]["status"], False
            assert event["item"] == items[-1]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (items[-1]["name"], items[-1]["arguments"])
        elif kind == "custom_tool_call_input.delta":
            items[-1]["input"] += event["delta"]
        elif kind == "custom_tool_call_input.done":
            assert event["input"] == items[-1]["input"]
        elif kind.endswith("_text.delta"):
            part = items[-1]["content"][event["content_index"]]
            part["text"] += event["delta"]
        elif kind.endswith("_text.done"):
            part = items[-1]["content"][event["content_index"]]
            assert event["text"] == part["text"]
    assert not is_open
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def content_of(message: dict[str, Any]) -> str:
    (part,) = message["content"]
    assert (message["type"], message["role"], part["type"], part["annotations"]) == (
        "message", "assistant", "output_text", [],
    )  # fmt: skip
    text: str = part["text"]
    return text


def as_chat(**body: Any) -> dict[str, Any]:
    """Return options of /v1/chat/completions for some of /v1/responses."""
    renamed = {"max_output_tokens": "max_tokens"}
    return {renamed.get(name, name): value for name, value in body.items()}


def test_a_text_is_that_of_the_chat(client: Client) -> None:
    sent = {**SAMPLED, "enable_thinking": False}
    expected = client.post(CHAT, messages=HI, **as_chat(**sent))
    made = client.post(RESPONSES, input="Hi", metadata={"a": "b"}, user="me", store=True, **sent)
    (message,) = made["output"]
    (choice,) = expected["choices"]
    assert content_of(message) == choice["message"]["content"]
    assert made["id"].startswith("resp_")
    assert message["id"].startswith("msg_")
    assert {name: made[name] for name in ("object", "model", "error", "metadata", "store", "temperature", "tools")} == {
        "object": "response", "model": expected["model"], "error": None, "metadata": {"a": "b"}, "store": False,
        "temperature": 1.0, "tools": [],
    }  # fmt: skip
    assert (made["max_output_tokens"], made["top_p"], made["tool_choice"]) == (150, 1.0, "auto")
    ends = {"stop": ("completed", None), "length": ("incomplete", {"reason": "max_output_tokens"})}
    assert (made["status"], made["incomplete_details"]) == ends[choice["finish_reason"]]
    assert message["status"] == made["status"]
    usage = expected["usage"]
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"], made["usage"]["total_tokens"]) == (
        usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"],
    )  # fmt: skip
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_response_that_is_cut_off_is_incomplete(client: Client) -> None:
    sent = {"input": "Hi", "max_output_tokens": 3, "ignore_eos": True, "seed": 1, "enable_thinking": False}
    made = client.post(RESPONSES, **sent)
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][-1]["status"] == "incomplete"
    last = events_of(client, **sent)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["usage"] == made["usage"]


BODIES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": False, "max_output_tokens": 4, "ignore_eos": True},
    THINKS,
    {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": False},
    {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}, **THINKS},
    {"tools": FLAT, "tool_choice": "required", "logit_bias": {"31": 5}, **THINKS},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}, **THINKS},
    {"instructions": "Be brief.", "reasoning": {"effort": "none", "summary": "auto"}, "top_k": 5},
]


def test_the_status_of_an_item_does_not_depend_on_how_deltas_are_merged() -> None:
    """A slow client gets the end of one call and a part of the next one in one output."""
    calls = [CallDelta(i, *head) for i in range(2) for head in ((f"c{i}", "f", ""), (None, None, "{}"[: 2 - i]))]
    o = CompletionOutput(0, "", [1], "length", message_deltas=[*calls])
    metrics = RequestMetrics(1, 1, 0.0, None, 0.0)
    request = SHAPES[RESPONSES].parse({"input": "Hi", "stream": True}, SamplingParams())
    writer = SHAPES[RESPONSES].writer(request, Reply("1", "m", 0, str))
    written = writer.write([(0, RequestOutput("1", "Hi", [1], [o], 0, 0, metrics))]).decode()
    events = [json.loads(event.partition("data: ")[2]) for event in written.split("\n\n")[:-1]]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["arguments"], item["status"]) for item in items] == [("{}", "completed"), ("{", "incomplete")]
    assert put_together(events) == events[-1]["response"]["output"] == items


@pytest.mark.parametrize("body", BODIES, ids=lambda body: "-".join(body))
def test_streams_are_whole_responses(client: Client, body: dict[str, Any]) -> None:
    body = {"input": "Hi", **SAMPLED, **body}
    whole = client.post(RESPONSES, **body)
    events = events_of(client, **body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    begun, ended = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert put_together(events) == ended["output"]
    assert without_ids(ended["output"]) == without_ids(whole["output"])
    for response in (whole, ended):
        cached = response["usage"]["input_tokens_details"].pop("cached_tokens")
        assert 0 <= cached < whole["usage"]["input_tokens"]
    own = ("id", "created_at", "output")
    assert {k: v for k, v in ended.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}
    assert [event["response"]["id"] for event in events if "response" in event] == [begun["id"]] * 3
    ids = [item["id"] for item in ended["output"]]
    assert len(set(ids)) == len(ids)


PATCH = {"type": "custom", "name": "patch", "description": "Give a patch.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}}  # fmt: skip
NOT_RUN = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"},
           {"type": "mcp", "server_label": "x"}]  # fmt: skip


def test_what_the_server_cannot_run_is_left_out_with_one_warning(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Codex declares such tools in each request, and sends the items of those that OpenAI's models have called."""
    calls = [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
             {"type": "local_shell_call", "call_id": "9", "action": {"type": "exec"}}]  # fmt: skip
    items = [{"role": "user", "content": "Hi"}, *calls, {"role": "user", "content": "Hi"}]
    plain = {**SAMPLED, "tools": FLAT, "enable_thinking": False}
    expected = client.post(RESPONSES, input=[items[0], items[-1]], **plain)
    sent = {**plain, "tools": [*NOT_RUN, {**FLAT[0], "defer_loading": True}, *FLAT[1:]]}
    with caplog.at_level("WARNING", "nanoinfer.server"):
        found = [client.post(RESPONSES, input=items, **sent) for _ in range(2)]
    for made in found:
        assert without_ids(made["output"]) == without_ids(expected["output"])
        assert made["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
    lines = sorted(record.getMessage() for record in caplog.records if record.name == "nanoinfer.server")
    whats = [f"tools of type {tool['type']}" for tool in NOT_RUN] + [f"items of type {item['type']}" for item in calls]
    whats.append("defer_loading of tools")
    assert lines == sorted(f"/v1/responses: left out, because this server cannot run it: {w}" for w in whats)


def test_a_custom_tool_is_a_function_of_one_string(client: Client) -> None:
    sent = {"type": "custom", "name": "patch"}
    body = {"input": "Hi", "tools": [*FLAT, PATCH], "enable_thinking": False, "parallel_tool_calls": False,
            "max_output_tokens": 300, "logit_bias": {str(client.llm.tokenize('"')[-1]): 5}, "seed": 3}  # fmt: skip
    whole = client.post(RESPONSES, **body, tool_choice=sent)
    events = events_of(client, **body, tool_choice=sent)
    assert put_together(events) == events[-1]["response"]["output"]
    (call,) = whole["output"]
    assert without_ids(events[-1]["response"]["output"]) == without_ids([call])
    assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "patch", "completed")
    assert call.keys() == {"id", "call_id", "status", "type", "name", "input"}
    assert not call["input"].startswith('{"input"')
    num_tokens = whole["usage"]["output_tokens"] - len('"}\n</tool_call><end>')
    (cut,) = client.post(RESPONSES, **{**body, "max_output_tokens": num_tokens}, tool_choice=sent)["output"]
    assert cut["status"] == "incomplete"
    assert call["input"].startswith(json.loads(f'{cut["input"]}"}}')["input"])
    answered = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": [
        {"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": "data:,"}]}  # fmt: skip
    items = [{"role": "user", "content": "Hi"}, {**call, "input": 'a"é'}, answered]
    request = SHAPES[RESPONSES].parse({"input": items, "tools": [PATCH]}, client.llm.requests.defaults)
    (function,) = (tool["function"] for tool in request.template["tools"])
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "a\\"é"}'}
    assert request.messages[2]["content"] == "done\n[input_image: left out, because this model reads text only]"
    assert client.post(RESPONSES, **{**body, "input": items, "tool_choice": "none"})["output"]


def test_a_required_call_and_the_turn_after_it(client: Client) -> None:
    sent = {"tools": FLAT, "parallel_tool_calls": False, "enable_thinking": False, **SAMPLED}
    first = client.post(RESPONSES, input="Hi", tool_choice="required", **sent)
    (call,) = first["output"]
    assert (call["type"], call["status"], call.keys() - {"id", "call_id"}) == (
        "function_call", "completed", {"type", "status", "name", "arguments"},
    )  # fmt: skip
    assert (call["id"][:3], call["call_id"][:5]) == ("fc_", "call_")
    check_call(call["name"], call["arguments"], TWO)
    assert first["tools"] == FLAT
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    items = [{"role": "user", "content": "Hi"}, call, result]
    made = client.post(RESPONSES, input=items, tool_choice="none", **sent)
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": call["call_id"], "type": "function", "function": {k: call[k] for k in ("name", "arguments")}}
    ]}  # fmt: skip
    messages = [*HI, message, {"role": "tool", "tool_call_id": call["call_id"], "content": "7"}]
    expected = client.post(CHAT, messages=messages, tool_choice="none", **as_chat(**{**sent, "tools": TWO}))
    assert content_of(made["output"][0]) == expected["choices"][0]["message"]["content"]
    assert made["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_reasoning_is_an_item_and_may_be_sent_back(client: Client) -> None:
    made = client.post(RESPONSES, input="Hi", **THINKS, **SAMPLED)
    reasoning, message = made["output"]
    expected = client.post(CHAT, messages=HI, **THINKS, **as_chat(**SAMPLED))
    (choice,) = expected["choices"]
    (thought,) = reasoning["content"]
    assert thought == {"type": "reasoning_text", "text": choice["message"]["reasoning"]}
    assert (reasoning["type"], reasoning["summary"], reasoning["id"][:3]) == ("reasoning", [], "rs_")
    assert content_of(message) == choice["message"]["content"]
    counts = expected["usage"]["completion_tokens_details"]
    assert made["usage"]["output_tokens_details"] == counts
    assert counts["reasoning_tokens"] > 0
    items = [{"role": "user", "content": "Hi"}, *made["output"], {"role": "user", "content": "And?"}]
    found = client.post(RESPONSES, input=items, **THINKS, **SAMPLED)
    messages = [*HI, choice["message"], {"role": "user", "content": "And?"}]
    again = client.post(CHAT, messages=messages, **THINKS, **as_chat(**SAMPLED))
    assert content_of(found["output"][-1]) == again["choices"][0]["message"]["content"]
    assert found["usage"]["input_tokens"] == again["usage"]["prompt_tokens"]


def test_structured_texts_match(client: Client) -> None:
    described = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    made = client.post(RESPONSES, input="Hi", text={"format": described, "verbosity": "low"}, **SAMPLED, **THINKS)
    assert json.loads(content_of(made["output"][-1]))["a"] in ("x", "y")
    assert made["text"] == {"format": described}
    anything = client.post(RESPONSES, input="Hi", text={"format": {"type": "text"}}, **SAMPLED)
    assert anything["output"] != made["output"]


def test_a_failure_is_the_last_event() -> None:
    request = SHAPES[RESPONSES].parse({"input": "Hi", "stream": True}, SamplingParams())
    writer = SHAPES[RESPONSES].writer(request, Reply("1", "m", 0, str))
    written = writer.error(ResultError("logits are not finite")).decode().split("\n\n")[:-1]
    created, failed = (json.loads(event.partition("data: ")[2]) for event in written)
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    assert (failed["response"]["status"], failed["response"]["id"]) == ("failed", created["response"]["id"])
    assert failed["response"]["error"] == {"code": "server_error", "message": "logits are not finite"}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"},
                                                    {"type": "input_text", "text": "d"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "e"}], "encrypted_content": None},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "f", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
    {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "g"}]},
    {"type": "function_call_output", "call_id": "1", "output": "h"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "i"}]},
    {"role": "user", "content": "j"},
]  # fmt: skip


def test_items_become_messages(client: Client) -> None:
    body = {"instructions": "a", "input": CONVERSATION}
    request = SHAPES[RESPONSES].parse(body, client.llm.requests.defaults)
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name, arguments in (("1", "add", '{"a": 1}'), ("2", "weather", "{}"))
    ]
    assert request.messages == [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "f", "reasoning_content": "e", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "g"},
        {"role": "tool", "tool_call_id": "1", "content": "h"},
        {"role": "assistant", "content": "i"},
        {"role": "user", "content": "j"},
    ]


def user(content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": content}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def schema(value: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": value}}}


ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "'previous_response_id' is not supported"),
    ({"conversation": {"id": "c"}}, "conversation", "is not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
    ({"background": True}, "background", "background=True is not supported"),
    ({"truncation": "auto"}, "truncation", "truncation='auto' is not supported"),
    ({"messages": HI}, "messages", "the field 'messages' is not supported for /v1/responses"),
    ({"n": 2}, "n", "the field 'n' is not supported"),
    ({"input": None}, "input", "input is missing"),
    ({"input": []}, "input", "input=[] is not supported"),
    ({"input": ["a"]}, "input", "input[0]='a' is not supported"),
    (item(role="tool", content="a"), "input", "is not supported: give a message with the role user"),
    (item(type="item_reference", id="msg_1"), "input", "input[0]={'type': 'item_reference'"),
    (user(5), "input", "input[0].content=5 is neither a string nor a list of parts"),
    (user([{"type": "input_image", "image_url": "x"}]), "input", "models here read text only"),
    (user([{"type": ["a"]}]), "input", "input[0].content[0]="),
    (item(type="function_call", call_id="1", name="f"), "input", "input[0]: arguments=None is not a string"),
    (item(type="reasoning", encrypted_content="x"), "input", "encrypted_content cannot be read"),
    ({"instructions": 5}, "instructions", "instructions=5 is not a string"),
    ({"input": "a " * 3000}, "input", "the maximum context length is 2048 tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
    ({"temperature": -1}, "temperature", "temperature=-1"),
    ({"top_logprobs": 2}, "top_logprobs", "the field 'top_logprobs' is not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include", "is not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "not supported: use include_obfuscation"),
    ({"reasoning": "high"}, "reasoning", "reasoning='high' is not an object"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort", "reasoning.effort=1"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "text.verbosity='loud'"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "text.format.type='yaml'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema={} has no schema"),
    (schema({"$ref": "#/x"}), "text.format", "text.format"),
    ({"text": {"format": {"type": "json_object", "x": 1}}}, "text.format", "text.format: the field 'x'"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "text.format", "text.format: the field 'x'"),
    ({"tools": [{}]}, "tools", "tools[0]: {} is not supported: give a list"),
    ({"tools": 5}, "tools", "tools=5 is not a list"),
    ({"tools": TWO}, "tools", "tools[0]: function has the unknown field 'function'"),
    ({"tools": FLAT * 2}, "tools", "tools[2]: name='add' is the name of another tool"),
    ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice", "is not supported: use none, auto"),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice", "tool_choice='sub'"),
    ({"parallel_tool_calls": "x"}, "parallel_tool_calls", "parallel_tool_calls='x'"),
    ({"model": "gpt-9"}, "model", "does not exist"),
]  # fmt: skip


@pytest.mark.parametrize("body, param, message", ERRORS, ids=lambda x: json.dumps(x)[:50])
def test_errors_name_the_field(client: Client, body: dict[str, Any], param: str, message: str) -> None:
    for stream in (False, True):
        if stream and "stream_options" in body:
            continue
        status, error = client.error(RESPONSES, **{"input": "Hi", "stream": stream, **body})
        assert (status, error["param"]) == (404 if param == "model" else 400, param)
        assert message in error["message"]
        assert (error["code"] == "context_length_exceeded") == ("maximum context length" in message)
        assert "\n" not in error["message"]
    assert client.async_llm.num_unfinished_requests == 0


def test_values_of_any_type_are_answered(client: Client) -> None:
    for name, field in TABLES[RESPONSES].items():
        for value in (5, -1, 1e300, "x", "", [], {}, [5], {"type": 5}, [{"type": "function"}], True, False):
            body = {"input": "Hi", "max_output_tokens": 1, name: value}
            response = client.request("POST", RESPONSES, json=body)
            assert response.status_code in (200, 400, 404), (name, value, response.text)
            if field.doc == "Accepted without effect." and field.neutral is None:
                assert response.status_code == 200
    assert client.async_llm.num_unfinished_requests == 0


def test_fields_that_only_inform_are_accepted(client: Client) -> None:
    plain = {"input": "Hi", "temperature": 0, "max_output_tokens": 5}
    made = client.post(RESPONSES, **plain, cache_prompt=True, keep_alive=5, seed=-1, stop="")
    assert without_ids(made["output"]) == without_ids(client.post(RESPONSES, **plain)["output"])


def test_null_is_the_default(client: Client) -> None:
    body = {"input": "Hi", **SAMPLED}
    made = client.post(RESPONSES, **{**dict.fromkeys([*TABLES[RESPONSES], *SAMPLING_OF[RESPONSES]]), **body})
    assert without_ids(made["output"]) == without_ids(client.post(RESPONSES, **body)["output"])
