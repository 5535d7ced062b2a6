"""Schemas of tools that are malformed or made to do harm: each is refused by one line, or read in bounded work.

Without `strict`, what grammars cannot express is left out of them.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from helpers.answers import FORMATS
from helpers.errors import refuses
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.answers.lark import ANY_OBJECT, MAX_CHARS, LenientTools
from nanoinfer.inputs.messages import Tool
from nanoinfer.structured import schemas
from nanoinfer.structured.check_worker import byte_tokens

MANY = 30
OPTIONS = {"anyOf": [{"$ref": "#/$defs/a"}] * MANY}
CHAIN = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)} | {"a60": {"type": "string"}}
LONG = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)} | {"a2000": {"type": "string"}}


def grammar(name: str, properties: Any, **fields: Any) -> object:
    schema = {"type": "object", "properties": properties, **fields}
    return to_grammar(FORMATS[name], [Tool("get", "", schema)], "required")


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


@pytest.mark.parametrize("name", ["coder", "gemma", "lfm", "hermes"])
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


@pytest.mark.parametrize("name", ["coder", "gemma", "lfm", "hermes"])
def test_a_long_chain_of_references(name: str) -> None:
    if name == "gemma":
        refuses(lambda: grammar(name, {"a": {"$ref": "#/$defs/a0"}}, **{"$defs": LONG}), "tool 'get'", "nest too deep")
    else:
        assert grammar(name, {"a": {"$ref": "#/$defs/a0"}}, **{"$defs": LONG}) is not None


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "object", "propertyNames": {"maxLength": 9}, "additionalProperties": {"type": "string"}},
        "propertyNames",
    ),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 3}, "contains, minContains"),
    ({"type": "string", "not": {"enum": ["x"]}}, "not"),
    ({"type": "object", "properties": {"b": {}}, "if": {}, "then": {}, "else": {}}, "if, then, else"),
    ({"type": "object", "properties": {"b": {}}, "dependentRequired": {"b": ["c"]}}, "dependentRequired"),
    ({"type": "object", "properties": {"b": {}}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "properties": {"b": {}, "c": {}}, "minProperties": 1}, "minProperties"),
    ({"type": "string", "format": "binary"}, "format"),
    ({"type": "string", "pattern": "^(?!-)[a-z]+$"}, "pattern"),
    ({"type": "string", "pattern": r"\bword\b"}, "pattern"),
    ({"type": "object", "patternProperties": {"(?<=a)b": {}}, "additionalProperties": False}, "patternProperties"),
    ({"oneOf": [{"type": "string"}, {"const": "x"}]}, "oneOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "enum": None, "pattern": None, "default": None}, "enum, pattern"),
    ({"type": "array", "items": None, "minItems": None}, "items, minItems"),
    ({"type": "any"}, "type"),
    ({"type": "string", "required": True}, "required"),
    ({"$ref": "#/components/schemas/Pet"}, "$ref"),
    ({"$ref": "https://example.com/pet.json"}, "$ref"),
]


@pytest.mark.parametrize("name", ["hermes", "coder", "lfm", "gemma"])
@pytest.mark.parametrize(("schema", "left_out"), LEFT_OUT, ids=lambda x: str(x)[:60])
def test_without_strict_what_grammars_cannot_express_is_left_out(
    name: str, schema: dict[str, Any], left_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    llguidance = pytest.importorskip("llguidance")
    table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(byte_tokens([])))
    tools = [Tool("get", "", {"type": "object", "properties": {"a": schema, "n": {"type": "integer"}}})]
    lenient = LenientTools()
    with caplog.at_level(logging.WARNING):
        made = [lenient.of(tools, FORMATS[name]) for _ in range(2)]
    assert [r.message for r in caplog.records] == [
        f"tool 'get': the grammar of its calls leaves out {left_out}: arguments may not match them (strict is false)"
    ]
    assert made[0] == made[1]
    assert made[0][0].parameters != ANY_OBJECT
    text = str(getattr(to_grammar(FORMATS[name], made[0], "required"), "grammar", None))
    assert not llguidance.LLMatcher(table, text, log_level=0).get_error()
    assert left_out.split(", ")[0] in tools[0].parameters["properties"]["a"]


@pytest.mark.parametrize("name", ["hermes", "coder", "lfm", "gemma"])
def test_equivalent_keywords_are_rewritten_without_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    union = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    listed = {"type": "array", "uniqueItems": False, "default": None, "items": {"$ref": "#/properties/u"}}
    schema = {"type": "object", "properties": {"u": union, "r": record, "l": listed}}
    made = LenientTools().of([Tool("get", "", schema), Tool("strict", "", schema, strict=True)], FORMATS[name])
    assert "anyOf" in made[0].parameters["properties"]["u"]
    assert made[1].parameters == schema
    assert caplog.records == []


def test_tools_of_which_no_grammar_can_be_made_have_any_arguments(caplog: pytest.LogCaptureFixture) -> None:
    composed = {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    lenient = LenientTools()
    tools = [Tool("f", "", composed), Tool("g", "", wide), Tool("h", "", {"properties": {"a b": {}}})]
    for _ in range(2):
        assert [tool.parameters for tool in lenient.of(tools, FORMATS["lfm"])] == [ANY_OBJECT] * 3
    assert [record.message.partition(" any object: ")[2][:30] for record in caplog.records] == [
        "parameters have anyOf, which c",
        "structured_outputs.json: an ob",
        "parameters have the property '",
    ]
    strict = Tool("f", "", composed, strict=True)
    assert lenient.of([strict], FORMATS["lfm"]) == [strict]
    refuses(lambda: to_grammar(FORMATS["lfm"], [strict], "required"), "tool 'f': parameters have anyOf")


def test_the_largest_tools_have_any_arguments_if_all_are_too_large(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [20, 400, 30, 420, 410]
    tools = [Tool(f"t{n}", "", {"properties": {f"{'p' * 60}{i}": {"type": "string"} for i in range(n)}}) for n in sizes]
    lenient = LenientTools()
    for _ in range(2):
        made = lenient.of(tools, FORMATS["hermes"])
        assert [tool.name for tool in made if tool.parameters == ANY_OBJECT] == ["t420"]
        assert to_grammar(FORMATS["hermes"], made, "required") is not None
    assert [record.message for record in caplog.records if "t420" in record.message] == [caplog.records[-1].message]
    assert f"the limit is {MAX_CHARS}" in caplog.records[-1].message
