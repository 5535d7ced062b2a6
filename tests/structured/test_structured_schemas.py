"""JSON schemas before they are compiled: which objects have no further properties, and which schemas are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from helpers.models import info
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.structured import schemas
from nanoinfer.structured.grammars import Grammars
from nanoinfer.tokenizers.tokenizer import CharTokenizer

pytest.importorskip("llguidance")

CHARS = [chr(i) for i in range(32, 127)] + ["\n"]
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def properties(*names: str, **further: Any) -> dict[str, Any]:
    """An object with required integers of these names."""
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), "required": list(names), **further}


# As pydantic writes class Person(BaseModel): name: str; home: Address; others: list[Address] = []
PYDANTIC = {
    "$defs": {"Address": properties("number") | {"title": "Address"}},
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "home": {"$ref": "#/$defs/Address"},
        "others": {"default": [], "items": {"$ref": "#/$defs/Address"}, "title": "Others", "type": "array"},
    },
    "required": ["name", "home"],
}


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    return Grammars(info(CharTokenizer(CHARS)))


def accepts(compiler: Grammars, schema: Any, value: Any, **options: Any) -> bool:
    """Whether an output may be a value, as json.dumps writes it."""
    matcher = compiler.compile(StructuredOutputsParams(json=schema, **options)).lexer().new_matcher()
    ids = compiler._model.require_tokenizer().encode(json.dumps(value))
    return all(matcher.consume_token(i) for i in ids) and bool(matcher.is_accepting())


def test_outputs_of_a_pydantic_model_end(compiler: Grammars) -> None:
    home, more = {"number": 1}, {"number": 1, "x": 1}
    for value, is_closed in (
        ({"name": "a", "home": home}, True),
        ({"name": "a", "home": home, "others": [home, home]}, True),
        ({"name": "a", "home": home, "x": 1}, False),
        ({"name": "a", "home": more}, False),
        ({"name": "a", "home": home, "others": [more]}, False),
    ):
        assert accepts(compiler, PYDANTIC, value) == is_closed
        assert accepts(compiler, PYDANTIC, value, disable_additional_properties=False)


def test_a_model_that_prefers_further_properties_ends() -> None:
    """The bias prefers what opens a property: without the closing, the output has no end."""
    llm = LLM("shakespeare", engine="native")
    bias = {llm.get_tokenizer().encode(",")[0]: 50.0}
    schema = {"type": "object", "properties": {"a": INTEGER | {"maximum": 9, "minimum": 0}}, "required": ["a"]}
    reasons = []
    for closes in (True, False):
        wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=closes)
        params = SamplingParams(temperature=0, max_tokens=60, logit_bias=bias, structured_outputs=wanted)
        (output,) = llm.generate(["a"], params)
        reasons.append(output.outputs[0].finish_reason)
    assert reasons == ["stop", "length"]


CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    # schema, values that an output may be, values that it may not be
    "root": (properties("a"), [{"a": 1}], [{"a": 1, "b": 1}]),
    "no properties": ({"type": "object"}, [{}, {"b": 1}], [1]),
    "empty properties": ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    "property": (
        properties("a") | {"properties": {"a": properties("b")}},
        [{"a": {"b": 1}}],
        [{"a": {"b": 1, "c": 1}}],
    ),
    "item": ({"type": "array", "items": properties("a")}, [[], [{"a": 1}]], [[{"a": 1, "b": 1}]]),
    "option of anyOf": (
        {"anyOf": [properties("a"), properties("b"), INTEGER]},
        [{"a": 1}, {"b": 1}, 7],
        [{"a": 1, "b": 1}, {"c": 1}],
    ),
    "it refers to itself": (
        {"type": "object", "properties": {"a": INTEGER, "next": {"$ref": "#"}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "next": {"a": 2}}],
        [{"a": 1, "b": 2}, {"a": 1, "next": {"a": 2, "b": 2}}],
    ),
    "required but not listed": (
        {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    # Left open, because it says so.
    "additionalProperties": (properties("a", additionalProperties=True), [{"a": 1}, {"a": 1, "b": "x"}], [{"b": 1}]),
    "their type": (properties("a", additionalProperties=STRING), [{"a": 1, "b": "x"}], [{"a": 1, "b": 1}]),
    "patternProperties": (properties("a", patternProperties={"^b": STRING}), [{"a": 1, "b": "x"}], [{"a": 1, "b": 1}]),
    "minProperties": (properties("a", minProperties=2), [{"a": 1, "b": 1}], [{"a": 1}]),
    # Left open, because a closed part would refuse the properties of the others.
    "allOf": ({"allOf": [properties("a"), properties("b")]}, [{"a": 1, "b": 1}], [{"a": 1}]),
    "properties beside allOf": (properties("a", allOf=[properties("b")]), [{"a": 1, "b": 1}], [{"a": 1}]),
    "properties beside anyOf": (
        properties("a", anyOf=[properties("b"), properties("c")]),
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
        [{"a": 1}],
    ),
    "properties beside a reference": (
        properties("a", **{"$ref": "#/$defs/B", "$defs": {"B": properties("b")}}),
        [{"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    # Closed again: only one part of the composition describes the object.
    "allOf with words about it": (
        {"allOf": [{"$ref": "#/$defs/A"}, {"description": "an A"}], "$defs": {"A": properties("a")}},
        [{"a": 1}],
        [{"a": 1, "b": 1}],
    ),
}

KIND = {kind: properties(x) | {"properties": {"kind": {"const": kind}, x: INTEGER}} for kind, x in ("ax", "by", "cz")}
CASES |= {
    # As pydantic writes Annotated[A | B, Field(discriminator="kind")], whose kinds have defaults, and an A | (B | C).
    "discriminated union": (
        {"type": "object", "properties": {"p": {
            "oneOf": [{"$ref": "#/$defs/a"}, {"oneOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}],
            "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/a", "b": "#/$defs/b"}},
        }}, "required": ["p"], "$defs": KIND},
        [{"p": {"kind": "a", "x": 1}}, {"p": {"kind": "b", "y": 1}}, {"p": {"kind": "c", "z": 1}}],
        [{"p": {"x": 1}}, {"p": {"kind": "a", "y": 1}}, {"p": {"kind": "a", "x": 1, "z": 1}}, {"p": {}}],
    ),
    # As zod 4 writes z.record(z.string(), ...), of an enum, z.partialRecord, of z.string().regex(...).
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        [{}, {"any": 1}],
        [{"any": "x"}],
    ),
    "record of an enum": (
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER,
         "required": ["a", "b"]},
        [{"a": 1, "b": 1}],
        [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": "x", "b": 1}],
    ),
    "record of a constant by reference": (
        {"propertyNames": {"$ref": "#/$defs/k"}, "additionalProperties": INTEGER, "$defs": {"k": {"const": "a"}}},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    "record of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INTEGER},
        [{}, {"a": 1, "aa": 1}],
        [{"b": 1}, {"a": "x"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_which_objects_are_closed(compiler: Grammars, name: str) -> None:
    schema, good, bad = CASES[name]
    before = copy.deepcopy(schema)
    assert [v for v in good if not accepts(compiler, schema, v)] == []
    assert [v for v in bad if accepts(compiler, schema, v)] == []
    assert schema == before  # the caller's is not changed
    # What a closed schema permits, the schema as it was given permits.
    assert all(accepts(compiler, schema, v, disable_additional_properties=False) for v in good)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(schema)
    schemas.close(found)
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [properties("a"), properties("b")]},  # closed, both options would match {} if nothing were required
        {"$ref": "other.json", "properties": {"a": properties("b")}},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#anchor"},
        {"$ref": 1, "properties": []},
        {"properties": 1, "items": 1, "anyOf": 1, "$defs": 1, "required": 1},
        properties("a", unevaluatedProperties=False),
    ],
    ids=json.dumps,
)
def test_schemas_that_are_left_as_they_are(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_reference_names_its_target_as_rfc_6901_does() -> None:
    names = {"$defs": {"a/b": {"~c d": properties("x")}}, "prefixItems": [INTEGER, properties("y")]}
    escaped, item = {"$ref": "#/$defs/a~1b/~0c%20d"}, {"$ref": "#/prefixItems/1"}
    found = closed({**names, "anyOf": [escaped, item]})
    assert found["$defs"]["a/b"]["~c d"]["additionalProperties"] is False
    assert found["prefixItems"][1]["additionalProperties"] is False


def test_a_schema_is_closed_in_time_linear_in_its_size() -> None:
    """10,000 references to one definition, and a chain of definitions that is deeper than Python's stack."""
    wide = {"$defs": {"A": properties("a")}, "anyOf": [{"$ref": "#/$defs/A"}] * 10_000}
    assert closed(wide)["$defs"]["A"]["additionalProperties"] is False
    chain: dict[str, Any] = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(5000)}
    chain["d5000"] = properties("a")
    found = closed({"$defs": chain, "$ref": "#/$defs/d0"})
    assert all(d["additionalProperties"] is False for d in found["$defs"].values())
