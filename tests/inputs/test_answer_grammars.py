"""Answers that match the grammar parse, call tools that there are, and their arguments match the schemas."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from helpers.answers import FORMATS, THINK, random_object, tool, valid, write
from helpers.models import refuses
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.inputs.answers.format import HARMONY, JSON_IN_MARKERS, AnswerFormat
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.answers.parser import AnswerParser
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import ChatMessage
from nanoinfer.structured.check_worker import byte_tokens
from nanoinfer.structured.grammars import AnswerGrammar, Grammar
from nanoinfer.structured.masks import OutputGrammar
from nanoinfer.utils.workers import Workers

llguidance = pytest.importorskip("llguidance")

SPECIAL = {
    "nemo": ["[TOOL_CALLS]"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "deepseek": ["<｜calls▁begin｜>", "<｜calls▁end｜>", "<｜call▁begin｜>", "<｜call▁end｜>", "<｜sep｜>"],
    "command": ["<|action|>", "<|/action|>", "<|text|>", "<|/text|>"],
    "gemma": ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
    "harmony": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"],
}
"""Markers that are special tokens of a family's tokenizer."""
CASES = [
    (name, with_special) for name in FORMATS for with_special in (False, True) if name in SPECIAL or not with_special
]
FEW = "\"<>\n})]'"
SIMPLE = (
    tool("get", {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}, ["city"]),
    tool("get_all", {}),
)


@cache
def vocabulary(ids: int) -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(byte_tokens(list(range(ids)))))


