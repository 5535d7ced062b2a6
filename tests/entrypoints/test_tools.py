"""Chats with tools and reasoning: LLM.chat, conversations and AsyncLLM."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from helpers.answers import random_object
from helpers.chat import HI
from helpers.models import refuses
from helpers.tools import TWO, check_call, tools_folder
from nanoinfer import LLM, AsyncLLM, SamplingParams
from nanoinfer.outputs import CallDelta, ChatMessage, ContentDelta, ReasoningDelta

pytest.importorskip("llguidance", reason="the extra structured is not installed")

CALLS: dict[str, Any] = {"tools": TWO, "parallel_tool_calls": False, "enable_thinking": False}
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=150)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(tools_folder(tmp_path_factory.mktemp("tools") / "tiny")), engine="native", max_num_seqs=8)


def message(output: Any) -> ChatMessage:
    found = output.outputs[0].message
    assert isinstance(found, ChatMessage)
    return found


# Calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", "weather", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_calls_that_are_required_match_their_schemas(llm: LLM, choice: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=150, n=4)
    (output,) = llm.chat(HI, params, tool_choice=choice, **CALLS)
    names = set()
    for o in output.outputs:
        assert o.finish_reason == "stop"
        assert o.message is not None
        assert (o.message.content, o.message.reasoning, len(o.message.tool_calls)) == (None, None, 1)
        (call,) = o.message.tool_calls
        assert call.id.startswith("call_")
        check_call(call.name, call.arguments, TWO)
        assert o.text.startswith(f'<tool_call>\n{{"name": "{call.name}", "arguments": {{')
        names.add(call.name)
    wanted = {"required": {"add", "weather"}, "weather": {"weather"}}
    assert names <= wanted.get(choice if isinstance(choice, str) else "", {"add"})


def test_text_without_a_call_is_content(llm: LLM) -> None:
    free = llm.chat(HI, PARAMS)[0].outputs[0]
    assert llm.chat(HI, PARAMS, tools=TWO, tool_choice="none")[0].outputs[0].message is not None
    assert (free.message, free.num_reasoning_tokens) == (ChatMessage(free.text.strip() and message_text(free)), 0)


def message_text(o: Any) -> str:
    return str(o.message.content)


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_every_call_of_random_schemas_parses_and_validates(llm: LLM, draft: str | None) -> None:
    rng = random.Random(5)
    llm.set_draft(draft)
    checked = 0
    try:
        for i in range(6):
            schemas = [random_object(rng) for _ in range(rng.randint(1, 3))]
            tools: list[dict[str, Any]] = [
                {"type": "function", "function": {"name": f"f{k}", "parameters": schema}}
                for k, schema in enumerate(schemas)
            ]
            params = SamplingParams(temperature=1.0, seed=i, n=4, max_tokens=400)
            for o in llm.chat(HI, params, **{**CALLS, "tools": tools}, tool_choice="required")[0].outputs:
                assert o.message is not None
                for call in o.message.tool_calls:
                    if o.finish_reason == "stop":
                        check_call(call.name, call.arguments, tools)
                        checked += 1
    finally:
        llm.set_draft(None)
    assert checked >= 20


def test_a_preempted_call_is_the_same(llm: LLM, tmp_path: Path) -> None:
    small = LLM(
        str(tools_folder(tmp_path / "small")), engine="native", max_num_seqs=6, kv_cache_memory=280_000,
        max_num_batched_tokens=64, max_model_len=704,
    )  # fmt: skip
    options: dict[str, Any] = {**CALLS, "tool_choice": "required"}
    each = [SamplingParams(temperature=1.0, seed=i, max_tokens=150) for i in range(6)]
    together = small.chat([HI] * 6, each, **options)
    assert small.core.scheduler.stats.num_preempted > 0
    for output, params in zip(together, each, strict=True):
        assert output.outputs[0].token_ids == llm.chat(HI, params, **options)[0].outputs[0].token_ids


def test_a_conversation_with_results(llm: LLM) -> None:
    conversation = llm.conversation("Be brief.", **CALLS)
    answer = conversation.send("Add.", PARAMS, tool_choice="add")
    deltas = list(answer.deltas())
    assert isinstance(deltas[0], CallDelta)
    assert (deltas[0].name, deltas[0].arguments) == ("add", "")
    said = conversation.messages[-1]
    (call,) = said["tool_calls"]
    assert (said["content"], call["function"]["name"]) == (None, "add")
    assert "".join(d.arguments for d in deltas if isinstance(d, CallDelta)) == call["function"]["arguments"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
    text = "".join(conversation.send([result], PARAMS, tool_choice="none"))
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.messages[-1]["content"].strip() == text.strip()
    prompt = llm.decode(llm.apply_chat_template(conversation.messages[:4], tools=TWO))
    arguments = json.dumps(json.loads(call["function"]["arguments"]))
    assert f'{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>' in prompt  # as an object
    assert '"name": "weather"' in prompt
    refuses(lambda: conversation.send([{**result, "tool_call_id": None}]), "tool_call_id is missing")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
BAD: list[tuple[list[Any], str]] = [
    ([{"role": "tool", "content": "a"}], "tool_call_id is missing"),
    ([{"role": "tool", "content": "a", "tool_call_id": ["2"]}], "tool_call_id ['2'] is not a string"),
    ([{"role": "assistant", "tool_calls": {}, "content": 3}], "content=3 is neither"),
    ([{"role": "assistant", "tool_calls": [3]}], "tool_calls: 3 is not {'id'"),
    ([{"role": "assistant", "tool_calls": [CALL] * 129}], "is not a list of at most 128 calls"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}], "tool_calls: id=3"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": [3]}}]}], "arguments=[3]"),
    ([{"role": "assistant", "content": "a", "reasoning_content": 3}], "reasoning_content=3 is not a string"),
]


@pytest.mark.parametrize("messages, error", BAD, ids=lambda x: str(x)[:40])
def test_malformed_calls_and_results(llm: LLM, messages: list[Any], error: str) -> None:
    refuses(lambda: llm.chat([*HI, *messages], tools=TWO), error)


def test_tools_that_cannot_be_used(llm: LLM) -> None:
    bad = {"name": "bad", "parameters": {"properties": {"a": {"$ref": "#/x"}}}, "strict": True}
    refuses(lambda: llm.chat(HI, tools=[*TWO, {"function": bad}], tool_choice="required"), "tool 'bad': ")
    refuses(lambda: llm.chat(HI, tools=TWO, tool_choice="sub"), "tool_choice='sub' is unknown")
    refuses(lambda: llm.chat(HI, tool_choice="required"), "tool_choice='required' needs tools")
    refuses(lambda: llm.chat(HI, tools=[*TWO, TWO[0]]), "tools[2]: name='add' is the name of another tool")
    refuses(lambda: llm.chat(HI, tools=TWO, chat_template_kwargs={"tools": []}), "tools is given twice")
    refuses(lambda: llm.chat(HI, parallel_tool_calls=1), "parallel_tool_calls=1 is not a bool")


UNCOMPILED: dict[str, dict[str, Any]] = {
    "unsatisfiable": {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 4}}, "required": ["a"]},
    "regex": {"properties": {"a": {"type": "string", "pattern": "("}}},
}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_that_cannot_be_compiled_takes_any_object(
    llm: LLM, choice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other tools stay constrained. Each tool has one warning."""
    tools = [{"function": {"name": f"{name}_{choice}", "parameters": s}} for name, s in UNCOMPILED.items()]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, n=4)
    options: dict[str, Any] = {**CALLS, "tools": [*TWO, *tools], "tool_choice": choice}
    for _ in range(2):
        for o in llm.chat(HI, params, **options)[0].outputs:
            assert o.error is None
            assert o.message is not None
            for call in o.message.tool_calls if o.finish_reason == "stop" else ():
                assert type(json.loads(call.arguments)) is dict
                if call.name in ("add", "weather"):
                    check_call(call.name, call.arguments, TWO)
    named = {**options, "tool_choice": f"regex_{choice}"}
    (output,) = llm.chat(HI, params, **named)
    assert all(o.text.startswith(f'<tool_call>\n{{"name": "regex_{choice}"') for o in output.outputs)
    warnings = [r.getMessage().partition(": the arguments of its calls may be any object: ") for r in caplog.records]
    assert [(tool, why[:20]) for tool, _, why in warnings if why] == [
        (f"tool 'unsatisfiable_{choice}'", "failed to compile JS"),
        (f"tool 'regex_{choice}'", "failed to compile JS"),
    ]


