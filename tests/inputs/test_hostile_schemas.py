"""Schemas of tools that are malformed or made to do harm: each is refused by one line, or read in bounded work.

Without `strict`, what grammars cannot express is left out of them.

Chat templates and response templates that are made to do harm: answers are read in bounded work."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from helpers.answers import FORMATS, TEMPLATES, template
from helpers.models import refuses
from nanoinfer.inputs.answers import response_template
from nanoinfer.inputs.answers.format import JSON_IN_MARKERS, MAX_PIECE, detect
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.answers.lark import ReleasedTools
from nanoinfer.inputs.answers.response_template import MAX_VALUES, ResponseTemplate, ResponseTemplateParser
from nanoinfer.inputs.messages import Tool
from nanoinfer.sampling_params import MAX_GRAMMAR_CHARS
from nanoinfer.structured import schemas
from nanoinfer.structured.check_worker import byte_tokens
from nanoinfer.tokenizers import chat_template
from nanoinfer.tokenizers.chat_template import ChatTemplate

MANY = 30
OPTIONS = {"anyOf": [{"$ref": "#/$defs/a"}] * MANY}
CHAIN = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)} | {"a60": {"type": "string"}}
LONG = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)} | {"a2000": {"type": "string"}}


def grammar(name: str, properties: Any, **fields: Any) -> object:
    schema = {"type": "object", "properties": properties, **fields}
    return to_grammar(FORMATS[name], [Tool("get", "", schema, strict=True)], "required")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": 5}, "anyOf=5 is not a list"),
        ({"oneOf": {"x": {}}}, "oneOf={'x': {}} is not a list"),
        ({"enum": 5}, "enum=5 is not a list"),
        ({"type": 7}, "type=7 is not a string or a list of strings"),
        ({"type": ["string", {}]}, "type=['string', {}] is not a string or a list of strings"),
        ({"type": "object", "properties": ["a"]}, "properties=['a'] is not an object"),
        ({"type": "object", "properties": {}, "required": [{}]}, "required=[{}] is not a list of strings"),
        ({"type": "object", "required": 5}, "required=5 is not a list of strings"),
        ({"type": "array", "minItems": "x"}, "minItems='x' is not an integer from 0"),
        ({"type": "array", "maxItems": -1}, "maxItems=-1 is not an integer from 0"),
        ({"type": "string", "minLength": 1.5}, "minLength=1.5 is not an integer from 0"),
        ({"type": "string", "maxLength": True}, "maxLength=True is not an integer from 0"),
        ({"type": "string", "pattern": 5}, "pattern=5 is not a string"),
        ({"$ref": 5}, "$ref=5 is not a string"),
        ({"$defs": [1]}, "$defs=[1] is not an object"),
    ],
)
def test_a_keyword_of_the_wrong_type_is_named(name: str, schema: dict[str, Any], message: str) -> None:
    refuses(lambda: grammar(name, {"a": schema}), "tool 'get': ", message)


@pytest.mark.parametrize("name", FORMATS)
def test_properties_are_an_object(name: str) -> None:
    refuses(lambda: grammar(name, "x"), "tool 'get': parameters: properties='x' is not an object")


def test_an_integer_may_be_written_with_a_point() -> None:
    assert "{0,2}" in str(grammar("coder", {"a": {"type": "string", "maxLength": 2.0}}))


@pytest.mark.parametrize("name", ["coder", "gemma", "hermes"])
@pytest.mark.parametrize("kind", [{}, {"type": "string"}])
@pytest.mark.parametrize(
    "definitions", [{"a": OPTIONS}, {"a": {"type": "string", **OPTIONS}}, {**CHAIN, "a": CHAIN["a0"]}]
)
def test_options_that_refer_to_each_other_are_read_once(
    name: str, kind: dict[str, Any], definitions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, target = [0], schemas.target

    def count(root: Any, reference: Any) -> Any:
        calls[0] += 1
        assert calls[0] < 10_000
        return target(root, reference)

    monkeypatch.setattr(schemas, "target", count)
    assert grammar(name, {"a": {**kind, **OPTIONS}}, **{"$defs": definitions}) is not None


def test_types_of_options_that_refer_to_themselves() -> None:
    root = {"properties": {"k": OPTIONS}, "$defs": {"a": {"anyOf": [*OPTIONS["anyOf"], {"type": "integer"}]}}}
    assert schemas.types_of(root, "k") == {"integer"}
    assert schemas.types_of({**root, "$defs": {"a": OPTIONS}}, "k") is None


@pytest.mark.parametrize("name", ["coder", "gemma", "hermes"])
def test_a_long_chain_of_references(name: str) -> None:
    if name == "gemma":
        refuses(lambda: grammar(name, {"a": {"$ref": "#/$defs/a0"}}, **{"$defs": LONG}), "tool 'get'", "nest too deep")
    else:
        assert grammar(name, {"a": {"$ref": "#/$defs/a0"}}, **{"$defs": LONG}) is not None


NARROWS: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"maxLength": 9}, "additionalProperties": {"type": "string"}},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 3},
    {"type": "string", "not": {"enum": ["x"]}},
    {"type": "object", "properties": {"b": {}}, "if": {}, "then": {}, "else": {}},
    {"type": "object", "properties": {"b": {}}, "dependentRequired": {"b": ["c"]}},
    {"type": "object", "properties": {"b": {}}, "unevaluatedProperties": False},
    {"type": "object", "properties": {"b": {}, "c": {}}, "minProperties": 1},
    {"type": "string", "format": "binary"},
    {"type": "string", "pattern": "^(?!-)[a-z]+$"},
    {"type": "string", "pattern": r"\bword\b"},
    {"oneOf": [{"type": "string"}, {"const": "x"}]},
    {"type": "string", "enum": None, "pattern": None, "default": None},
    {"type": "array", "items": None, "minItems": None},
    {"type": "any"},
    {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
]


@pytest.mark.parametrize("name", ["hermes", "coder", "gemma"])
@pytest.mark.parametrize("schema", NARROWS, ids=lambda x: str(x)[:60])
def test_without_strict_what_grammars_cannot_express_is_left_out(
    name: str, schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    llguidance = pytest.importorskip("llguidance")
    table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(byte_tokens([])))
    tool = Tool("get", "", {"type": "object", "properties": {"a": schema, "n": {"type": "integer"}}})
    text = str(getattr(to_grammar(FORMATS[name], [tool], "required"), "grammar", None))
    assert not llguidance.LLMatcher(table, text, log_level=0).get_error()
    assert caplog.records == []
    assert '"integer"' in text or "n" in text


def test_tools_of_which_no_grammar_can_be_made_have_any_arguments(caplog: pytest.LogCaptureFixture) -> None:
    composed = {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    tools = [Tool("f", "", composed), Tool("h", "", {"properties": {"<a>": {}}})]
    released = ReleasedTools()
    texts = {str(to_grammar(FORMATS["coder"], tools, "required", released=released)) for _ in range(2)}
    assert len(texts) == 1
    assert all(tool in released for tool in tools)
    assert [record.message.partition(" any object: ")[2][:30] for record in caplog.records] == [
        "parameters have anyOf, which c",
        "parameters have the property '",
    ]
    strict = Tool("f", "", composed, strict=True)
    refuses(lambda: to_grammar(FORMATS["coder"], [strict], "required"), "tool 'f': parameters have anyOf")


def test_the_largest_tools_have_any_arguments_if_all_are_too_large(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [20, 470, 30, 480, 475, 460]
    tools = [Tool(f"t{n}", "", {"properties": {f"{'p' * 60}{i}": {"type": "string"} for i in range(n)}}) for n in sizes]
    released = ReleasedTools()
    for _ in range(2):
        assert to_grammar(FORMATS["hermes"], tools, "required", released=released) is not None
        assert [tool.name for tool in tools if tool in released] == ["t480"]
    assert len(caplog.records) == 1
    assert f"the limit is {MAX_GRAMMAR_CHARS}" in caplog.records[-1].message


CALL = {"function": {"name": "{name}", "arguments": "{content}"}}


def calls(**field: Any) -> dict[str, Any]:
    given = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": CALL, **field}
    return {"start_anchor": "x", "fields": {"tool_calls": given, "content": {}}}


def test_markers_are_short(caplog: pytest.LogCaptureFixture) -> None:
    source = TEMPLATES["functionary"].replace("'<function='", f"'<' * {MAX_PIECE} + '<function='")
    assert source != TEMPLATES["functionary"]
    with caplog.at_level(logging.WARNING, "nanoinfer"):
        assert detect(ChatTemplate(source)) == JSON_IN_MARKERS
    assert f"surrounds answers by more than {MAX_PIECE} characters" in caplog.text


def test_renderings_are_short() -> None:
    source = template("").replace("{{ m.content }}", "{{ m.content }}{{ '<a>' * 100000 }}")
    assert detect(ChatTemplate(source)).trigger == "<tool_call>"


@pytest.mark.parametrize("text", ["</" + "think" * 30_000, "</think" * 30_000, "</" * 30_000, "[/think:" * 30_000])
def test_the_end_of_reasoning_is_searched_in_linear_time(text: str) -> None:
    found = detect(ChatTemplate(template("", "{% set x = '" + text + "' %}")))
    assert (found.trigger, found.reasoning_end) == ("<tool_call>", "")


def test_a_template_that_exceeds_a_limit_is_rendered_once_more_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SEC", 0.2)
    loop = "{% for i in range(99999) %}"
    made = ChatTemplate("{{ messages[0].content }}" + loop * 2 + "{% endfor %}" * 2)
    rendered, render = [0], ChatTemplate.render

    def count(self: ChatTemplate, *args: Any, **variables: Any) -> str:
        rendered[0] += 1
        return render(self, *args, **variables)

    monkeypatch.setattr(ChatTemplate, "render", count)
    assert detect(made).trigger == "<tool_call>"
    assert rendered[0] == 1


def test_a_value_that_exceeds_a_limit_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(response_template, "CPU_SEC", 0.2)
    args = {"tag_pattern": "(?P<key>(?:a|aa)+)(?P<value>)$b"}
    template = ResponseTemplate(
        calls(content="xml-inline", content_args=args, open_pattern="<(?P<name>get)>", open=None)
    )
    num_values, value = [0], ResponseTemplate.calls

    def count(self: ResponseTemplate, *args: Any) -> Any:
        num_values[0] += 1
        return value(self, *args)

    monkeypatch.setattr(ResponseTemplate, "calls", count)
    parser = ResponseTemplateParser(template, [Tool("get")])
    text = "<get>" + "a" * 60 + "c</call>"
    parser.feed(text * 3)
    parser.finish()
    assert parser.message().content == text * 3
    assert num_values[0] == 1


def test_the_shape_of_a_value_is_small() -> None:
    shape = {"function": {"name": "get", "arguments": {str(i): "{content}" for i in range(MAX_VALUES)}}}
    refuses(lambda: ResponseTemplate(calls(transform=shape)), f"transform has more than {MAX_VALUES} values")
