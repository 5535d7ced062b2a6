"""The OpenAPI document: the table of routes, and the tables of fields that the parser reads."""

from __future__ import annotations

import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

import nanoinfer
from nanoinfer.protocols.fields import REQUIRED, SAMPLING_OF, TABLES
from nanoinfer.sampling_params import MAX_LOGPROBS, OVERFLOWS, RANGES, SamplingParams
from nanoinfer.server.limits import LOGPROBS
from nanoinfer.server.service import Service
from nanoinfer.utils.checks import field_docs

Handler = Callable[[Service, Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class RouteSpec:
    """A route."""

    method: str
    path: str
    handler: Handler
    """The first line of its docstring is the summary of the route."""


_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}
_FORMS: dict[str, dict[str, Any]] = {
    "stop": {
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}]
    },
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "overflow": {"type": "string", "enum": list(OVERFLOWS)},
    "bad_words": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "allowed_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
}
"""Schemas of fields of SamplingParams whose types do not say what JSON may have."""


def document(routes: Sequence[RouteSpec], defaults: Mapping[str, SamplingParams], max_logprobs: int) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        routes: the table.
        defaults: of the fields of SamplingParams, by route.
        max_logprobs: the server's limit of the numbers of log-probabilities.
    """
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, defaults, max_logprobs)
    return {"openapi": "3.1.0", "info": {"title": "nanoinfer", "version": nanoinfer.__version__}, "paths": paths}


def _operation(
    route: RouteSpec, path: str, defaults: Mapping[str, SamplingParams], max_logprobs: int
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "responses": {"200": {"description": "The response."}, "default": {"description": "An error."}},
    }
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if path in TABLES:
        body = {"schema": request_schema(path, defaults.get(path), max_logprobs)}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return operation


def request_schema(url: str, defaults: SamplingParams | None, max_logprobs: int) -> dict[str, Any]:
    """Return the schema of the body of requests to a route. Any field may be null, which is its default."""
    properties = {} if defaults is None else _sampling(SAMPLING_OF[url], defaults)
    for name, field in TABLES[url].items():
        schema = dict(field.schema)
        if field.neutral is not None:
            schema = {"enum": list(field.neutral)}
        properties[name] = {**schema, "description": field.doc}
    for name in LOGPROBS:
        if properties.get(name, {}).get("type") == "integer":
            properties[name]["maximum"] = min(max_logprobs, MAX_LOGPROBS)
    return {
        "type": "object",
        "properties": {n: s if n in REQUIRED[url] else _nullable(s) for n, s in sorted(properties.items())},
        "required": REQUIRED[url],
        "additionalProperties": False,
    }


def _sampling(names: Sequence[str], defaults: SamplingParams) -> dict[str, dict[str, Any]]:
    """Return the schemas of fields of SamplingParams."""
    hints, docs = typing.get_type_hints(SamplingParams), field_docs(SamplingParams)
    schemas = {}
    for name in names:
        schema = dict(_FORMS[name]) if name in _FORMS else _schema(hints[name])
        if name in RANGES:
            low, high = RANGES[name]
            schema |= {"minimum": low} if high is None else {"minimum": low, "maximum": high}
        default = getattr(defaults, name)
        schemas[name] = {**schema, "description": docs[name], **({} if default is None else {"default": default})}
    return schemas


def _schema(hint: Any) -> dict[str, Any]:
    """Return the schema of a type: int | None -> {"type": "integer"}; None is added by `_nullable`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_schema(member) for member in typing.get_args(hint) if member is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is tuple:
        return {"type": "array", "items": _schema(typing.get_args(hint)[0])}
    return {"type": _SCALARS.get(hint, "object")}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows null, too."""
    if isinstance(kind := schema.get("type"), str):
        return {**schema, "type": [kind, "null"], **({"enum": [*schema["enum"], None]} if "enum" in schema else {})}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "enum": [*schema["enum"], None]} if "enum" in schema else schema