# Reasoning ----------------------------------------------------------------------------------------------------


def test_a_budget_ends_the_reasoning(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=60)
    (output,) = llm.chat(HI, params, enable_thinking=True, thinking_token_budget=6)
    found = output.outputs[0]
    assert str(output.prompt).endswith("<think>\n")
    assert "</think>" in found.text
    assert found.message is not None
    assert "</think>" not in f"{found.message.content}{found.message.reasoning}"
    before = llm.decode(found.token_ids[: found.num_reasoning_tokens])
    assert before.endswith("</think>")
    assert len(llm.get_tokenizer().encode("</think>")) + 6 >= (found.num_reasoning_tokens or 0)
    assert llm.chat(HI, params, enable_thinking=False)[0].outputs[0].num_reasoning_tokens == 0
    refuses(
        lambda: llm.chat(HI, params, thinking_token_budget=6, chat_template="{{ messages[0].content }}"),
        "thinking_token_budget=6: the chat template has no reasoning",
    )


def test_a_structured_answer_follows_the_reasoning(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=80, structured_outputs={"choice": ["yes", "no"]})  # type: ignore[arg-type]
    found = message(llm.chat(HI, params, enable_thinking=True, thinking_token_budget=6)[0])
    assert found.content in ("yes", "no")
    assert message(llm.chat(HI, params, enable_thinking=False)[0]).content in ("yes", "no")


