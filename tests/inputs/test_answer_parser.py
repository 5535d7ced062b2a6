"""Answers become reasoning, content and calls: the same for every split, and what is there for every prefix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.answers import FORMATS, tool, write
from nanoinfer.inputs.answers.format import AnswerFormat
from nanoinfer.inputs.answers.parser import AnswerParser
from nanoinfer.inputs.answers.reader import Markers
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta, ToolCall

GET = tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {}}, ["city"])
SET = tool("set", {"value": {"type": ["number", "null"]}, "on": {"type": "boolean"}})
TOOLS = (GET, SET)
Plain = tuple[str | None, str | None, list[tuple[str, Any]]]


def plain(message: ChatMessage) -> Plain:
    """A message without ids, with arguments as values."""
    return message.content, message.reasoning, [(c.name, json.loads(c.arguments)) for c in message.tool_calls]


def parse(
    f: AnswerFormat,
    text: str,
    cuts: Sequence[int] = (),
    tools: Sequence[Tool] = TOOLS,
    is_cut: bool = True,
    **options: Any,
) -> tuple[ChatMessage, list[AnswerDelta]]:
    parser = AnswerParser(f, tools, **options)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas = [delta for a, b in pairwise(places) for delta in parser.feed(text[a:b])]
    deltas += parser.finish(is_cut)
    return parser.message(), deltas


def released(f: AnswerFormat, text: str, cuts: Sequence[int] = (), **options: Any) -> tuple[Any, ...]:
    """What was released of a text that may go on. A stream that is continued relies on it: no cut may change it."""
    parser = AnswerParser(f, TOOLS, **options)
    for a, b in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        parser.feed(text[a:b])
    message = parser.message()
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.tool_calls]


def joined(deltas: Sequence[AnswerDelta]) -> ChatMessage:
    """The message that a client makes of deltas."""
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls: list[list[str]] = []
    for d in deltas:
        if isinstance(d, CallDelta) and d.id is not None:
            assert d.index == len(calls)
            assert d.arguments == ""
            calls.append([d.id, str(d.name), ""])
        elif isinstance(d, CallDelta):
            assert d.name is None
            calls[d.index][2] += d.arguments
    return ChatMessage(content or (None if calls else ""), reasoning or None, tuple(ToolCall(*call) for call in calls))


def markers(f: AnswerFormat) -> list[str]:
    pieces = (f.trigger, f.reasoning_start, f.reasoning_end, f.content_start, f.content_end)
    return [piece.strip() for piece in (*pieces, *f.ignored) if piece]


CALLS = [
    ("get_weather", {"city": "Zürich \U0001f600\n\"x\" 'y' \\ <b>", "days": 3}),
    ("set", {"value": -1.5e3, "on": True}),
    ("get_weather", {"city": "", "more": {"a": [1, None, {"b": "c"}], "d": False}}),
]
TEXT = 'It is <not> a {"name": 1}, nor [a] call.\n\nIs it? '


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_model_writes_is_read(name: str, constrained: bool) -> None:
    f = FORMATS[name]
    calls = CALLS if f.parallel else CALLS[:1]
    reasoning = "First,\nthink." if f.reasoning_end else ""
    content = TEXT if f.trigger else ""
    text = write(f, calls, content, reasoning)
    message, deltas = parse(f, text, range(len(text)), constrained=constrained)
    expected = (content.strip() if f.content_start else content.rstrip()) or None
    assert plain(message) == (expected, reasoning or None, calls)
    assert joined(deltas) == message
    assert len({c.id for c in message.tool_calls}) == len(calls)
    assert all(c.id.startswith("call_") for c in message.tool_calls)


@pytest.mark.parametrize("name", FORMATS)
def test_content_alone_is_as_it_was_written(name: str) -> None:
    f = FORMATS[name]
    for text in (TEXT, " {", "[", "<tool", '{"name": "other", "parameters": {}}', '[x for x in "a"]', ""):
        message, _ = parse(f, write(f, content=text), range(99))
        expected = text.strip() if f.content_end else text.lstrip() if f.content_start else text
        assert plain(message) == (expected, None, []), text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow_if(lambda name: name not in list(FORMATS)[::3])
def test_every_prefix_is_what_is_there(name: str) -> None:
    f = FORMATS[name]
    calls = CALLS if f.parallel else CALLS[:1]
    text = write(f, calls, "Some text." if f.trigger else "", "Think." if f.reasoning_end else "")
    whole, _ = parse(f, text)
    for end in range(0, len(text) + 1, 3):
        unconstrained, _ = parse(f, text[:end])
        message, deltas = parse(f, text[:end], range(end), constrained=True)
        assert joined(deltas) == message
        for constrained in (False, True):
            at_once = released(f, text[:end], constrained=constrained)
            assert released(f, text[:end], range(end), constrained=constrained) == at_once
        assert [c.arguments for c in unconstrained.tool_calls] == [c.arguments for c in message.tool_calls]
        assert (unconstrained.content, unconstrained.reasoning) == (message.content, message.reasoning)
        assert len(message.tool_calls) <= len(calls)
        for got, complete in zip(message.tool_calls, whole.tool_calls, strict=False):
            assert got.name == complete.name
            assert complete.arguments.startswith(got.arguments)
        for part, expected in ((message.content, whole.content), (message.reasoning, whole.reasoning)):
            assert not any(marker in (part or "") for marker in markers(f))
            if f.trigger:  # else a call that has no name yet is text
                assert (expected or "").startswith(without_beginning(f, part or ""))


def without_beginning(f: AnswerFormat, text: str) -> str:
    """A text without the beginning of a marker at its end."""
    found = [i for i in range(len(text)) if any(marker.startswith(text[i:]) for marker in markers(f))]
    return text[: min(found, default=len(text))].rstrip()


text_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>\r\0"), max_size=30).map(str.strip)
keys = st.from_regex("[a-z_]{1,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | text_values.filter(lambda s: not s or s[0].isalpha()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    arguments=st.lists(st.dictionaries(keys, values | text_values, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 10**6), max_size=12),
    constrained=st.booleans(),
)
def test_calls_are_read_as_they_were_written(
    name: str, arguments: list[dict[str, Any]], cuts: list[int], constrained: bool
) -> None:
    f = FORMATS[name]
    calls = [(f"tool_{i}", made) for i, made in enumerate(arguments)][: 3 if f.parallel else 1]
    tools = [tool(n, {k: {"type": type_of(v)} for k, v in made.items()}) for n, made in calls]
    text = write(f, calls)
    whole, _ = parse(f, text, tools=tools, constrained=constrained)
    message, deltas = parse(f, text, cuts, tools=tools, constrained=constrained)
    assert plain(message) == plain(whole) == (None, None, calls)
    assert joined(deltas) == message


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.sampled_from(
            ['{"name": "set", "arguments": {}}', "set", "{", "}", "[", '"', "\n", " ", "a", "city=", "(", ")"]
        )
        | st.sampled_from([marker for f in FORMATS.values() for marker in markers(f)])
        | st.text(max_size=5),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 10**6), max_size=12),
)
def test_any_text_gives_the_same_message_for_every_split(name: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole, _ = parse(FORMATS[name], text)
    message, deltas = parse(FORMATS[name], text, cuts)
    assert (message.content, message.reasoning) == (whole.content, whole.reasoning)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [(c.name, c.arguments) for c in whole.tool_calls]
    assert joined(deltas) == message
    assert released(FORMATS[name], text, cuts) == released(FORMATS[name], text)
    for call in message.tool_calls:
        assert call.name in ("get_weather", "set")


CITY = "<parameter=city>\nRome\n</parameter>\n"
DAYS = "<parameter=days>\n3\n</parameter>\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> x'),
        ("hermes", '<tool_call>\n{"name": "set", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "set", "arguments": {"on": nope}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 3}\n</tool_call>'),
        ("hermes", "<tool_call> is a marker"),
        ("hermes", '<tool_call>\n{"name": "set", "arguments": ' + '{"a": ' * 200 + "1"),
        ("hermes", '<tool_call>\n{"name": "set", "arguments": {"on": true'),  # the model ended it here
        *(
            ("coder", f"<tool_call>\n<function=get_weather>\n{parts}</tool_call>")
            for parts in (
                CITY + "</parameter>\n" + DAYS + "</function>\n",
                CITY + "and the days:\n" + DAYS + "</function>\n",
                CITY + DAYS + "</functions>\n",
            )
        ),
        ("coder", "<tool_call>\n<function=get_weather>\n" + CITY),
        ("coder", "<function=other>\n</function>"),
        ("harmony", "to=python<|channel|>analysis code<|message|>print(1)"),
        ("harmony", "<|channel|>final is a header"),
        ("harmony", "to=be or not"),
    ],
)
def test_a_malformed_call_is_content(name: str, text: str) -> None:
    for cuts in ((), range(len(text))):
        message, deltas = parse(FORMATS[name], text, cuts, is_cut=False)
        assert plain(message) == (text, None, [])
        assert joined(deltas) == message


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name" : "set" ,"arguments":{"on":true}}', [("set", {"on": True})]),
        ('<tool_call>\n{"name": "set", "arguments": {"a": "x\ny"}}', [("set", {"a": "x\ny"})]),
    ],
)
def test_other_white_space_than_the_template_writes_is_read(text: str, calls: list[tuple[str, Any]]) -> None:
    assert plain(parse(FORMATS["hermes"], text)[0]) == (None, None, calls)


def test_without_tools_a_call_is_content() -> None:
    text = write(FORMATS["hermes"], CALLS[:1])
    assert plain(parse(FORMATS["hermes"], text, tools=())[0]) == (text, None, [])


def test_types_of_the_schema_decide_what_a_bare_value_is() -> None:
    properties = {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    properties |= {"d": {"$ref": "#/$defs/d"}, "e": {}, "f": {"type": "boolean"}, "g": {"enum": ["1", "2"]}}
    properties |= {"h": {"type": "array"}, "i": {"type": ["object", "string"]}, "j": {"type": ["string", "null"]}}
    made = Tool("f", "", {"type": "object", "properties": properties, "$defs": {"d": {"type": "number"}}})
    raw = {"a": "12", "b": "12", "c": "null", "d": "1.5", "e": "x y", "f": "True", "g": "1"}
    raw |= {"h": "['x', 1, None]", "i": "{'k': {'l': True}}", "j": "None", "k": "['x'] and more", "l": "'x'"}
    (name, found), *_ = plain(parse(FORMATS["coder"], write(FORMATS["coder"], [("f", raw)]), tools=[made])[0])[2]
    assert (name, found) == (
        "f",
        {"a": "12", "b": 12, "c": None, "d": 1.5, "e": "x y", "f": True, "g": "1", "h": ["x", 1, None],
         "i": {"k": {"l": True}}, "j": None, "k": "['x'] and more", "l": "'x'"},
    )  # fmt: skip


def test_values_in_cdata_sections() -> None:
    text = write(FORMATS["coder"], [("get_weather", {"city": "<![CDATA[<a>\n</a>]]>"})])
    assert plain(parse(FORMATS["coder"], text, range(len(text)))[0])[2] == [("get_weather", {"city": "<a>\n</a>"})]


def test_reasoning_that_the_prompt_has_opened() -> None:
    f = FORMATS["coder"]
    message, deltas = parse(f, "Hm.\n</think>\n\nYes.", range(30), starts_in_reasoning=True)
    assert plain(message) == ("Yes.", "Hm.", [])
    assert joined(deltas) == message
    assert plain(parse(f, "Hm", starts_in_reasoning=True)[0]) == ("", "Hm", [])


SET_CALL = '<tool_call>\n{"name": "set", "arguments": {"on": true}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A model writes <think> there.", ("A model writes <think> there.", None, [])),
        ("It ends with </think>\n\nin it.", ("It ends with </think>\n\nin it.", None, [])),
        ("<think>a</think>b\n</think>c <think>", ("b\n</think>c <think>", "a", [])),
        ("</think>\nb", ("b", None, [])),
        ("<think>a</think>\n<think>b</think>\nc", ("c", "a\nb", [])),
        (f"<think>Now. {SET_CALL}\n</think>\nb", ("b", "Now.", [("set", {"on": True})])),
        (f"<think>{SET_CALL}", (None, None, [("set", {"on": True})])),
        ("<think>By <tool_call> or so.</think>b", ("b", "By <tool_call> or so.", [])),
        ('<think>a <tool_call>{"name": "x"}</think>', ("", 'a <tool_call>{"name": "x"}', [])),
        (f'<think>a <tool_call>{{"</think>{SET_CALL}', (None, 'a <tool_call>{"', [("set", {"on": True})])),
    ],
)
def test_markers_of_reasoning(text: str, expected: Plain) -> None:
    for cuts in ((), range(len(text))):
        message, deltas = parse(FORMATS["hermes"], text, cuts)
        assert plain(message) == expected
        assert joined(deltas) == message


def test_a_special_token_is_a_marker_anywhere() -> None:
    text = "<|channel>thought\n<channel|>Yes.<|channel>thought\nHm.<channel|><channel|>"
    special = ("<|channel>", "<channel|>")
    assert plain(parse(FORMATS["gemma"], text, range(99), special_tokens=special)[0]) == ("Yes.", "Hm.", [])


@pytest.mark.parametrize(
    "text", ["{}<function=set>\n<parameter=on>\ntrue\n</parameter>\n{}</tool_call>", "{}<function=set>{}"]
)
def test_a_call_without_its_first_tag_is_read(text: str) -> None:
    end = "<parameter=on>true</parameter></function>"
    text = text.format("Now:\n", end if text.endswith("{}") else "</function>\n")
    for constrained in (False, True):
        message, _ = parse(FORMATS["coder"], text, range(len(text)), constrained=constrained)
        assert plain(message) == ("Now:", None, [("set", {"on": True})])


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ON = ("set", {"on": True})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "Let me see.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Rome"}<|call|>',
            ("Let me see.", "Need weather.", [("get_weather", {"city": "Rome"})]),
        ),
        *(
            (ANALYSIS + header + '<|message|>{"on": true}', (None, "Hm.", [ON]))
            for header in (
                " to=functions.set<|channel|>commentary json",
                " to=functions.set<|channel|>analysis",
                " to=functions.set<|channel|>commentary <|constrain|>json",
                "<|channel|>commentary to=functions.set <|constrain|>json",
                "<|channel|>commentary <|constrain|>json to=functions.set",
                "<|channel|>analysis to=set code",
                "<|constrain|>json<|channel|>commentary to=functions.set",
            )
        ),
        (ANALYSIS + "<|channel|>final <|constrain|>json<|message|>{}<|return|>", ("{}", "Hm.", [])),
        (ANALYSIS + "<|channel|>commentary to=assistant<|channel|>final<|message|>a", ("a", "Hm.", [])),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>a <|constrain|>", ("a <|constrain|>", "Hm.", [])),
        (ANALYSIS + "<|channel|>fin", ("", "Hm.", [])),
        ("a<|end|><|start|>assistant<|channel|>final<|message|>b", ("a\nb", None, [])),
    ],
)
def test_headers_as_gpt_oss_writes_them(text: str, expected: Plain) -> None:
    for cuts in ((), range(len(text))):
        message, deltas = parse(FORMATS["harmony"], text, cuts)
        assert plain(message) == expected
        assert joined(deltas) == message


def test_text_is_released_as_soon_as_it_is_no_marker() -> None:
    parser = AnswerParser(FORMATS["hermes"], TOOLS)
    released = [
        [d.text for d in parser.feed(piece) if isinstance(d, ContentDelta)] for piece in ("a <", "b> c", " <tool")
    ]
    assert released == [["a"], [" <b> c"], []]
    assert parser.feed('_call>{"name": "set", "arguments": {"value": 1') == []
    constrained = AnswerParser(FORMATS["hermes"], TOOLS, constrained=True)
    first = constrained.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Ro')
    assert [(d.name, d.arguments) for d in first if isinstance(d, CallDelta)] == [
        ("get_weather", ""),
        (None, '{"city": "Ro'),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_each_character_is_searched_a_bounded_number_of_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, find = [0], Markers.find

    def count(self: Markers, text: str, at: int, closed: bool) -> tuple[int, int, bool]:
        searched[0] += len(text) - at
        return find(self, text, at, closed)

    monkeypatch.setattr(Markers, "find", count)
    f = FORMATS[name]
    text = write(f, [("get_weather", {"city": "a, b \n" * 3000})]) + " <" * 3000
    parser = AnswerParser(f, TOOLS)
    for character in text:
        parser.feed(character)
    parser.finish()
    assert len(parser.message().tool_calls) == 1
    assert searched[0] < 20 * len(text)
