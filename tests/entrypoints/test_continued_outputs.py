"""`SamplingParams.output_token_ids`: an output that was cut is continued, and equals the one that was not.

An output is cut after each of its tokens. What a stream released up to there, and what the stream of the continued
request releases, are the whole text; tokens, log-probabilities and the end are those of the uninterrupted output.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers import async_llm
from helpers.chat import HI, chat_folder
from helpers.environment import ROOT
from helpers.errors import refuses
from helpers.models import TINY, make_folder
from helpers.tools import TWO, tools_folder
from nanoinfer import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.engines.base import StepBatch
from nanoinfer.outputs import CallDelta, CompletionOutput, Delta
from nanoinfer.structured.masks import OutputGrammar

CHARS = '\n abcdefghijklmnopqrstuvwxyzABC0123456789{}[]",:.-_\\/'
END = 0
CONFIG = replace(TINY, vocab_size=len(CHARS), block_size=64, eos_token_ids=(END,))
PROMPT = "to be or to be"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
}
structured = pytest.mark.skipif(find_spec("llguidance") is None, reason="the extra structured is not installed")
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=24, temperature=0),
    "sampled": SamplingParams(**SAMPLED, ignore_eos=True),
    "controls": SamplingParams(
        **SAMPLED, top_k=30, top_p=0.95, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5,
        repetition_penalty=1.3, logit_bias={3: 2.0}, bad_words=("ab", "or"), ignore_eos=True,
    ),
    "greedy penalised": SamplingParams(max_tokens=24, temperature=0, frequency_penalty=1.5, repetition_penalty=1.2),
    "min_tokens": SamplingParams(**SAMPLED, min_tokens=9, stop_token_ids=(3, 5, 7, 20, 21, 22, 23)),
    "logprobs": SamplingParams(**SAMPLED, logprobs=2, ignore_eos=True),
    "context": SamplingParams(max_tokens=None, temperature=1.0, seed=6, ignore_eos=True),
    "slide": SamplingParams(max_tokens=80, temperature=1.0, seed=7, overflow="slide", ignore_eos=True),
    "slide by one": SamplingParams(max_tokens=60, temperature=0, overflow="slide", slide_stride=1, ignore_eos=True),
}  # fmt: skip
GRAMMARS: dict[str, SamplingParams] = {
    "json": SamplingParams(**{**SAMPLED, "max_tokens": 40}, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    "choice": SamplingParams(**SAMPLED, structured_outputs=StructuredOutputsParams(choice=("yes", "no idea"))),
}
METHODS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "together": {},
    "chunked prefill": {"max_num_batched_tokens": 7},
    "unshared": {"enable_prefix_caching": False},
    "prompt-lookup": {"draft": "prompt-lookup", "speculate_k": 3},
    "draft model": {"draft": "self:1", "speculate_k": 3},
    "preempted": {"kv_cache_memory": 40_000, "enable_prefix_caching": False},
    "static": {"engine": "static"},
    "paged": {"engine": "paged"},
}


def make_llm(folder: Path, **options: Any) -> LLM:
    given = {"engine": "native", "max_num_seqs": 8, **options}
    return LLM(str(folder), device="cpu", dtype="float32", **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("continued") / "tiny", CONFIG, chars=CHARS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder)


def streamed(llm: LLM, prompt: Any, params: list[SamplingParams]) -> list[tuple[CompletionOutput, list[Delta]]]:
    """Return the whole output and the deltas of each request."""
    ids, stream = llm.stream_outputs([prompt] * len(params), params)
    deltas: dict[int, list[Delta]] = {i: [] for i in ids}
    outputs: dict[int, CompletionOutput] = {}
    for item in stream:
        if isinstance(item, RequestOutput):
            assert isinstance(item.request_id, int)
            (outputs[item.request_id],) = item.outputs
        else:
            deltas[item.request_id].append(item)
    return [(outputs[i], deltas[i]) for i in ids]


def check_logprobs(o: CompletionOutput, whole: CompletionOutput, cut: int, *, exact: bool) -> None:
    if whole.logprobs is None:
        assert o.logprobs is None
    elif exact:
        assert o.logprobs == whole.logprobs[cut:], cut
    else:
        values, expected = (
            [[(token, v.rank, v.decoded_token) for token, v in step.items()] for step in steps]
            for steps in (o.logprobs or [], whole.logprobs[cut:])
        )
        assert values == expected, cut
        values, expected = (
            [v.logprob for step in steps for v in step.values()] for steps in (o.logprobs or [], whole.logprobs[cut:])
        )
        assert values == pytest.approx(expected, abs=1e-3), cut


def check_continued(whole_by: LLM, continued_by: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    """Cut an output after each of its tokens and continue it with another model. Return the uninterrupted output."""
    ((whole, deltas),) = streamed(whole_by, prompt, [params])
    assert [d.num_tokens for d in deltas] == [1] * len(whole.token_ids)
    cuts = range(1, len(whole.token_ids) + 1)
    parts = streamed(continued_by, prompt, [replace(params, output_token_ids=whole.token_ids[:cut]) for cut in cuts])
    for cut, (o, new) in zip(cuts, parts, strict=True):
        assert "".join(d.text for d in (*deltas[:cut], *new)) == whole.text, cut
        assert (o.text, o.token_ids) == (whole.text, whole.token_ids), cut
        assert (o.finish_reason, o.stop_reason, o.error) == (whole.finish_reason, whole.stop_reason, None), cut
        assert sum(d.num_tokens for d in new) == len(whole.token_ids) - cut
        check_logprobs(o, whole, cut, exact=continued_by.engine_name == "native")
        if o.draft_accepted is not None:
            assert o.draft_accepted[:cut] == [False] * cut
            assert len(o.draft_accepted) == len(whole.token_ids)
    return whole


@pytest.mark.parametrize("name", [*PARAMS, *(pytest.param(name, marks=structured) for name in GRAMMARS)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow_if(lambda method, name: method in ("static", "paged") and name != "greedy")
def test_a_cut_output_is_continued(llm: LLM, folder: Path, method: str, name: str) -> None:
    params = {**PARAMS, **GRAMMARS}[name]
    continued_by = make_llm(folder, **METHODS[method])
    whole = check_continued(llm, continued_by, PROMPT, params)
    assert len(whole.token_ids) > 1
    if method == "preempted" and len(whole.token_ids) > 20:
        assert continued_by.core.scheduler.stats.num_preempted > 0
    if method == "prompt-lookup" and name == "greedy":
        assert continued_by.core.scheduler.stats.num_output_tokens > 0


def stop_strings(text: str) -> tuple[str, ...]:
    """Return a string in the middle of a text, which spans tokens, and one that only begins there."""
    return text[10:13], text[4:7] + "~", text[9:11] + "~~"


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("name", ["greedy", "sampled", "controls"])
def test_a_stop_string_may_be_on_both_sides_of_the_cut(llm: LLM, folder: Path, name: str, included: bool) -> None:
    (output,) = llm.generate(PROMPT, PARAMS[name])
    params = replace(PARAMS[name], stop=stop_strings(output.outputs[0].text), include_stop_str_in_output=included)
    whole = check_continued(llm, make_llm(folder), PROMPT, params)
    assert (whole.finish_reason, whole.text.endswith(str(whole.stop_reason))) == ("stop", included)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_character_may_be_on_both_sides_of_the_cut(tmp_path: Path, temperature: float) -> None:
    """The tokens of this model are bytes, most of which make no characters."""
    folder = chat_folder(tmp_path / "bytes")
    bias = dict.fromkeys(range(100, 250), 6.0)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, logit_bias=bias, ignore_eos=True)
    whole = check_continued(make_llm(folder), make_llm(folder), "Hi", params)
    assert "\ufffd" in whole.text or temperature == 0


@pytest.mark.parametrize("cut", [1, 5, 24])
def test_neighbours_and_samples_are_undisturbed(llm: LLM, cut: int) -> None:
    params = PARAMS["sampled"]
    alone = llm.generate([PROMPT, "a", [5, 6, 7]], params)
    ids = alone[0].outputs[0].token_ids
    mixed = llm.generate(
        [PROMPT, "a", [5, 6, 7]], [replace(params, output_token_ids=ids[:cut]), replace(params, n=3), params]
    )
    assert mixed[0].outputs == alone[0].outputs
    assert mixed[1].outputs[0] == alone[1].outputs[0]
    assert mixed[2].outputs == alone[2].outputs


def test_the_given_tokens_share_the_prefix_that_is_kept(folder: Path) -> None:
    llm = make_llm(folder)
    params = replace(PARAMS["sampled"], max_tokens=40)
    (whole,) = llm.generate(PROMPT, params)
    before = llm.core.scheduler.stats.num_shared_tokens
    (again,) = llm.generate(PROMPT, replace(params, output_token_ids=whole.outputs[0].token_ids[:30]))
    assert again.outputs == whole.outputs
    assert llm.core.scheduler.stats.num_shared_tokens - before == len(PROMPT) + 29  # the last gives the next logits
    assert again.num_cached_tokens == len(PROMPT)
    assert again.metrics.num_output_tokens == 40
    assert 0 < again.metrics.ttft_sec < again.metrics.total_sec


def test_the_pages_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sampling.md").read_text(), re.S)
    exec(program, {})


# AsyncLLM -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampled", "logprobs"])
@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
def test_outputs_of_event_loops(llm: LLM, kind: str, name: str) -> None:
    params = PARAMS[name]
    ((whole, deltas),) = streamed(llm, PROMPT, [params])

    async def main(model: AsyncLLM) -> list[list[CompletionOutput]]:
        found = []
        for cut in (1, 7, 23, 24):
            given = replace(params, output_token_ids=whole.token_ids[:cut])
            found.append([o async for out in model.generate(PROMPT, given, output_kind=kind) for o in out.outputs])
        return found

    for cut, outputs in zip((1, 7, 23, 24), async_llm.run(main, llm), strict=True):
        last, values = outputs[-1], whole.logprobs
        assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
        if kind == "delta":
            assert [i for o in outputs for i in o.token_ids] == whole.token_ids[cut:]
            assert "".join([d.text for d in deltas[:cut]] + [o.text for o in outputs]) == whole.text
            assert values is None or [v for o in outputs for v in o.logprobs or ()] == values[cut:]
            continue
        assert (last.text, last.token_ids) == (whole.text, whole.token_ids)
        assert last.logprobs == (None if values is None else values[cut:])
        for o in outputs:
            assert whole.text.startswith(o.text)
            assert len(o.token_ids) >= cut
            assert o.logprobs is None or len(o.logprobs) == len(o.token_ids) - cut


def test_a_request_that_waits_and_is_aborted(llm: LLM) -> None:
    params = replace(PARAMS["sampled"], output_token_ids=(3, 4, 5), max_tokens=None)

    async def main(model: AsyncLLM) -> CompletionOutput:
        stream = model.generate(PROMPT, params, "cut", output_kind="cumulative")
        first = await anext(stream)
        await model.abort("cut")
        outputs = [first, *[output async for output in stream]]
        return outputs[-1].outputs[0]

    o = async_llm.run(main, llm)
    assert o.token_ids[:3] == [3, 4, 5]
    assert o.finish_reason in ("abort", "length")


# Chats --------------------------------------------------------------------------------------------------------

CALLS: dict[str, Any] = {"tools": TWO, "enable_thinking": False, "tool_choice": "required"}
THINKS: dict[str, Any] = {"enable_thinking": True, "thinking_token_budget": 6}
CHATS: dict[str, dict[str, Any]] = {
    "calls": CALLS,
    "reasoning": THINKS,
    "reasoning, then calls": {**CALLS, **THINKS},
    "text or calls": {"tools": TWO},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> list[LLM]:
    folder = tools_folder(tmp_path_factory.mktemp("continued_chats") / "tools")
    return [LLM(str(folder), engine="native", max_num_seqs=8) for _ in range(2)]


def said(deltas: list[Any]) -> list[Any]:
    """Return a message from its deltas: pairs of a part and its text. The ids of calls are random."""
    made: list[Any] = []
    for d in deltas:
        part = ("call", d.index) if isinstance(d, CallDelta) else type(d)
        text = (d.name or "") + "|" * (d.name is not None) + d.arguments if isinstance(d, CallDelta) else d.text
        if made and made[-1][0] == part:
            made[-1][1] += text
        else:
            assert not isinstance(d, CallDelta) or d.id is not None
            made.append([part, text])
    return made


@structured
@pytest.mark.parametrize("name", CHATS)
def test_messages_are_continued_in_the_middle_of_any_part(chats: list[LLM], name: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=70)

    async def deltas(model: AsyncLLM, given: SamplingParams) -> list[CompletionOutput]:
        stream = model.chat(HI, given, output_kind="delta", **CHATS[name])
        return [o async for output in stream for o in output.outputs]

    whole = async_llm.run(lambda model: deltas(model, params), chats[0])
    ids = [i for o in whole for i in o.token_ids]
    ends = [sum(len(o.token_ids) for o in whole[: i + 1]) for i in range(len(whole))]
    parts = [[*(o.message_deltas or ())] for o in whole]
    expected = said([d for part in parts for d in part])
    assert len(expected) > (name == "reasoning, then calls")

    async def continued(model: AsyncLLM) -> list[list[CompletionOutput]]:
        made = [deltas(model, replace(params, output_token_ids=ids[:end])) for end in ends]
        return list(await asyncio.gather(*made))

    for i, rest in enumerate(async_llm.run(continued, chats[1])):
        assert [t for o in rest for t in o.token_ids] == ids[ends[i] :]
        before = [d for part in parts[: i + 1] for d in part]
        assert said([*before, *(d for o in rest for d in o.message_deltas or ())]) == expected, ends[i]
        assert (rest[-1].finish_reason, rest[-1].num_reasoning_tokens) == (
            whole[-1].finish_reason, whole[-1].num_reasoning_tokens,
        )  # fmt: skip
        found, message = rest[-1].message, whole[-1].message
        assert found is not None
        assert message is not None
        assert (found.content, found.reasoning) == (message.content, message.reasoning)
        assert [(c.name, c.arguments) for c in found.tool_calls] == [(c.name, c.arguments) for c in message.tool_calls]


@structured
def test_a_message_that_has_ended_has_no_deltas(chats: list[LLM]) -> None:
    """It ends within a marker, which the uninterrupted stream has released with the last token."""
    ids = chats[0].tokenize("hi <tool_c")
    params = SamplingParams(temperature=0, max_tokens=len(ids), output_token_ids=tuple(ids))

    async def main(model: AsyncLLM) -> list[CompletionOutput]:
        stream = model.chat(HI, params, output_kind="delta", tools=TWO, enable_thinking=False)
        return [o async for output in stream for o in output.outputs]

    (o,) = async_llm.run(main, chats[0])
    assert (o.text, o.token_ids, o.message_deltas, o.finish_reason) == ("", [], [], "length")
    assert o.message is not None
    assert o.message.content == "hi <tool_c"


@structured
def test_a_whole_chat_is_the_uninterrupted_one(chats: list[LLM]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=70)
    (whole,) = chats[0].chat(HI, params, **CALLS)
    (o,) = whole.outputs
    given = replace(params, output_token_ids=o.token_ids[: len(o.token_ids) // 2])
    (again,) = chats[1].chat(HI, given, **CALLS)
    assert again.outputs == whole.outputs
    assert again.outputs[0].message is not None
    assert o.message is not None
    assert [c.arguments for c in again.outputs[0].message.tool_calls] == [c.arguments for c in o.message.tool_calls]


# What is refused ----------------------------------------------------------------------------------------------


def given(*token_ids: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **fields}, output_token_ids=token_ids)


@pytest.fixture
def refused(llm: LLM) -> Iterator[LLM]:
    """The model, which a refused request leaves as it was."""
    handles = set(llm.engine.handles)
    yield llm
    assert set(llm.engine.handles) == handles
    assert not llm.core.unfinished


def test_contradictions_are_errors_of_the_parameters() -> None:
    for more in ({"n": 2}, {"best_of": 2}, {"prompt_logprobs": 0}):
        refuses(lambda more=more: given(1, **more), "output_token_ids continues one output", *more)  # type: ignore[misc]
    refuses(lambda: given(1, temperature=0.5), "output_token_ids needs the seed")
    assert given(1, temperature=0.5, seed=0).output_token_ids == (1,)


def test_tokens_after_the_end_are_refused(refused: LLM) -> None:
    refuses(lambda: refused.generate("a", given(5, END, 6)), "3 tokens, but the output ends with token 2 (stop)")
    refuses(lambda: refused.generate("a", given(5, 6, 7, max_tokens=2)), "ends with token 2 (length)")
    refuses(lambda: refused.generate("a" * 63, given(5, 6, 7)), "ends with token 2 (length)")  # the context
    refuses(lambda: refused.generate("a", given(5, 6, 7, 8, stop=CHARS[5:7])), "ends with token 2 (stop)")
    refuses(lambda: refused.generate("a", given(5, len(CHARS))), f"output_token_ids: token id {len(CHARS)}")


@structured
def test_tokens_that_the_grammar_forbids_are_refused(refused: LLM) -> None:
    choice = StructuredOutputsParams(choice=("yes", "no"))
    ids = [CHARS.index(c) for c in "yen"]
    refuses(
        lambda: refused.generate("a", given(*ids, structured_outputs=choice)),
        f"output_token_ids: token 3 of 3, {ids[2]}: structured_outputs: ",
    )
    refuses(
        lambda: refused.generate("a", given(*ids[:2], CHARS.index("s"), 5, structured_outputs=choice)),
        "4 tokens, but the output ends with token 3 (stop)",
    )


@structured
def test_a_request_that_waits_has_no_memory_of_its_grammar(llm: LLM) -> None:
    params = given(CHARS.index("y"), structured_outputs=StructuredOutputsParams(choice=("yes", "no")))
    grammar = llm.requests.make("a", params).sequences[0].grammar
    assert isinstance(grammar, OutputGrammar)
    assert grammar._state is None


def test_a_conversation_has_no_output_that_is_continued(tmp_path: Path) -> None:
    talk = LLM(str(chat_folder(tmp_path / "chat")), engine="native").conversation()
    refuses(lambda: talk.send("Hi", given(5)), "output_token_ids")


@pytest.mark.parametrize(
    "params, reason, text",
    [
        (given(5, END), ("stop", END), CHARS[5]),
        (given(5, 6, max_tokens=2), ("length", None), CHARS[5:7]),
        (given(5, 6, stop=(CHARS[5:7],)), ("stop", CHARS[5:7]), ""),
    ],
    ids=["end token", "max_tokens", "stop string"],
)
def test_an_output_that_has_ended_ends_at_once(folder: Path, params: SamplingParams, reason: Any, text: str) -> None:
    llm, num_new = make_llm(folder), list[int]()
    extend = llm.engine.extend

    def counted(batch: StepBatch) -> Any:
        num_new.extend(batch.num_new)
        return extend(batch)

    llm.engine.extend = counted  # type: ignore[method-assign]
    (output,) = llm.generate("a", params)
    (o,) = output.outputs
    assert (o.finish_reason, o.stop_reason) == reason
    assert (o.token_ids, o.text) == ([*params.output_token_ids], text)
    assert list(llm.stream("a", params)) == []

    async def main(model: AsyncLLM) -> list[CompletionOutput]:
        return [o async for output in model.generate("a", params, output_kind="delta") for o in output.outputs]

    found = async_llm.run(main, llm)
    assert [(x.text, x.token_ids, x.finish_reason, x.stop_reason) for x in found] == [("", [], *reason)]
    assert num_new == []