def test_a_continued_message_begins_where_it_ended(llm: LLM) -> None:
    """Within its reasoning."""
    params = SamplingParams(seed=2, max_tokens=80, structured_outputs={"choice": ["yes", "no"]})  # type: ignore[arg-type]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    last: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": "Hm"}
    (output,) = llm.chat([*HI, last], params, thinking_token_budget=6, **options)
    assert str(output.prompt).endswith("<think>\nHm")
    assert message(output).reasoning
    assert message(output).content in ("yes", "no")


def test_a_response_template_reads_the_answers(tmp_path: Path) -> None:
    """Its markers are not those of the chat template. The grammar follows the latter."""
    folder = tools_folder(tmp_path / "own")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    fields = {"thinking": {"open": "<", "close": "/think>"}, "content": {"close": "<|im_end|>"}}
    config["response_template"] = {"start_anchor": "assistant\n", "fields": fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    own = LLM(str(folder), engine="native")
    choices = ["a<b/think>c", "a<b"]
    for choice, expected in zip(choices, (("ac", "b"), ("a", "b")), strict=True):
        params = SamplingParams(max_tokens=30, structured_outputs={"choice": [choice]})  # type: ignore[arg-type]
        found = message(own.chat(HI, params, enable_thinking=False)[0])
        assert (str(found.content).replace("\n", ""), found.reasoning) == expected


def test_reasoning_may_take_all_tokens_but_for_its_budget(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=150)
    options = {**CALLS, "tool_choice": "add", "enable_thinking": True}
    (without,) = llm.chat(HI, params, **options)[0].outputs
    assert without.message is not None
    assert (without.finish_reason, without.num_reasoning_tokens) == ("length", 150)
    assert (without.message.content, without.message.tool_calls) == ("", ())
    (within,) = llm.chat(HI, params, thinking_token_budget=20, **options)[0].outputs
    assert within.message is not None
    assert (within.finish_reason, [call.name for call in within.message.tool_calls]) == ("stop", ["add"])


# AsyncLLM -----------------------------------------------------------------------------------------------------


async def test_deltas_of_async_llm_are_the_message(llm: LLM) -> None:
    options: dict[str, Any] = {
        "tools": TWO, "tool_choice": "required", "enable_thinking": True, "thinking_token_budget": 5,
    }  # fmt: skip
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=120, n=2)
    (expected,) = llm.chat(HI, params, **options)
    async_llm = AsyncLLM.from_llm(llm)
    for kind in ("delta", "cumulative", "final_only"):
        parts: list[list[Any]] = [[], []]
        last: dict[int, Any] = {}
        async for output in async_llm.chat(HI, params, output_kind=kind, **options):
            for o in output.outputs:
                parts[o.index] += o.message_deltas or []
                last[o.index] = o if o.message is not None else last.get(o.index)
        for i, whole in enumerate(expected.outputs):
            made, wanted = last[i].message, whole.message
            assert wanted is not None
            assert (made.content, made.reasoning) == (wanted.content, wanted.reasoning)
            calls = [(c.name, c.arguments) for c in wanted.tool_calls]
            assert [(c.name, c.arguments) for c in made.tool_calls] == calls
            assert last[i].num_reasoning_tokens == whole.num_reasoning_tokens
            if kind == "delta":
                assert "".join(d.text for d in parts[i] if isinstance(d, ReasoningDelta)) == (made.reasoning or "")
                assert "".join(d.text for d in parts[i] if isinstance(d, ContentDelta)) == (made.content or "")
                texts = ["" for _ in calls]
                for d in parts[i]:
                    if isinstance(d, CallDelta):
                        texts[d.index] += d.arguments
                assert texts == [arguments for _, arguments in calls]
    async_llm.shutdown()


def test_a_failing_request_disturbs_no_other(llm: LLM) -> None:
    expected = message(llm.chat(HI, PARAMS, tool_choice="add", **CALLS)[0]).tool_calls[0]
    bad = [{"function": {"name": "bad", "parameters": {"properties": {"a": {"$ref": "#/x"}}}, "strict": True}}]

    async def ask(async_llm: AsyncLLM, **options: Any) -> Any:
        async for output in async_llm.chat(HI, PARAMS, output_kind="final_only", **options):
            return output

    async def run() -> list[Any]:
        async_llm = AsyncLLM.from_llm(llm)
        good = [ask(async_llm, tool_choice="add", **CALLS) for _ in range(3)]
        fails = [ask(async_llm, tools=bad, tool_choice="required") for _ in range(3)]
        found = await asyncio.gather(*good, *fails, return_exceptions=True)
        assert async_llm.num_unfinished_requests == 0
        async_llm.shutdown()
        return found

    found = asyncio.run(run())
    assert all("'bad'" in str(error) for error in found[3:])
    for output in found[:3]:
        (call,) = output.outputs[0].message.tool_calls
        assert (call.name, call.arguments) == (expected.name, expected.arguments)
