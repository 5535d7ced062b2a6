"""Answers read by a model's response template, compared with transformers' parse_response."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.chat import chat_folder
from helpers.response_templates import CALL, TEMPLATES, random_answer, random_pieces
from nanoinfer import LLM
from nanoinfer.checkpoints import tokenizer_files
from nanoinfer.checkpoints.load import load_model
from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.answers import response_template
from nanoinfer.inputs.answers.response_template import ResponseTemplate, ResponseTemplateParser
from nanoinfer.inputs.chat import ChatFormatter
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta

PROPERTIES = {"n": {"type": "integer"}, "s": {"type": "string"}, "on": {"type": ["boolean", "null"]}}
ADD = Tool("add", parameters={"type": "object", "properties": PROPERTIES})
ANCHORS = {
    name: (given if isinstance(given := spec.get("start_anchor", "bot1:"), str) else given[-1])
    for name, spec in TEMPLATES.items()
}


@pytest.fixture(scope="module")
def templates() -> dict[str, ResponseTemplate]:
    return {name: ResponseTemplate(spec) for name, spec in TEMPLATES.items()}


def read(template: ResponseTemplate, pieces: list[str], prompt: str = "") -> tuple[ChatMessage, list[AnswerDelta]]:
    parser = ResponseTemplateParser(template, [ADD], prompt=prompt)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    return parser.message(), deltas


def without_ids(message: ChatMessage) -> tuple[Any, ...]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def assert_deltas_give(message: ChatMessage, deltas: list[AnswerDelta]) -> None:
    texts: dict[type, str] = {ContentDelta: "", ReasoningDelta: ""}
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.id is not None:
                assert (delta.index, delta.arguments) == (len(calls), "")
                calls.append([delta.id, str(delta.name), ""])
            else:
                assert delta.name is None
                calls[delta.index][2] += delta.arguments
        else:
            assert delta.text
            texts[type(delta)] += delta.text
    assert [[call.id, call.name, call.arguments] for call in message.tool_calls] == calls
    assert (message.content or "", message.reasoning or "") == (texts[ContentDelta], texts[ReasoningDelta])


def theirs(name: str, text: str, prompt: str) -> tuple[Any, ...] | None:
    """Return what transformers' parser finds, by its events; None if it refuses the answer."""
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    spec = TEMPLATES[name]
    tools = [ADD.for_template()]
    try:
        parser = chat_parsing.ResponseParser(spec, prefix=prompt, tools=tools)
        events = parser.feed(text) + parser.finalize()[1]
    except (ValueError, KeyError):
        return None
    found: dict[str, list[Any]] = {"content": [], "reasoning": [], "tool_calls": []}
    join = {"content": "\n", "reasoning": "\n"}
    for event in events:
        if event["type"] == "region_close":
            field, value = event["field"], event["value"]
            kind = field if field in ("content", "tool_calls") else "reasoning"
            if kind != "tool_calls":
                join[kind] = spec["fields"][field].get("join", "\n")
            found[kind] += value if isinstance(value, list) else [value]
    calls = [(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
             for call in found["tool_calls"]]  # fmt: skip
    content, reasoning = (join[kind].join(filter(None, found[kind])) for kind in ("content", "reasoning"))
    return content or (None if calls else ""), reasoning or None, calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_answers_are_read_as_by_transformers(name: str, templates: dict[str, ResponseTemplate]) -> None:
    num_compared = num_calls = 0
    for seed in range(60):
        chance = random.Random(f"{name} {seed}")
        text, prompt = random_answer(name, chance), ANCHORS[name] if chance.random() < 0.7 else ""
        expected = theirs(name, text, prompt)
        message, deltas = read(templates[name], random_pieces(text, chance), prompt)
        assert_deltas_give(message, deltas)
        if expected is None or any(call[0] != "add" for call in expected[2]):
            continue
        assert without_ids(message) == expected, text
        num_compared += 1
        num_calls += len(expected[2])
    assert num_compared > 30
    assert num_calls > 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_cut_gives_the_same_message(name: str, templates: dict[str, ResponseTemplate]) -> None:
    for seed in range(2):
        chance = random.Random(f"cuts {name} {seed}")
        text = random_answer(name, chance)
        whole = without_ids(read(templates[name], [text])[0])
        by_character = ResponseTemplateParser(templates[name], [ADD])
        for i in range(len(text)):
            assert without_ids(read(templates[name], [text[:i], text[i:]])[0]) == whole, (text, i)
            released = ResponseTemplateParser(templates[name], [ADD])
            released.feed(text[:i])
            assert without_ids(by_character.message()) == without_ids(released.message()), (text, i)
            by_character.feed(text[i])


ANSWERS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "json": (
        "<|bot|>\n",
        '<think>\nhm\n</think>\n\nHi  you. \n<call>{"name": "add", "arguments": {"n": "3", "s": "é"}}</call>\n<|stop|>',
        ("Hi  you.", "hm", [("add", '{"n": 3, "s": "é"}')]),
    ),
    "list": (
        "<BOT>old</SAY><BOT><GO><THINK>",
        ' hm</THINK>dropped<ACT>[{"tool": "add", "parameters": {"n": 1}}, {"tool": "add", "parameters": {}}]</ACT>',
        (None, "hm", [("add", '{"n": 1}'), ("add", "{}")]),
    ),
    "tags": (
        "<|bot|>\n<think>\n\n</think>\n\n",
        "Yes.\n\n<call>\n<function=add>\n<arg=s>\n07 \n</arg>\n<arg=n>\n07\n</arg>\n</function>\n</call>",
        ("Yes.", None, [("add", '{"s": "07", "n": "07"}')]),
    ),
    "channels": (
        "<|start|>bot",
        '<|ch|>analysis<|msg|>hm<|end|><|start|>bot<|ch|>comment to=f.add <|json|><|msg|>{"n": 1}<|do|>',
        (None, "hm", [("add", '{"n": 1}')]),
    ),
    "dialect": (
        "<result|>",
        'So<|call>call:add{n:3,s:<|"|>a: "b", {c:<|"|>,on:null}<call|>',
        ("So", None, [("add", '{"n": 3, "s": "a: \\"b\\", {c:", "on": null}')]),
    ),
    "prefilled": ("Bot:", "hm\n</think>\n\n<say>\nHi\n</say>\n", ("Hi", "hm", [])),
    "blocks": (
        "<|from|>",
        '<|think|> a <|end|><|from|>me<|think|>b<|end|><|say|> c <|end|><|say|>d<|end|><|do|>{"name":"add","args":{}}'
        "<|end|>",
        ("c d", " a b", [("add", "{}")]),
    ),
    "lines": ("bot:", "[add]\nn=3\nno value\ns= a b\n\n", ("", None, [("add", '{"n": 3, "s": "a b"}')])),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_in_the_style_of_published_templates(name: str, templates: dict[str, ResponseTemplate]) -> None:
    prompt, text, expected = ANSWERS[name]
    expected = (expected[0] or (None if expected[2] else ""), *expected[1:])
    message, deltas = read(templates[name], list(text), prompt)
    assert without_ids(message) == expected
    assert_deltas_give(message, deltas)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in message.tool_calls)


