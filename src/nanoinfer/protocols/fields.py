"""The fields of the bodies of requests: one table for each route, which the parsers and the OpenAPI document read.

Besides the fields of its table, a route that generates has those of `SamplingParams` (vLLM's extra ones: top_k, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nanoinfer.errors import NanoinferError, show
from nanoinfer.sampling_params import MAX_LOGPROBS, RANGES, WHOLE_VOCABULARY, SamplingParams
from nanoinfer.utils.checks import require_bool, require_int

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES, COUNT_TOKENS = ANTHROPIC = "/v1/messages", "/v1/messages/count_tokens"
"""Routes in Anthropic's shape."""
MAX_PROMPTS = 128
"""Prompts of one request to /v1/completions."""
MAX_INPUTS = 2048
"""Inputs of one request to /v1/embeddings."""
MAX_TOOLS = 128
SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "output_kind")  # a request has stream
_OF_RESPONSE = ("n", "best_of", "max_tokens", "logprobs", "prompt_logprobs")
SAMPLING_OF = {
    **dict.fromkeys((COMPLETIONS, CHAT), tuple(name for name in SAMPLING if name != "prompt_logprobs")),
    RESPONSES: tuple(name for name in SAMPLING if name not in _OF_RESPONSE),
}
"""The fields of SamplingParams that each route has."""