def walk(grammar: str, special: list[str], seed: int, given: str = "", limit: int = 1500) -> tuple[str, bool]:
    """Return a random text of a grammar after a given beginning, and whether it is complete."""
    chance, end = random.Random(seed), 256 + len(special)
    tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in special]
    text = grammar + '\n%llguidance {"no_forcing": true}'
    matcher = llguidance.LLMatcher(vocabulary(len(special)), text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written, rest = b"", given.encode()
    for _ in range(limit):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        permitted = [i for i in range(end + 1) if bits >> i & 1]
        assert permitted, (written, matcher.get_error())
        if rest:
            found = next((256 + i for i, text in enumerate(special) if rest.startswith(text.encode())), rest[0])
            rest = rest[len(tokens[found]) :]
        elif end in permitted and (matcher.is_stopped() or chance.random() < 0.3):
            return written.decode(), True
        else:
            few = [i for i in permitted if i >= 256 or chr(i) in FEW] if len(permitted) > 40 else permitted
            printable = [i for i in permitted if 97 <= i < 123 or i == 32] if len(permitted) > 40 else permitted
            found = chance.choice((few if chance.random() < 0.3 else printable) or permitted)
        if found == end:
            return written.decode(), True
        assert matcher.consume_token(found), (written, tokens[found], matcher.get_error()[:100])
        written += tokens[found]
        if matcher.is_stopped():
            return written.decode(), True
    return written.decode(errors="ignore"), False


def parse(f: AnswerFormat, text: str, tools: Any, in_reasoning: bool = False) -> ChatMessage:
    for constrained in (True, False):
        parser = AnswerParser(f, tools, starts_in_reasoning=in_reasoning, constrained=constrained)
        parser.feed(text)
        parser.finish()
    return parser.message()


def check(message: ChatMessage, tools: Any, complete: bool = True) -> int:
    """Check the calls of a message; return their number."""
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in message.tool_calls if complete else message.tool_calls[:-1]:
        assert valid(json.loads(call.arguments), schemas[call.name], schemas[call.name]), call
    return len(message.tool_calls)


def special_of(name: str, with_special: bool) -> list[str]:
    return SPECIAL[name] if with_special else []


def grammar_of(f: AnswerFormat, tools: Any, choice: str, special: list[str] = [], **options: Any) -> str:  # noqa: B006
    made = to_grammar(f, tools, choice, special_tokens={text: i for i, text in enumerate(special)}, **options)
    assert made is not None
    return str(made.grammar)


@pytest.mark.parametrize(("name", "with_special"), CASES)
def test_required_calls_parse_and_match_random_schemas(name: str, with_special: bool) -> None:
    f, special, complete = FORMATS[name], special_of(name, with_special), 0
    for seed in range(25):
        chance = random.Random(seed)
        tools = tuple(Tool(f"tool_{i}", "", random_object(chance)) for i in range(chance.randrange(1, 4)))
        text, ended = walk(grammar_of(f, tools, "required", special), special, seed)
        message = parse(f, text, tools)
        assert message.content is None, text
        assert check(message, tools, ended) >= ended, text
        complete += ended
    assert complete >= 15


@pytest.mark.parametrize("in_reasoning", [False, None, True])
@pytest.mark.parametrize(("name", "with_special"), CASES)
def test_masks_of_text_are_those_of_a_matcher_that_is_told_of_it(
    name: str, with_special: bool, in_reasoning: bool | None
) -> None:
    f, special = FORMATS[name], special_of(name, with_special)
    ids = {text: i for i, text in enumerate(special)}
    made = to_grammar(f, SIMPLE, special_tokens=ids, in_reasoning=in_reasoning)
    assert isinstance(made, AnswerGrammar)
    V, num_settled = 256 + len(special), 0
    for seed in range(12):
        chance = random.Random(seed)
        begin, rest = chance.choices("ab \n", k=seed % 3), chance.choices("abcde \n", k=5)
        marker = [f.trigger, f.reasoning_end, f.reasoning_start, ""][seed % 4]
        pieces = [*begin, *rest, *([marker] if marker in ids else marker), *rest, *chance.choices("abé<{", k=9)]
        tokens = [i for piece in pieces for i in ([256 + ids[piece]] if piece in ids else piece.encode())]
        told, other = (
            OutputGrammar(Grammar(str(made.grammar), vocabulary(len(special)), V, 0, Workers("", 1), starts), [])
            for starts in (None, made.marker_starts)
        )
        for token_id in tokens:
            told.compute([])
            if other.is_settled:
                num_settled += 1
            else:
                other.compute([])
            assert [mask.tolist() for mask in told.take()] == [mask.tolist() for mask in other.take()]
            if not told.num_permitted([token_id]) or told.push(token_id):
                break
            other.push(token_id)
    assert (num_settled > 0) == (made.marker_starts is not None)


@pytest.mark.parametrize(("name", "with_special"), CASES)
def test_a_call_that_is_opened_in_text_is_completed(name: str, with_special: bool) -> None:
    f, special = FORMATS[name], special_of(name, with_special)
    grammar = grammar_of(f, SIMPLE, "auto", special)
    given = write(f, [("get", {"city": "x"})]) if not f.trigger else write(f, [("get", {"city": "x"})], "Some text. ")
    if name == "harmony":
        given = write(f, [("get", {"city": "x"})])
    opening = given[: given.index("get") + 3 if f.trigger else given.index("city")]
    for seed in range(8):
        text, ended = walk(grammar, special, seed, opening, 400)
        message = parse(f, text, SIMPLE)
        assert check(message, SIMPLE, ended) >= 1, text
        assert f.trigger.strip() not in (message.content or "") or not f.trigger


@pytest.mark.parametrize(("name", "with_special"), CASES)
def test_text_alone_is_permitted_with_auto(name: str, with_special: bool) -> None:
    f, special = FORMATS[name], special_of(name, with_special)
    grammar = grammar_of(f, SIMPLE, "auto", special)
    given = write(f, content="Hello [there] {you}.")
    text, _ = walk(grammar, special, 1, given, len(given.encode()) + 1)
    assert text.startswith(given)


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_where_they_are_not_parallel(name: str) -> None:
    f = FORMATS[name]
    for choice in ("required", "get"):
        grammar = grammar_of(f, SIMPLE, choice, parallel=False)
        for seed in range(3):
            text, ended = walk(grammar, [], seed)
            message = parse(f, text, SIMPLE)
            assert len(message.tool_calls) == 1
            assert choice == "required" or message.tool_calls[0].name == "get"
            assert check(message, SIMPLE, ended)


@pytest.mark.parametrize("special", [[], ["</think>"]])
@pytest.mark.parametrize(
    ("budget", "given"), [(None, "Hm.</think>"), (0, ""), (1, ""), (12, ""), (12, "Hm.</think>"), (99, "Hm.</think>")]
)
def test_reasoning_comes_before_calls_within_its_budget(budget: int | None, given: str, special: list[str]) -> None:
    grammar = grammar_of(JSON_IN_MARKERS, SIMPLE, "get", special, in_reasoning=True, thinking_budget=budget)
    for seed in range(5):
        text, ended = walk(grammar, special, seed, given)
        assert text.count("</think>") == 1
        assert text.startswith(given)
        message = parse(JSON_IN_MARKERS, text, SIMPLE, in_reasoning=True)
        assert check(message, SIMPLE, ended) >= 1
        assert budget is None or len((message.reasoning or "").encode()) <= budget


@pytest.mark.parametrize("choice", ["auto", "required", "get"])
@pytest.mark.parametrize(
    ("name", "with_special"),
    [(n, special) for n, special in CASES if FORMATS[n].reasoning_end and not FORMATS[n].has_headers],
)
def test_a_call_ends_the_reasoning(name: str, with_special: bool, choice: str) -> None:
    f, special = FORMATS[name], special_of(name, with_special)
    for budget, in_reasoning in ((None, True), (None, None), (50, True)):
        options: dict[str, Any] = {"in_reasoning": in_reasoning, "thinking_budget": budget}
        grammar = grammar_of(f, SIMPLE, choice, special, **options)
        for seed, thought in enumerate(("Hm. ", "")):
            given = f"{'' if in_reasoning else f.reasoning_start}{thought}{write(f, [('get', {'city': 'x'})])}"
            text, _ = walk(grammar, special, seed, given, 300)
            assert text.startswith(given)
            message = parse(f, text, SIMPLE, in_reasoning=in_reasoning is True)
            assert message.reasoning == (thought.strip() or None)
            assert message.tool_calls[0].name == "get"
            assert json.loads(message.tool_calls[0].arguments) == {"city": "x"}
        start = "" if in_reasoning else f"\n{f.reasoning_start}"  # some templates write a line feed before it
        given = f"{start}Hm.{f.reasoning_end}"
        message = parse(f, walk(grammar, special, 1, given, 300)[0], SIMPLE, in_reasoning=in_reasoning is True)
        assert message.reasoning == "Hm."


def test_reasoning_may_begin_an_answer() -> None:
    grammar = grammar_of(JSON_IN_MARKERS, SIMPLE, "required", in_reasoning=None)
    message = parse(JSON_IN_MARKERS, walk(grammar, [], 1, "<think>Hm.</think>\n")[0], SIMPLE)
    assert (message.reasoning, message.tool_calls[0].name[:3]) == ("Hm.", "get")
    assert parse(JSON_IN_MARKERS, walk(grammar, [], 2, "<tool_call>")[0], SIMPLE).reasoning is None


def test_structured_output_follows_the_reasoning_or_is_an_alternative_to_calls() -> None:
    answer = StructuredOutputsParams(json={"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]})
    grammar = grammar_of(JSON_IN_MARKERS, (), "auto", answer=answer, in_reasoning=True)
    message = parse(JSON_IN_MARKERS, walk(grammar, [], 0, "Hm.</think>")[0], (), in_reasoning=True)
    assert json.loads(message.content or "")["x"] in (1, 2)
    grammar = grammar_of(JSON_IN_MARKERS, SIMPLE, "auto", answer=answer)
    assert json.loads(parse(JSON_IN_MARKERS, walk(grammar, [], 0, "{")[0], SIMPLE).content or "")["x"] in (1, 2)
    assert check(parse(JSON_IN_MARKERS, walk(grammar, [], 0, "<")[0], SIMPLE), SIMPLE, False) >= 1
    assert to_grammar(JSON_IN_MARKERS, SIMPLE, "none", answer=answer) is answer
    for kind in ({"regex": "[ab]+c"}, {"choice": ["ac", "bc"]}, {"grammar": 'start: x "c"\nx: "a" | "b"'}):
        made = StructuredOutputsParams(**kind)
        text, _ = walk(grammar_of(JSON_IN_MARKERS, (), "none", answer=made, in_reasoning=True), [], 3, "</think>")
        assert text.strip()[-2:] in ("ac", "bc")


def test_what_is_free_has_no_grammar() -> None:
    assert to_grammar(JSON_IN_MARKERS) is None
    assert to_grammar(AnswerFormat(), SIMPLE) is None
    assert to_grammar(JSON_IN_MARKERS, in_reasoning=True) is None
    assert to_grammar(JSON_IN_MARKERS, in_reasoning=None, thinking_budget=5) is not None


def test_without_calls_text_cannot_contain_one() -> None:
    grammar = grammar_of(JSON_IN_MARKERS, SIMPLE, "none")
    matcher = llguidance.LLMatcher(vocabulary(0), grammar, log_level=0)
    assert matcher.validate_tokens(list(b"a <tool_call>")) == len(b"a <tool_call")


def test_text_cannot_spell_a_special_token() -> None:
    special = SPECIAL["nemo"]
    grammar = grammar_of(FORMATS["nemo"], SIMPLE, "auto", special)
    matcher = llguidance.LLMatcher(vocabulary(1), grammar, log_level=0)
    assert matcher.validate_tokens(list(b"a [TOOL_CALLS]")) == len(b"a [TOOL_CALLS")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("coder", {"type": "object", "allOf": [{"required": ["a"]}, {}]}, "tool 'f': parameters have allOf"),
        ("gemma", {"properties": {"a": {"not": {}, "type": "object"}}}, "tool 'f': parameters have not"),
        ("gemma", {"properties": {"a": {"properties": {"b,": {}}}}}, "tool 'f': parameters have the property 'b,'"),
        ("coder", {"properties": {"<a>": {}}}, "tool 'f': parameters have the property '<a>'"),
        ("gemma", {"properties": {"a": {"$ref": "#/$defs/no"}}}, "'#/$defs/no', which is not there"),
    ],
)
def test_schemas_that_a_notation_cannot_express_are_refused(name: str, parameters: Any, message: str) -> None:
    refuses(lambda: to_grammar(FORMATS[name], [Tool("f", "", parameters, strict=True)]), message)


@pytest.mark.parametrize("name", ["coder", "glm", "gemma"])
def test_each_part_of_a_schema_is_looked_at_once(name: str) -> None:
    """Else schemas of many options, or of many levels, would never be compiled."""
    options = {"anyOf": [{"$ref": "#/$defs/a"}] * 50 + [{"type": "string"}]}
    level: dict[str, Any] = {"type": ["object", "null"], "properties": {}}
    for _ in range(40):
        level = {"type": ["object", "null"], "properties": {"a": level}, "required": ["a"]}
    made = Tool("f", "", {"properties": {"x": {"$ref": "#/$defs/a"}, "y": level}, "$defs": {"a": options}})
    assert len(grammar_of(FORMATS[name], [made], "required")) < 50_000


def test_an_object_in_gemmas_notation_may_be_null() -> None:
    part = {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = tool("f", {"x": part}, ["x"])
    seen = set()
    for seed in range(20):
        text, ended = walk(grammar_of(FORMATS["gemma"], [made], "required"), [], seed)
        calls = parse(FORMATS["gemma"], text, [made]).tool_calls
        seen |= {type(json.loads(call.arguments)["x"]) for call in calls if ended}
    assert seen == {dict, type(None)}


def test_too_many_tools_are_refused() -> None:
    many = [tool(f"f{i}", {f"property_{j}_of_a_tool": {"type": "string"} for j in range(60)}) for i in range(100)]
    strict = [replace(each, strict=True) for each in many]
    refuses(lambda: to_grammar(JSON_IN_MARKERS, strict), "tools: the grammar of all tools has")
    refuses(lambda: to_grammar(AnswerFormat(), SIMPLE, "required"), "needs a chat template with tool calls")


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("name", ["hermes", "gemma", "coder"])
def test_arrays_have_at_most_as_many_items_as_they_may(name: str, most: int) -> None:
    made = tool("f", {"a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": most}}, ["a"])
    lengths = set()
    for seed in range(20):
        text, ended = walk(grammar_of(FORMATS[name], [made], "required", parallel=False), [], seed)
        message = parse(FORMATS[name], text, [made])
        assert ended
        assert check(message, [made]) == 1
        lengths.add(len(json.loads(message.tool_calls[0].arguments)["a"]))
    assert lengths == set(range(most + 1))


OBJECT = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        OBJECT,
        {"$ref": "#/$defs/a", "$defs": {"a": OBJECT}},
        {"anyOf": [OBJECT, {"type": "null"}]},
        {"properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}, "m": {"$ref": "#/properties/n"}}},
    ],
    ids=json.dumps,
)
def test_arguments_are_an_object_whatever_the_schema_says(name: str, parameters: dict[str, Any]) -> None:
    f, made = FORMATS[name], Tool("f", "", parameters)
    if "anyOf" in parameters and f.notation == "tagged":
        return refuses(
            lambda: grammar_of(f, [replace(made, strict=True)], "required"), "tool 'f': parameters have anyOf"
        )
    for seed in range(6):
        text, ended = walk(grammar_of(f, [made], "required", parallel=False), [], seed, limit=4000)
        for call in parse(f, text, [made]).tool_calls if ended else ():
            found = json.loads(call.arguments)
            assert type(found) is dict
            assert not parameters or type(found.get("n", 0 if "properties" in parameters else None)) is int