def test_text_is_released_at_once_where_it_can_be_no_marker(templates: dict[str, ResponseTemplate]) -> None:
    parser = ResponseTemplateParser(templates["json"], [ADD])
    assert parser.feed("  Hi") == [ContentDelta("Hi")]
    assert parser.feed(" <cal") == []
    assert parser.feed("m>") == [ContentDelta(" <calm>")]
    assert parser.feed("<call>{") == []
    found = parser.feed('"name": "add", "arguments": {}}</call>')
    assert [(delta.index, delta.name, delta.arguments) for delta in found if isinstance(delta, CallDelta)] == [
        (0, "add", ""),
        (0, None, "{}"),
    ]
    assert parser.finish() == []


@pytest.mark.parametrize(
    "text, content",
    [
        ('a <call>{"name": "add", "arguments": {]}</call> b', 'a\n<call>{"name": "add", "arguments": {]}</call>\nb'),
        ('<call>{"name": "sub", "arguments": {}}</call>', '<call>{"name": "sub", "arguments": {}}</call>'),
        ('<call>{"name": "add", "arguments": 3}</call>', '<call>{"name": "add", "arguments": 3}</call>'),
        (
            '<call>{"name": "add", "arguments": {"n": NaN}}</call>',
            '<call>{"name": "add", "arguments": {"n": NaN}}</call>',
        ),
        ("<call>[[[1]]]</call>", "<call>[[[1]]]</call>"),
        ("<call>" + "[" * 100000 + "</call>", "<call>" + "[" * 100000 + "</call>"),
        ('a <call>{"name": "ad', "a"),
    ],
)
def test_malformed_calls_are_content(text: str, content: str, templates: dict[str, ResponseTemplate]) -> None:
    message, deltas = read(templates["json"], [text])
    assert without_ids(message) == (content, None, [])
    assert_deltas_give(message, deltas)


