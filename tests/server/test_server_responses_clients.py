"""Unmodified clients of /v1/responses: openai-python, and openai-agents, which also uses /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai", reason="the extra test is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.chat import HI  # noqa: E402
from helpers.server_process import ServerProcess, serving  # noqa: E402
from helpers.tools import TWO, check_call, tools_folder  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402

FLAT: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TWO]
PLAIN: dict[str, Any] = {"seed": 3, "enable_thinking": False}
"""Fields that are not OpenAI's."""
OPTIONS: dict[str, Any] = {"model": "tiny", "max_output_tokens": 100, "extra_body": PLAIN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools_folder(tmp_path_factory.mktemp("clients") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--served-model-name", "tiny") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_text_is_that_of_the_library(client: Any, folder: Path) -> None:
    (expected,) = LLM(str(folder)).chat(HI, SamplingParams(max_tokens=20, seed=3), enable_thinking=False)
    options = {**OPTIONS, "max_output_tokens": 20}
    made = client.responses.create(input="Hi", **options)
    assert made.output_text == expected.outputs[0].text
    assert made.usage.input_tokens == len(expected.prompt_token_ids)
    with client.responses.stream(input="Hi", **options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == made.output_text
    events = list(client.responses.create(input="Hi", stream=True, **options))
    assert events[-1].response.output_text == made.output_text


def test_a_required_call_then_its_result(client: Any) -> None:
    options = {**OPTIONS, "tools": FLAT, "parallel_tool_calls": False}
    made = client.responses.create(input="Hi", tool_choice="required", **options)
    (call,) = made.output
    arguments = check_call(call.name, call.arguments, TWO)
    with client.responses.stream(input="Hi", tool_choice="required", **options) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, deltas, streamed.parsed_arguments) == (call.name, call.arguments, arguments)
    items = [*HI, *made.output, {"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
    answer = client.responses.create(input=items, tool_choice="none", **options)
    assert answer.output_text
    named = client.responses.create(input="Hi", tool_choice={"type": "function", "name": "weather"}, **options)
    assert [call.name for call in named.output] == ["weather"]


def test_reasoning_is_streamed_and_sent_back(client: Any) -> None:
    options = {**OPTIONS, "extra_body": {"seed": 3, "thinking_token_budget": 5}}
    with client.responses.stream(input="Hi", reasoning={"effort": "high"}, **options) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
    made = client.responses.create(input="Hi", reasoning={"effort": "high"}, **options)
    assert made.output[0].content[0].text == deltas != ""
    items = [*HI, *made.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(input=items, **options).usage.input_tokens > made.usage.input_tokens


def test_a_structured_answer_is_parsed(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Answer", city=(Literal["Turin", "Oslo"], ...), sure=(bool, ...))
    parsed = client.responses.parse(input="Hi", text_format=model, **OPTIONS).output_parsed
    assert (parsed.city in ("Turin", "Oslo"), type(parsed.sure)) == (True, bool)


def test_refused_and_failed_requests(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
        client.responses.create(input="Hi", previous_response_id="resp_1", **OPTIONS)
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="Hi", tools=[{"type": "function", "name": "a b"}], **OPTIONS)
    assert refused.value.param == "tools"


# openai-agents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_its_tool(server: ServerProcess, kind: str, streamed: bool) -> None:
    """The first answer must be a call; the agent sends its result, and the second answer is what `choice` permits."""
    agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-clients")
    pydantic = pytest.importorskip("pydantic")
    agents.set_tracing_disabled(True)
    answers = pydantic.create_model("Answer", city=(Literal["Turin", "Oslo"], ...))
    called: list[str] = []

    def weather(city: Literal["Turin", "Oslo"]) -> str:
        called.append(city)
        return "Rain, 14 degrees."

    tool = agents.function_tool(weather)

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
            settings = agents.ModelSettings(
                tool_choice="required", max_tokens=150, parallel_tool_calls=False, extra_body=PLAIN
            )
            agent = agents.Agent(
                name="a", instructions="Be brief.", model=getattr(agents, kind)(model="tiny", openai_client=made),
                model_settings=settings, tools=[tool], output_type=answers,
            )  # fmt: skip
            if not streamed:
                return await agents.Runner.run(agent, "Hi", max_turns=4)
            result = agents.Runner.run_streamed(agent, "Hi", max_turns=4)
            async for _ in result.stream_events():
                pass
            return result

    result = asyncio.run(run())
    assert called[0] in ("Turin", "Oslo")
    assert result.final_output.city in ("Turin", "Oslo")
    outputs = [item.raw_item for item in result.new_items if item.type == "tool_call_output_item"]
    assert [output["output"] for output in outputs] == ["Rain, 14 degrees."] * len(called)
    assert json.loads(result.new_items[0].raw_item.arguments) == {"city": called[0]}