class FieldError(NanoinferError):
    """A field of a request is unknown, missing or not supported, or has a bad value.

    Args:
        message: one line.
        param: name of the field.
        status: HTTP status.
        code: OpenAI's code, such as "model_not_found".
    """

    def __init__(self, message: str, param: str | None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def unknown_model(name: object, known: Sequence[str]) -> FieldError:
    """Return the error of a request for a model that this server does not have."""
    message = f"the model {show(name)} does not exist: this server has {', '.join(known)}"
    return FieldError(message, "model", 404, "model_not_found")


@dataclass(frozen=True)
class Field:
    """A field of a request."""

    schema: Mapping[str, Any]
    """JSON schema of its values. `read_value` checks the types, and the fields of objects that have no others."""
    doc: str
    neutral: tuple[Any, ...] | None = None
    """The values that are supported, all of which have no effect; None: any."""


_BOOL, _STRING, _INT = {"type": "boolean"}, {"type": "string"}, {"type": "integer"}
_OBJECT, _LIST = {"type": "object"}, {"type": "array"}
_IGNORED = Field({}, "Accepted without effect.")
_VERBOSITY = {"enum": ["low", "medium", "high"]}


def _from(low: int) -> dict[str, Any]:
    return {**_INT, "minimum": low}


def _list(items: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**_LIST, "items": items, **more}


def _open(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that may have further fields."""
    return {**_OBJECT, "properties": properties, **({"required": [*required]} if required else {})}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {**_open(required, **properties), "additionalProperties": False}


def _either(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schemas]}


_TOKEN_IDS = _list(_from(0))
_PROMPTS = _either(_STRING, _TOKEN_IDS, _list(_either(_STRING, _TOKEN_IDS)))
_TYPED = {**_OBJECT, "required": ["type"]}
_DESCRIBED = {"name": _STRING, "description": _STRING}
_FUNCTION = {**_DESCRIBED, "parameters": _OBJECT, "strict": _BOOL}
_SCHEMA = {**_DESCRIBED, "schema": _OBJECT, "strict": _BOOL}
_FORMATS = {"enum": ["text", "json_object", "json_schema"]}
_CHOICE = _either({"enum": ["none", "auto", "required"]}, _TYPED)

_QUEUE = {
    "model": Field(_STRING, "Name of the model, as /v1/models lists it."),
    "priority": Field(
        {**_INT, "minimum": -(2**31), "maximum": 2**31 - 1},
        "Requests of smaller priority are admitted first (default: 0).",
    ),
    "cache_salt": Field(
        {**_STRING, "minLength": 1}, "Only requests of the same salt share the keys and values of prefixes."
    ),
}
_GENERATES = {
    **_QUEUE,
    "stream": Field(_BOOL, "Send the output as server-sent events, while it is generated."),
    "seed": Field(_INT, "Seed of the random numbers; -1: a random one."),
    **dict.fromkeys(
        ("cache_prompt", "keep_alive", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
         "service_tier", "store", "user"), _IGNORED,
    ),
}  # fmt: skip
_BOTH = {
    **_GENERATES,
    "metadata": _IGNORED,
    "return_token_ids": Field(_BOOL, "Return the token ids of the prompt and of each choice."),
    "stream_options": Field(
        _closed(include_usage=_BOOL, continuous_usage_stats=_BOOL, include_obfuscation=_BOOL),
        "With include_usage, the last chunk has the token counts; with continuous_usage_stats, too, every chunk.",
    ),
    "response_format": Field(
        _closed(("type",), type=_FORMATS, json_schema=_closed(("schema",), **_SCHEMA), schema=_OBJECT),
        "What the output must match, as OpenAI has it; json_object may have a schema. structured_outputs is vLLM's"
        " form.",
    ),
}
_TEMPLATE = {
    "chat_template_kwargs": Field(_OBJECT, "Further variables of the chat template."),
    "add_generation_prompt": Field(_BOOL, "End the prompt with the beginning of the answer (default: true)."),
    "continue_final_message": Field(_BOOL, "Continue the last message; needs add_generation_prompt=false."),
    "tools": Field(
        _list(_open(("function",), type={"enum": ["function"]}, function=_open(("name",), **_FUNCTION)),
              maxItems=MAX_TOOLS),
        "Functions that the model may call; parameters is a JSON schema, which the arguments match.",
    ),
    "tool_choice": Field(
        _CHOICE,
        'Whether it calls one: none, auto (default), required, or {"type": "function", "function": {"name": ...}}.',
    ),
    "parallel_tool_calls": Field(_BOOL, "Whether an answer may have several calls (default: true)."),
    "enable_thinking": Field(_BOOL, "Variable of the chat template: whether the model shall reason."),
    "reasoning_effort": Field(_STRING, "Variable of the chat template; none is enable_thinking=false, too."),
    "thinking_token_budget": Field(_from(0), "Most tokens of the reasoning, after which its end is forced."),
}  # fmt: skip
TEMPLATE = tuple(_TEMPLATE)
"""Fields of a chat that are options of `LLM.chat`: how to apply the chat template, and what answers may be."""
_MESSAGES = Field(_list(_OBJECT, minItems=1), "The conversation: a role and a content each.")
_TOP_LOGPROBS = {**_from(WHOLE_VOCABULARY), "maximum": MAX_LOGPROBS}

_RESPONSES = {
    **_GENERATES,
    **{name: _TEMPLATE[name] for name in TEMPLATE if name in (
        "chat_template_kwargs", "parallel_tool_calls", "enable_thinking", "thinking_token_budget")},
    **dict.fromkeys(("client_metadata", "max_tool_calls", "prompt_cache_options"), _IGNORED),
    "background": Field(_BOOL, "Responses are not stored.", neutral=(False,)),
    "input": Field(
        _either(_STRING, _list(_OBJECT, minItems=1)),
        "The user's message, or items: messages, function_call, function_call_output, reasoning.",
    ),
    "instructions": Field(_STRING, "System message before the input."),
    "max_output_tokens": Field(_from(1), "Maximum number of tokens to generate."),
    "metadata": Field(_OBJECT, "Returned in the response."),
    "include": Field(_LIST, _IGNORED.doc, neutral=([], ["reasoning.encrypted_content"])),
    "stream_options": Field(_closed(include_obfuscation=_BOOL), "Without effect: streams are not obfuscated."),
    "text": Field(
        _closed(format=_closed(("type",), type=_FORMATS, **_SCHEMA), verbosity=_VERBOSITY),
        "What the text must match; verbosity has no effect.",
    ),
    "reasoning": Field(
        _closed(effort=_STRING, summary=_STRING, generate_summary=_STRING),
        "effort is a variable of the chat template; none is enable_thinking=false, too. Summaries have no effect.",
    ),
    "tools": Field(
        _list(_open(("name",), type={"enum": ["function"]}, **_FUNCTION), maxItems=MAX_TOOLS), _TEMPLATE["tools"].doc
    ),
    "tool_choice": Field(
        _CHOICE,
        'Whether it calls one: none, auto (default), required, or {"type": "function", "name": ...}.',
    ),
    "truncation": Field(_STRING, "A conversation that is too long is an error.", neutral=("disabled",)),
}  # fmt: skip

_CONTENT = _either(_STRING, _list(_OBJECT))
_FORMAT = _closed(("type", "schema"), type={"enum": ["json_schema"]}, schema=_OBJECT)
_BLOCK = {"type": _STRING, "cache_control": {}}
MESSAGE = _closed(("role", "content"), role={"enum": ["user", "assistant", "system"]}, content={})
BLOCKS = {
    "text": _closed(("text",), text=_STRING, **_BLOCK),
    "thinking": _closed(("thinking",), thinking=_STRING, signature=_STRING, **_BLOCK),
    "tool_use": _closed(("id", "name", "input"), id=_STRING, name=_STRING, input=_OBJECT, **_BLOCK),
    "tool_result": _closed(("tool_use_id",), tool_use_id=_STRING, content={}, is_error=_BOOL, **_BLOCK),
}
"""Schemas of Anthropic's messages and blocks."""
_TURNS = {
    "model": _QUEUE["model"],
    "messages": Field(
        _list(_open(role=_STRING, content=_CONTENT), minItems=1),
        "The conversation: blocks of type text, tool_use, tool_result and thinking. A last message of the assistant is"
        " continued.",
    ),
    "system": Field(_CONTENT, "The system message."),
    "tools": Field(
        _list({**_OBJECT, "required": ["name", "input_schema"]}, maxItems=MAX_TOOLS),
        "Tools that the model may use and the client runs: name, description, input_schema, which the input matches.",
    ),
    "tool_choice": Field(
        _closed(
            ("type",), type={"enum": ["auto", "any", "tool", "none"]}, name=_STRING, disable_parallel_tool_use=_BOOL
        ),
        "auto (default), any, tool with its name, or none; disable_parallel_tool_use.",
    ),
    "thinking": Field(
        _closed(("type",), type={"enum": ["enabled", "disabled", "adaptive"]}, budget_tokens=_from(0), display=_STRING),
        "Whether the model shall reason: disabled, adaptive, or enabled with budget_tokens, after which it has to end.",
    ),
    "output_config": Field(
        _closed(effort=_STRING, format=_FORMAT),
        "effort is the variable reasoning_effort of the chat template; the text matches the schema of format.",
    ),
    **dict.fromkeys(("betas", "cache_control", "context_management"), _IGNORED),
    "mcp_servers": Field(_LIST, "This server calls no other one.", neutral=([],)),
}

TABLES: dict[str, dict[str, Field]] = {
    COMPLETIONS: {
        **_BOTH,
        "prompt": Field(_PROMPTS, f"A string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these."),
        "echo": Field(_BOOL, "Return the prompt before the output; with logprobs, its log-probabilities too."),
        "suffix": Field(_STRING, "The models here do not fill in.", ("",)),
    },
    CHAT: {
        **_BOTH,
        **_TEMPLATE,
        "messages": _MESSAGES,
        "max_completion_tokens": Field(_from(1), "The newer name of max_tokens."),
        "logprobs": Field(_BOOL, "Return the log-probability of each token."),
        "top_logprobs": Field(
            _TOP_LOGPROBS, "Most likely tokens to return with their log-probabilities; -1: all tokens."
        ),
        "verbosity": Field(_STRING, _IGNORED.doc, ("low", "medium", "high")),
        "modalities": Field(_LIST, "Text only.", (["text"],)),
    },
    RESPONSES: _RESPONSES,
    MESSAGES: {
        **_TURNS,
        "max_tokens": Field(_from(1), "Maximum number of tokens of the output."),
        "stop_sequences": Field(_list({**_STRING, "minLength": 1}), "Texts that end the output."),
        "stream": _GENERATES["stream"],
        "temperature": Field({"type": "number", "minimum": 0}, "0: the most likely token."),
        "top_p": Field({"type": "number", "minimum": 0, "maximum": 1}, "Sample from the tokens of this probability."),
        "top_k": Field(_from(-1), "Sample from this many tokens; 0: all."),
        "seed": Field(_INT, "Of the random numbers; not one of Anthropic's fields."),
        **dict.fromkeys(("metadata", "service_tier"), _IGNORED),
    },
    COUNT_TOKENS: _TURNS,
    "/tokenize": {
        "model": _QUEUE["model"],
        "messages": _MESSAGES,
        **_TEMPLATE,
        "prompt": Field(_STRING, "The text, instead of messages."),
        "add_special_tokens": Field(_BOOL, "Begin with the tokenizer's start token, if it has one (default: true)."),
    },
    "/detokenize": {"model": _QUEUE["model"], "tokens": Field(_TOKEN_IDS, "The token ids.")},
    EMBEDDINGS: {
        **_QUEUE,
        "user": _IGNORED,
        "truncate_prompt_tokens": Field(_from(-1), "Maximum number of tokens of an input; -1: the context length."),
        "input": Field(_PROMPTS, f"A string, a list of token ids, or a list of 1 to {MAX_INPUTS} of these."),
        "encoding_format": Field({"enum": ["float", "base64"]}, "base64: float32 values, little endian."),
        "dimensions": Field(_from(1), "Number of values, the first ones (default: all)."),
        "use_activation": Field(_BOOL, "Normalize the embeddings (default: as the model's files say)."),
    },
}
"""The fields of each route that are not fields of SamplingParams, or that have another type there."""
REQUIRED: dict[str, list[str]] = {
    COMPLETIONS: ["prompt"], CHAT: ["messages"], RESPONSES: ["input"], MESSAGES: ["model", "messages", "max_tokens"],
    COUNT_TOKENS: ["model", "messages"], "/tokenize": [], "/detokenize": ["tokens"], EMBEDDINGS: ["input"],
}  # fmt: skip
_INTEGERS = {name for name, (low, _) in RANGES.items() if isinstance(low, int)}
"""Fields of SamplingParams that are integers."""
_TYPES: dict[str, tuple[type, str]] = {
    "string": (str, "a string"), "array": (list, "a list"), "object": (dict, "an object"),
}  # fmt: skip


def read_fields(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that are not null, which is their default. An integer may be written as 10.0.

    Raises:
        FieldError: a field is missing, is not one of the route, or has a value of another type than its schema, or one
            that is not supported.
    """
    table, values = TABLES[url], {name: value for name, value in body.items() if value is not None}
    for name, value in values.items():
        if name in table:
            neutral = table[name].neutral
            if neutral is not None and value not in neutral:
                raise FieldError(f"{name}={show(value)} is not supported: leave it out", name)
            values[name] = read_value(name, value, table[name].schema)
        elif name not in SAMPLING_OF.get(url, ()):
            raise FieldError(f"the field {show(name)} is not supported for {url}: leave it out", name)
        elif name in _INTEGERS:
            values[name] = _whole(value)
    if missing := [name for name in REQUIRED[url] if name not in values]:
        raise FieldError(f"{missing[0]} is missing: {url} needs {', '.join(REQUIRED[url])}", missing[0])
    return values


def read_value(where: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value whose type is that of a schema, without what is null in objects that have no further fields.

    Args:
        where: name of the field, or of a part of it, such as "text.format".
        value: from JSON.
        schema: as in `Field`. Items of lists, objects with further fields, and alternatives are not checked.

    Raises:
        FieldError: the value has another type, or is out of range.
    """
    kind = schema.get("type")
    if kind == "boolean":
        require_bool(where, value)
    elif kind == "integer":
        value = _whole(value)
        return require_int(where, value, schema["minimum"], schema.get("maximum")) if "minimum" in schema else value
    elif kind in _TYPES and not isinstance(value, _TYPES[kind][0]):
        raise FieldError(f"{where}={show(value)} is not {_TYPES[kind][1]}", where)
    if "enum" in schema and value not in schema["enum"]:
        raise FieldError(f"{where}={show(value)} is not supported: use one of {', '.join(schema['enum'])}", where)
    if schema.get("minLength") and not value:
        raise FieldError(f"{where}={show(value)} is not a string of one or more characters", where)
    if schema.get("additionalProperties") is not False:
        return value
    known, values = schema["properties"], {name: item for name, item in value.items() if item is not None}
    if unknown := [name for name in values if name not in known]:
        raise FieldError(f"{where}: the field {show(unknown[0])} is not supported: use {', '.join(known)}", where)
    if missing := [name for name in schema.get("required", ()) if name not in values]:
        raise FieldError(f"{where}={show(value)} has no {missing[0]}: give {', '.join(schema['required'])}", where)
    return {name: read_value(f"{where}.{name}", item, known[name]) for name, item in values.items()}


def _whole(value: Any) -> Any:
    """10.0 -> 10: in JSON Schema, and for vLLM, that is an integer. Other values are left to be checked."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