def test_a_pattern_may_refer_to_groups() -> None:
    fields: dict[str, Any] = {"content": {"close_pattern": r"(?P<q>['*])end(?P=q)"}}
    fields |= {"tool_calls": {"open": "<c>"}}
    parser = ResponseTemplateParser(ResponseTemplate({"start_anchor": "A", "fields": fields}))
    assert parser.feed("a 'end* b *end") == [ContentDelta("a 'end* b")]
    assert parser.feed("* c") == [ContentDelta("\nc")]
    assert parser.finish() == []


def test_a_pattern_without_end_makes_the_rest_content(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_template, "CPU_SEC", 0.2)
    fields = {"tool_calls": {"open": "<c>", "close_pattern": "(?:x|xx)+$y", "transform": CALL}, "content": {}}
    template = ResponseTemplate({"start_anchor": "A", "fields": fields})
    message, deltas = read(template, ["a <c>b", "x" * 40, "z", "<c>"])
    assert message == ChatMessage("a<c>b" + "x" * 40 + "z<c>")
    assert_deltas_give(message, deltas)
    assert "it needs more than 0.2 s of CPU time: the rest of the answer is content" in caplog.text
    assert read(template, ["a"])[0].content == "a"  # the next answer


def test_empty_markers_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_template, "CPU_SEC", 0.2)
    fields = {"thinking": {"open_pattern": "(?=x)", "close_pattern": "(?=x)"}, "content": {}}
    assert read(ResponseTemplate({"start_anchor": "A", "fields": fields}), ["a", "xy"])[0].content == "axy"
    assert "it needs more than 0.2 s of CPU time" in caplog.text


@pytest.mark.parametrize("name", ["json", "tags", "channels"])
def test_a_long_answer_keeps_a_short_state(name: str) -> None:
    """So each piece takes the same time. The bodies of calls are kept elsewhere, once."""
    prompt = ANCHORS[name] + (ANSWERS[name][1] if name == "channels" else "<call>")
    parser = ResponseTemplateParser(ResponseTemplate(TEMPLATES[name]), prompt=prompt)
    sizes = set()
    for _ in range(3000):
        parser.feed("ab <c")
        sizes.add(len(parser._buffer))
    assert max(sizes) < 80


def changed(value: Any, chance: random.Random) -> Any:
    """Return a template with some values replaced."""
    if chance.random() < 0.03:
        return chance.choice(
            [None, 0, -1, True, "", "a", "{content.x}", [], ["<"], [["", ""]], {}, {"name": "json"}, 1e9]
        )
    if isinstance(value, dict):
        return {chance.choice([key] * 30 + ["content", "close"]): changed(item, chance) for key, item in value.items()}
    return [changed(item, chance) for item in value] if isinstance(value, list) else value


def test_changed_templates_are_refused_or_read_something() -> None:
    reasons = []
    for seed in range(400):
        chance = random.Random(seed)
        name = chance.choice([name for name in TEMPLATES if "_pattern" not in json.dumps(TEMPLATES[name])])
        try:
            template = ResponseTemplate(changed(TEMPLATES[name], chance))
        except NanoinferError as e:
            reasons.append(str(e))
            continue
        message, deltas = read(template, random_pieces(random_answer(name, chance), chance), ANCHORS[name])
        assert_deltas_give(message, deltas)
    assert 50 < len(reasons) < 350
    assert not any("\n" in reason for reason in reasons)


