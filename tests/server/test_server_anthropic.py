"""The anthropic package against the server, unmodified: what it makes of /v1/messages and count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="the extra test-clients is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.server_process import ServerProcess, serving  # noqa: E402
from helpers.tools import TWO, check_call, tools_folder  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": f["name"], "input_schema": f["parameters"]} for f in (tool["function"] for tool in TWO)]
GREEDY: dict[str, Any] = {"temperature": 0}  # the package has no argument for it any more
PLAIN: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "thinking": {"type": "disabled"}, "extra_body": GREEDY}
FORCED = {**PLAIN, "max_tokens": 150, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools_folder(tmp_path_factory.mktemp("anthropic") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--served-model-name", "tiny", "--api-key", "a-key") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, auth_token="a-key", max_retries=0, timeout=60) as made:
        yield made


def test_text_is_that_of_the_library(client: Any, folder: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    (expected,) = LLM(str(folder)).chat(HI, params, enable_thinking=False)
    made = client.messages.create(messages=HI, **PLAIN)
    assert [block.text for block in made.content] == [expected.outputs[0].text]
    assert (made.stop_reason, made.usage.input_tokens) == ("max_tokens", len(expected.prompt_token_ids))
    with client.messages.stream(messages=HI, **PLAIN) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == expected.outputs[0].text
    assert final.usage == made.usage


def test_a_forced_call_and_its_result(client: Any) -> None:
    made = client.messages.create(messages=HI, **FORCED)
    (call,) = made.content
    assert (made.stop_reason, call.type) == ("tool_use", "tool_use")
    check_call(call.name, json.dumps(call.input), TWO)
    with client.messages.stream(messages=HI, **FORCED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert json.loads("".join(pieces)) == streamed.content[0].input == call.input
    assert streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    messages = [*HI, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    options = {**PLAIN, "tools": TOOLS, "tool_choice": {"type": "none"}}
    answer = client.messages.create(messages=messages, **options)
    assert answer.content[0].text
    counted = client.messages.count_tokens(
        model="tiny", messages=messages, tools=TOOLS, tool_choice={"type": "none"}, thinking={"type": "disabled"}
    )
    assert counted.input_tokens == answer.usage.input_tokens


def test_thinking_is_sent_back(client: Any) -> None:
    options = {**PLAIN, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 5}}
    made = client.messages.create(messages=HI, **options)
    assert [block.type for block in made.content] == ["thinking", "text"]
    with client.messages.stream(messages=HI, **options) as stream:
        streamed = stream.get_final_message().content
    assert (streamed[0], streamed[1].text) == (made.content[0], made.content[1].text)
    first, second = (
        client.messages.create(messages=[*HI, {"role": "assistant", "content": content}, *HI], **options)
        for content in (made.content, streamed)
    )
    assert first.content == second.content


def test_structured_output(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    made = client.messages.create(messages=HI, output_config=config, **PLAIN)
    assert json.loads(made.content[0].text)["a"] in (1, 2)


def test_errors_are_the_packages_exceptions(client: Any, server: ServerProcess) -> None:
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' does not exist"):
        client.messages.create(messages=HI, **{**PLAIN, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.type='any' needs tools"):
        client.messages.create(messages=HI, tool_choice={"type": "any"}, **PLAIN)
    wrong = anthropic.Anthropic(base_url=server.url, auth_token="b-key", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError, match="API key"):
        wrong.messages.create(messages=HI, **PLAIN)
    headers = {"X-Api-Key": "a-key"}
    with anthropic.Anthropic(base_url=server.url, api_key="a-key", default_headers=headers, max_retries=0) as keyed:
        assert keyed.messages.create(messages=HI, **PLAIN).content
