"""The fields of the body of a request: one table, which `parse` and the OpenAPI document read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import show

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = (COMPLETIONS, CHAT)
MAX_PROMPTS = 128
"""Prompts of one request to /v1/completions."""
SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "output_kind")  # a request has stream


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


@dataclass(frozen=True)
class Field:
    """A field of a request."""

    schema: Mapping[str, Any]
    """JSON schema of its values."""
    doc: str
    urls: tuple[str, ...] = BOTH
    """The routes that have it."""
    neutral: tuple[Any, ...] | None = None
    """The values that are supported, all of which have no effect; None: any."""


_BOOL = {"type": "boolean"}
_STRING = {"type": "string"}
_INT = {"type": "integer"}
_OBJECT = {"type": "object"}
_FUNCTION: dict[str, Any] = {
    "type": "object",
    "properties": {"name": _STRING, "description": _STRING, "parameters": _OBJECT, "strict": _BOOL},
    "required": ["name"],
}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}

FIELDS: dict[str, Field] = {
    "model": Field(_STRING, "Name of the model, as /v1/models lists it."),
    "prompt": Field(
        {"anyOf": [_STRING, _TOKEN_IDS, {"type": "array", "items": {"anyOf": [_STRING, _TOKEN_IDS]}}]},
        f"A string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these.",
        (COMPLETIONS,),
    ),
    "messages": Field(
        {"type": "array", "minItems": 1, "items": _OBJECT}, "The conversation: a role and a content each.", (CHAT,)
    ),
    "stream": Field(_BOOL, "Send the output as server-sent events, while it is generated."),
    "stream_options": Field(
        {
            "type": "object",
            "properties": {"include_usage": _BOOL, "continuous_usage_stats": _BOOL, "include_obfuscation": _BOOL},
            "additionalProperties": False,
        },
        "With include_usage, the last chunk has the token counts; with continuous_usage_stats, too, every chunk.",
    ),
    "echo": Field(
        _BOOL, "Return the prompt before the output; with logprobs, its log-probabilities too.", (COMPLETIONS,)
    ),
    "max_completion_tokens": Field({"type": "integer", "minimum": 1}, "The newer name of max_tokens.", (CHAT,)),
    "top_logprobs": Field(
        {"type": "integer", "minimum": -1},
        "Most likely tokens to return with their log-probabilities; -1: all tokens.",
        (CHAT,),
    ),
    "chat_template_kwargs": Field(_OBJECT, "Further variables of the chat template.", (CHAT,)),
    "add_generation_prompt": Field(_BOOL, "End the prompt with the beginning of the answer (default: true).", (CHAT,)),
    "continue_final_message": Field(_BOOL, "Continue the last message; needs add_generation_prompt=false.", (CHAT,)),
    "documents": Field({"type": "array", "items": _OBJECT}, "Documents for the chat template.", (CHAT,)),
    "logprobs": Field(_BOOL, "Return the log-probability of each token.", (CHAT,)),
    "return_token_ids": Field(_BOOL, "Return the token ids of the prompt and of each choice."),
    "priority": Field(_INT, "Requests of smaller priority are admitted first (default: 0)."),
    "cache_salt": Field(
        {"type": "string", "minLength": 1}, "Only requests of the same salt share the keys and values of prefixes."
    ),
    **{
        name: Field({}, "Accepted without effect.")
        for name in (
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "cache_prompt",
            "keep_alive",
        )
    },
    "verbosity": Field(_STRING, "Accepted without effect.", (CHAT,), ("low", "medium", "high")),
    "seed": Field(_INT, "Seed of the random numbers; -1: a random one."),
    "suffix": Field(_STRING, "Not supported: the models here do not fill in.", (COMPLETIONS,), ("",)),
    "tools": Field(
        {
            "type": "array",
            "maxItems": 128,
            "items": {
                "type": "object",
                "properties": {"type": {"enum": ["function"]}, "function": _FUNCTION},
                "required": ["function"],
            },
        },
        "Functions that the model may call; parameters is a JSON schema, which the arguments match.",
        (CHAT,),
    ),
    "tool_choice": Field(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {**_OBJECT, "required": ["type"]}]},
        'Whether it calls one: none, auto (default), required, {"type": "function", "function": {"name": ...}}, or of'
        ' some tools {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.',
        (CHAT,),
    ),
    "parallel_tool_calls": Field(_BOOL, "Whether an answer may have several calls (default: true).", (CHAT,)),
    "enable_thinking": Field(_BOOL, "Variable of the chat template: whether the model shall reason.", (CHAT,)),
    "reasoning_effort": Field(_STRING, "Variable of the chat template; none is enable_thinking=false, too.", (CHAT,)),
    "thinking_token_budget": Field(
        {"type": "integer", "minimum": 0}, "Most tokens of the reasoning, after which its end is forced.", (CHAT,)
    ),
    "response_format": Field(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _STRING, "description": _STRING, "schema": _OBJECT, "strict": _BOOL},
                    "required": ["schema"],
                    "additionalProperties": False,
                },
                "schema": _OBJECT,
            },
            "required": ["type"],
            "additionalProperties": False,
        },
        "What the output must match, as OpenAI has it; json_object may have a schema. structured_outputs is vLLM's"
        " form.",
    ),
    "modalities": Field({"type": "array"}, "Text only.", (CHAT,), (["text"],)),
}
"""The fields that are not fields of SamplingParams, or that have another type there."""


TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RESPONSES = "/v1/responses"
EMBEDDINGS, RERANK, SCORE = POOLING = "/v1/embeddings", "/v1/rerank", "/v1/score"
MAX_INPUTS = 2048
"""Inputs of one request to /v1/embeddings, and documents of one to /v1/rerank or /v1/score."""
_TEXTS = {"anyOf": [_STRING, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _STRING}]}
_DOCUMENT = {"anyOf": [_STRING, {"type": "object", "properties": {"text": _STRING}, "required": ["text"]}]}
_POOLED = {
    **{name: FIELDS[name] for name in ("model", "user", "priority", "cache_salt")},
    "truncate_prompt_tokens": Field(
        {"type": "integer", "minimum": -1}, "Maximum number of tokens of an input; -1: the context length."
    ),
}
_PAIRED = {**_POOLED, "use_activation": Field(_BOOL, "Of rerankers: return probabilities, not logits (default: true).")}
TEMPLATE = (
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "tools", "tool_choice",
    "parallel_tool_calls", "enable_thinking", "reasoning_effort", "thinking_token_budget",
)  # fmt: skip
"""Fields of a chat that are options of `LLM.chat`: how to apply the chat template, and what answers may be."""
_CONVERSATION = ("model", "messages", *TEMPLATE)
_IGNORED = Field({}, "Accepted without effect.")
STORED = ("background", "conversation", "previous_response_id", "prompt")
"""Fields of /v1/responses that need a server which stores something."""
_STORED = Field({}, "Not supported: this server stores nothing. Send the whole conversation as input.", neutral=())
_FORMAT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": _STRING,
        "description": _STRING,
        "schema": _OBJECT,
        "strict": _BOOL,
    },
    "required": ["type"],
    "additionalProperties": False,
}
LOGPROBS = "message.output_text.logprobs"
INCLUDED = {LOGPROBS: "log-probabilities", "reasoning.encrypted_content": "no effect"}
"""Values of include, and what they do."""
_RESPONSES: dict[str, Field] = {
    **{
        name: FIELDS[name]
        for name in (
            "model", "stream", "priority", "cache_salt", "chat_template_kwargs", "parallel_tool_calls",
            "enable_thinking", "thinking_token_budget", "seed",
        )
    },
    **dict.fromkeys(
        ("cache_prompt", "client_metadata", "keep_alive", "max_tool_calls", "prompt_cache_key", "prompt_cache_options",
         "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"), _IGNORED,
    ),
    **dict.fromkeys(STORED, _STORED),
    "background": Field(_BOOL, _STORED.doc, neutral=(False,)),
    "input": Field(
        {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _OBJECT}]},
        "The user's message, or items: messages, function_call, function_call_output, reasoning.",
    ),
    "instructions": Field(_STRING, "System message before the input."),
    "max_output_tokens": Field({"type": "integer", "minimum": 1}, "Maximum number of tokens to generate."),
    "metadata": Field(
        {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}},
        "Returned in the response.",
    ),
    "include": Field(
        {"type": "array", "items": {"enum": [*INCLUDED]}},
        "; ".join(f"{name}: {what}" for name, what in INCLUDED.items()) + ".",
    ),
    "top_logprobs": Field(FIELDS["top_logprobs"].schema, f"{FIELDS['top_logprobs'].doc[:-1]}. It needs include."),
    "stream_options": Field(
        {"type": "object", "properties": {"include_obfuscation": _BOOL}, "additionalProperties": False},
        "Without effect: streams are not obfuscated.",
    ),
    "text": Field(
        {
            "type": "object",
            "properties": {"format": _FORMAT, "verbosity": {"enum": ["low", "medium", "high"]}},
            "additionalProperties": False,
        },
        "What the text must match; verbosity has no effect.",
    ),
    "reasoning": Field(
        {
            "type": "object",
            "properties": {"effort": _STRING, "summary": _STRING, "generate_summary": _STRING},
            "additionalProperties": False,
        },
        "effort is a variable of the chat template; none is enable_thinking=false, too. Summaries have no effect.",
    ),
    "tools": Field(
        {
            "type": "array",
            "maxItems": 128,
            "items": {**_FUNCTION, "properties": {"type": {"enum": ["function"]}, **_FUNCTION["properties"]}},
        },
        FIELDS["tools"].doc,
    ),
    "tool_choice": Field(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {**_OBJECT, "required": ["type"]}]},
        'Whether it calls one: none, auto (default), required, {"type": "function", "name": ...}, or of some of the'
        ' tools {"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}.',
    ),
    "truncation": Field(_STRING, "A conversation that is too long is an error.", neutral=("disabled",)),
}  # fmt: skip
SAMPLING_OF = {
    **dict.fromkeys(BOTH, SAMPLING),
    RESPONSES: tuple(
        name
        for name in SAMPLING
        if name not in ("n", "best_of", "max_tokens", "logprobs", "prompt_logprobs", "output_token_ids")
    ),
}
"""The fields of SamplingParams that each route has."""
TABLES: dict[str, dict[str, Field]] = {
    **{url: {name: field for name, field in FIELDS.items() if url in field.urls} for url in BOTH},
    RESPONSES: _RESPONSES,
    TOKENIZE: {
        **{name: FIELDS[name] for name in _CONVERSATION},
        "prompt": Field(_STRING, "The text, instead of messages."),
        "add_special_tokens": Field(_BOOL, "Begin with the tokenizer's start token, if it has one (default: true)."),
        "return_token_strs": Field(_BOOL, "Return the text of each token."),
    },
    EMBEDDINGS: {
        **_POOLED,
        "input": Field(
            {"anyOf": [_STRING, _TOKEN_IDS, {"type": "array", "items": {"anyOf": [_STRING, _TOKEN_IDS]}}]},
            f"A string, a list of token ids, or a list of 1 to {MAX_INPUTS} of these.",
        ),
        "encoding_format": Field({"enum": ["float", "base64"]}, "base64: float32 values, little endian."),
        "dimensions": Field({"type": "integer", "minimum": 1}, "Number of values, the first ones (default: all)."),
        "use_activation": Field(_BOOL, "Normalize the embeddings (default: as the model's files say)."),
    },
    RERANK: {
        **_PAIRED,
        "query": Field(_STRING, "The query."),
        "documents": Field(
            {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _DOCUMENT}, "The documents."
        ),
        "top_n": Field({"type": "integer", "minimum": 0}, "Number of documents to return, the best; 0: all."),
        "return_documents": Field(_BOOL, "Return the documents' texts (default: true)."),
    },
    SCORE: {
        **_PAIRED,
        **{
            name: Field(_TEXTS, f"{what}; other names: {others}.")
            for name, what, others in (
                ("queries", "A query for all documents, or one for each", "text_1, data_1"),
                ("documents", f"1 to {MAX_INPUTS} documents", "text_2, data_2, items"),
            )
        },
        **{name: Field(_TEXTS, "The same as queries.") for name in ("text_1", "data_1")},
        **{name: Field(_TEXTS, "The same as documents.") for name in ("text_2", "data_2", "items")},
    },
    DETOKENIZE: {"model": FIELDS["model"], "tokens": Field(_TOKEN_IDS, "The token ids.")},
}
"""The fields of each route that are not fields of SamplingParams, or that have another type there."""


def check_names(given: Mapping[str, Any], url: str, table: Mapping[str, Field] | None = None) -> None:
    """Check that a route has the fields, and supports the values of those that have few. Raises FieldError.

    Args:
        given: the fields.
        url: of the route.
        table: its fields; None: those of TABLES.
    """
    known = TABLES[url] if table is None else table
    for name, value in given.items():
        if name not in known and name not in SAMPLING_OF.get(url, ()):
            raise FieldError(f"the field {show(name)} is not supported for {url}: leave it out", name)
        neutral = known[name].neutral if name in known else None
        if neutral is not None and value not in neutral:
            raise FieldError(f"{name}={show(value)} is not supported: leave it out", name)
