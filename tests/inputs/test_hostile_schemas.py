"""Schemas of tools that are malformed or made to do harm: each is refused by one line, or read in bounded work."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.answers import FORMATS
from helpers.errors import refuses
from nanoinfer.inputs.answers import lark, schema_types
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.tools import Tool

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
    calls, target = [0], schema_types.target

    def count(root: Any, reference: Any) -> Any:
        calls[0] += 1
        assert calls[0] < 10_000
        return target(root, reference)

    monkeypatch.setattr(schema_types, "target", count)
    monkeypatch.setattr(lark.schemas, "target", count)
    assert grammar(name, {"a": {**kind, **OPTIONS}}, **{"$defs": definitions}) is not None


def test_types_of_options_that_refer_to_themselves() -> None:
    root = {"properties": {"k": OPTIONS}, "$defs": {"a": {"anyOf": [*OPTIONS["anyOf"], {"type": "integer"}]}}}
    assert schema_types.types_of(root, "k") == {"integer"}
    assert schema_types.types_of({**root, "$defs": {"a": OPTIONS}}, "k") is None


@pytest.mark.parametrize("name", ["coder", "gemma", "lfm", "hermes"])
def test_a_long_chain_of_references(name: str) -> None:
    if name == "gemma":
        refuses(lambda: grammar(name, {"a": {"$ref": "#/$defs/a0"}}, **{"$defs": LONG}), "tool 'get'", "nest too deep")
    else:
        assert grammar(name, {"a": {"$ref": "#/$defs/a0"}}, **{"$defs": LONG}) is not None