def test_references_within_tools_are_followed() -> None:
    tree = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"title": "Next", "allOf": [{"$ref": "#/$defs/tree"}]}},
        "required": ["v"],
    }
    made = Tool(
        "f",
        "",
        {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}, "required": ["t"]},
    )
    for name in ("hermes", "coder", "gemma"):
        for seed in range(4):
            text, ended = walk(grammar_of(FORMATS[name], [made], "required"), [], seed, limit=3000)
            check(parse(FORMATS[name], text, [made]), [made], ended)


# With a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"draft": "shakespeare-draft"}, {"draft": "prompt-lookup"}])
@pytest.mark.slow_if(lambda options: options)
def test_calls_of_a_model_parse_and_match(options: dict[str, Any]) -> None:
    llm = LLM("shakespeare", engine="native", max_num_seqs=8, **options)
    for name, choice in (("hermes", "required"), ("coder", "required"), ("gemma", "required")):
        f = FORMATS[name]
        made = to_grammar(f, SIMPLE, choice, parallel=False)
        (output,) = llm.generate("Call:", SamplingParams(max_tokens=200, n=3, seed=3, structured_outputs=made))
        for o in output.outputs:
            assert o.error is None
            message = parse(f, o.text, SIMPLE)
            assert check(message, SIMPLE, o.finish_reason == "stop") == 1


def test_a_model_obeys_its_budget_of_thinking_tokens_with_a_draft() -> None:
    outputs = []
    for options in ({}, {"draft": "shakespeare-draft"}):
        llm = LLM("shakespeare", engine="native", **options)
        f = AnswerFormat(**THINK)
        made = to_grammar(f, in_reasoning=True, thinking_budget=10)
        params = SamplingParams(max_tokens=40, temperature=0, structured_outputs=made)
        (output,) = llm.generate("O Romeo,", params)
        outputs.append(output.outputs[0].token_ids)
        message = parse(f, output.outputs[0].text, (), in_reasoning=True)
        tokenizer = llm.get_tokenizer()
        assert len(tokenizer.encode(message.reasoning or "")) <= 12
        assert message.content
    assert outputs[0] == outputs[1]


def test_harmony_answers_may_have_all_channels() -> None:
    special = SPECIAL["harmony"]
    grammar = grammar_of(HARMONY, SIMPLE, "auto", special, in_reasoning=None)
    given = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get"
    )
    text, ended = walk(grammar, special, 0, given)
    message = parse(HARMONY, text, SIMPLE)
    assert (message.reasoning, message.content) == ("Hm.", "I look.")
    assert check(message, SIMPLE, ended) == 1
