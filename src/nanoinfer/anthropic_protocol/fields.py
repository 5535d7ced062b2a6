"""The fields of the bodies of requests to /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from nanoinfer.openai_protocol.fields import FIELDS, Field

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
_STRING, _OBJECT = {"type": "string"}, {"type": "object"}
_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": _OBJECT}]}
_FORMAT = {**_OBJECT, "properties": {"type": {"enum": ["json_schema"]}, "schema": _OBJECT}, "required": ["schema"]}
_TYPED = {**_OBJECT, "properties": {"type": _STRING}, "required": ["type"]}

_PROMPT: dict[str, Field] = {
    "model": FIELDS["model"],
    "messages": Field(
        {"type": "array", "minItems": 1, "items": {**_OBJECT, "properties": {"role": _STRING, "content": _CONTENT}}},
        "The conversation: blocks of type text, tool_use, tool_result and thinking. A last message of the assistant is"
        " continued.",
    ),
    "system": Field(_CONTENT, "The system message."),
    "tools": Field(
        {"type": "array", "maxItems": 128, "items": {**_OBJECT, "required": ["name", "input_schema"]}},
        "Tools that the model may use and the client runs: name, description, input_schema, which the input matches.",
    ),
    "tool_choice": Field(_TYPED, "auto (default), any, tool with its name, or none; disable_parallel_tool_use."),
    "thinking": Field(
        _TYPED,
        "Whether the model shall reason: disabled, adaptive, or enabled with budget_tokens, after which it has to end.",
    ),
    "output_config": Field(
        {**_OBJECT, "properties": {"effort": _STRING, "format": _FORMAT}, "additionalProperties": False},
        "effort is the variable reasoning_effort of the chat template; the text matches the schema of format.",
    ),
    "output_format": Field(_FORMAT, "The older name of output_config.format."),
    **{name: Field({}, "Accepted without effect.") for name in ("betas", "cache_control", "context_management")},
    "mcp_servers": Field({"type": "array"}, "Not supported: this server calls no other one.", neutral=([], None)),
}  # fmt: skip
TABLES: dict[str, dict[str, Field]] = {
    MESSAGES: {
        **_PROMPT,
        "max_tokens": Field({"type": "integer", "minimum": 1}, "Maximum number of tokens of the output."),
        "stop_sequences": Field({"type": "array", "items": {**_STRING, "minLength": 1}}, "Texts that end the output."),
        "stream": FIELDS["stream"],
        "temperature": Field({"type": "number", "minimum": 0}, "0: the most likely token."),
        "top_p": Field({"type": "number", "minimum": 0, "maximum": 1}, "Sample from the tokens of this probability."),
        "top_k": Field({"type": "integer", "minimum": -1}, "Sample from this many tokens; 0: all."),
        "seed": Field({"type": "integer"}, "Of the random numbers; not one of Anthropic's fields."),
        **{name: Field({}, "Accepted without effect.") for name in ("metadata", "service_tier")},
    },
    COUNT_TOKENS: _PROMPT,
}
"""The fields of each route."""
REQUIRED = {MESSAGES: ["model", "messages", "max_tokens"], COUNT_TOKENS: ["model", "messages"]}