ODD: list[tuple[Any, str]] = [
    ([], "response_template=[] is not an object"),
    ({"fields": {}, "x-regex": 1}, "response_template has the unknown key 'x-regex'"),
    ({"version": 2}, "response_template.version=2 is unknown: only 1 is"),
    ({"fields": {"content": {}}}, "response_template has neither start_anchor nor start_anchor_pattern"),
    ({"start_anchor": "a"}, "response_template.fields=None is not an object with fields"),
    ({"start_anchor": "a", "fields": 3}, "response_template.fields=3 is not an object with fields"),
    ({"start_anchor": []}, "response_template.start_anchor=[] is not a text"),
    ({"start_anchor": ""}, "response_template.start_anchor='' is not a text of 1 to 256 characters"),
    ({"start_anchor": "a" * 70000}, "response_template has more than 65536 characters of JSON"),
]
ODD += [
    ({"start_anchor": "a", "fields": fields}, reason)
    for fields, reason in [
        ({"content": 3}, "response_template.fields.content=3 is not an object"),
        ({"content": {}, "thinking": {}}, "response_template.fields: ['content', 'thinking'] have no open"),
        ({"content": {"open": ["a", 3]}}, "fields.content.open=3 is not a text of 1 to 256 characters"),
        ({"content": {"close_pattern": "a" * 513}}, "is not a text of 1 to 512 characters"),
        ({"content": {"content": "yaml"}}, "fields.content.content='yaml' is none of text, json, xml-inline"),
        ({"content": {"content": []}}, "fields.content.content=[] is none of text, json, xml-inline"),
        ({"content": {"content": "json"}}, "fields.content is a value: only tool_calls may be one"),
        ({"content": {"content_args": []}}, "fields.content.content_args=[] is not of the type dict"),
        ({"content": {"join": 3}}, "fields.content.join=3 is not of the type str"),
        ({"content": {"close_pattern": "a("}}, "content.close_pattern='a(': missing )"),
        ({"content": {"close_pattern": r"a(?R)?b"}}, r"content.close_pattern='a(?R)?b' is recursive or has the flag x"),
        ({"content": {"close_pattern": "(?ix)a{1 0}"}}, "is recursive or has the flag x, which are not supported"),
        ({"content": {"close_pattern": "a{999999}"}}, "a{999999}' is too large: it has too many + or too"),
        ({"content": {"close_pattern": "(" * 40 + "a|b" + ")+" * 40}}, "is too large: it has too many + or too large"),
        ({"tool_calls": {"transform": {"a": [0] * 99}}}, "tool_calls.transform has more than 64 values"),
    ]
]  # fmt: skip


@pytest.mark.parametrize("spec, reason", ODD)
def test_malformed_templates_are_refused(spec: Any, reason: str) -> None:
    with pytest.raises(NanoinferError) as caught:
        ResponseTemplate(spec)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_has_the_template_of_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = chat_folder(tmp_path / "model")
    assert load_model(str(folder)).response_template is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": TEMPLATES["json"]}))
    loaded = load_model(str(folder))
    assert loaded.response_template == TEMPLATES["json"]
    for name, content in tokenizer_files.to_files(None, {}, {}, loaded.response_template).items():
        (tmp_path / name).write_bytes(content)
    assert tokenizer_files.response_template(tmp_path) == TEMPLATES["json"]


def test_a_template_that_cannot_be_used_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = chat_folder(tmp_path)
    model = LLM(str(folder), engine="recompute").model
    assert ChatFormatter(model).response_template(None) is None
    assert caplog.text == ""
    used = ChatFormatter(replace(model, response_template=TEMPLATES["json"])).response_template(None)
    assert used is not None
    assert list(used.fields) == ["thinking", "tool_calls", "content"]
    assert ChatFormatter(replace(model, response_template=["a"])).response_template(None) is None
    assert "response_template=['a'] is not an object: answers are read by the format of the chat" in caplog.text
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    assert ChatFormatter(replace(model, response_template={"defaults": deep})).response_template(None) is None
    assert "recursion" in caplog.text
