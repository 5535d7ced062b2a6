"""Seeds of the targets of chats: formats of answers, templates, tools and requests, all of them small and our own."""

from __future__ import annotations

import json
from typing import Any

from nanoinfer.inputs.answers.format import HARMONY, ID, JSON_IN_MARKERS, AnswerFormat

FORMATS = (
    JSON_IN_MARKERS,
    HARMONY,
    AnswerFormat(before_name='{"name": "', after_name='", "parameters": ', after_arguments="}",
                 parallel=False),
    AnswerFormat(trigger="[CALLS]", calls_start="[CALLS][", calls_end="]", separator=", ", before_name='{"name": "',
                 after_name='", "arguments": ', after_arguments=f', "id": "{ID}"}}'),
    AnswerFormat(reasoning_start="<think>", reasoning_end="</think>", trigger="<calls>", calls_start="<calls>",
                 calls_end="</calls>", separator="\n", before_name="<call>", after_name="\n```json\n",
                 after_arguments="\n```</call>"),
    AnswerFormat(reasoning_start="<think>", reasoning_end="</think>", trigger="<call>", separator="\n",
                 before_name="<call>\n<f=", after_name=">", after_arguments="\n</f>\n</call>", notation="tagged",
                 before_key="\n<p=", after_key=">\n", after_value="\n</p>"),
    AnswerFormat(reasoning_start="<|ch>", reasoning_end="<ch|>", trigger="<|call>", before_name="<|call>call:",
                 after_arguments="<call|>", notation="gemma"),
)  # fmt: skip
PIECES = ("", "<call>", "</call>", "[", "]", "{", "}", '"', "\n", " ", "<think>", "</think>", "(", ")", ", ", "<|a|>",
          '{"name": "', '", "arguments": ', ID, "\u00e9", "aaaa", "<", ">")  # fmt: skip
MARKUP = (
    "get", '{"name": "get", "arguments": {"a": 1}}', '{"a": "x", "b": [1, {"c": null}]}', '{"name": "get", "parameters": "{}"}',
    "get(a=1, b='x')", '{a:<|"|>x<|"|>,b:{c:true}}', "{", "}", "[", "]", '"', "\\", "\\u00e9", "\\ud800", ":", ",", "(", ")", "=",
    "a", " ", "\n", "\t", "\u00e9", "\U0001f600", "\x00", "\ufffd", "<", ">", "|", "1", "-1.5e3", "1e999", "NaN", "true", "None",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<call>", "</call>", "[CALLS]", "<|channel|>", "<|message|>", "'", "{}",
    "9" * 400, "[" * 200, '{"a":' * 200, "\u2028", "\r\n", '<|"|>', "it is so. ",
)  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "maxLength": 4},
                "b": {"anyOf": [{"type": "integer", "minimum": 0}, {"$ref": "#/$defs/c"}]},
            },
            "required": ["a"],
            "$defs": {"c": {"enum": ["x", 1, None]}},
        },
    },
}
HERMES = """{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
    {{- '<|' + m.role + '|>' }}
    {%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for c in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
        {{- c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' + ('<think>' if enable_thinking else '') }}{% endif %}"""
TAGGED = """{%- for m in messages %}
    {{- '<|' + m.role + '|>' + (m.content or '') }}
    {%- for c in m.tool_calls or [] %}
        {{- '<call>\\n<f=' + c.function.name + '>' }}
        {%- for k, v in c.function.arguments | items %}
            {{- '\\n<p=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</p>' }}
        {%- endfor %}
        {{- '\\n</f>\\n</call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
NAMED = HERMES.replace(
    """'\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": '""", "'[CALLS]' + c.function.name + '[ARGS]'"
).replace("{{ '}\\n</tool_call>' }}", "")
SNIPPETS = (
    "{{ m.content }}", "{{ m.tool_calls | tojson }}", "{% for m in messages %}", "{% endfor %}", "{% endif %}", "{% if tools %}",
    "{{ m.reasoning_content }}", "{{ c.function.name }}", "{{ c.function.arguments }}", "{{ c.function.arguments | tojson }}",
    "{{ 'a' * 1000000 }}", "{{ range(100000000) | list }}", "{{ raise_exception('\x1b[31m no') }}", "<tool_call>", "</tool_call>",
    "<think>", "</think>", "{{ '{' }}", "{{ '[' }}", "{{ '\\x00' }}", "\x1b[31m", "<|channel|>", "<|message|>", "<|end|>", ">>>",
    "{% for i in range(99999) %}", "{{ messages }}", "{{ tools | tojson }}", "{{ c.id }}", "\ufffd", "{{ '<' * 3000 }}", "{# #}",
    "{% set ns = namespace(x=1) %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "probe_one", "alpha", "first value",
)  # fmt: skip
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_RESPONSES: list[tuple[dict[str, Any], str]] = [
    (
        {"start_anchor": "<|assistant|>", "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json",
                           "transform": {"type": "function", "function": "{content}"}},
            "content": {"close": "<|end|>"}}},
        'a<think>b</think>\n<call>{"name": "get", "arguments": {"a": "1"}}</call> c<|end|>',
    ),
    (
        {"start_anchor_pattern": r"bot\d?:", "fields": {
            "reasoning_content": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "tool_calls": {"open_pattern": r"\s*<f=(?P<name>[^>\n]+)>", "close_pattern": r"</f>\s*", "repeats": True,
                           "content": "xml-inline", "transform": _CALL,
                           "content_args": {"tag_pattern": r"<p=(?P<key>[^>]+)>(?P<value>.*?)</p>"}},
            "content": {"open": "<say>", "close_pattern": r"\n?</say>"}}},
        "b</think><f=get><p=a>1</p></f>\n<say>c\n</say>",
    ),
    (
        {"start_anchor": ["a", "ab"], "fields": {
            "reasoning": {"open_pattern": "(?:a|aa)+<", "close": [">", ">>"], "repeats": True, "join": " "},
            "tool_calls": {"open_pattern": r"call:(?P<name>\w+)", "close": "!", "content": "kv-lines", "repeats": True,
                           "content_args": {"kv_sep": "=", "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
                           "transform": _CALL},
            "content": {}}},
        "aaa<b>>c call:get\na=1\nb=2!d",
    ),
    (
        {"start_anchor": "x", "fields": {
            "tool_calls": {"open": "<a>", "close": "</a>", "content": "json", "transform_each": True,
                           "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
                           "transform": {"function": {"name": "{n}", "arguments": "{p}"}}},
            "content": {"content": "text", "content_args": {"strip": False}}}},
        "c<a>[{n: <q>get<q>, p: {a: 1}}]</a>",
    ),
]  # fmt: skip
RESPONSES = [json.dumps({"template": t, "prompt": "x<|assistant|>", "text": text}).encode() for t, text in _RESPONSES]
_MANY = [{**TOOL, "function": {**TOOL["function"], "name": f"tool_{i}"}} for i in range(3)]
TOOLS = [
    json.dumps({"tools": tools, "tool_choice": choice, "format": i, "parallel": True, **more}).encode()
    for i in range(len(FORMATS))
    for tools, choice, more in (
        (([TOOL], _MANY)[i % 2], ("auto", "required")[i % 2], {"thinking_budget": 5, "special": i % 3 == 0}),
    )
]
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "reasoning": "b", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a": "x"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "c"}]},
]  # fmt: skip
_CHAT: dict[str, Any] = {"messages": _TALK, "tools": [TOOL], "max_tokens": 40, "seed": 1, "temperature": 1.5}
_OBJECT = {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"], "additionalProperties": False}
_ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "call_1", "name": "get", "arguments": '{"a": "x"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "c"},
]
_CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar"}}
_CUSTOM_ITEMS: list[dict[str, Any]] = [
    {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "d"}, {"type": "web_search_call"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_image"}]},
]  # fmt: skip
_BLOCKS: list[dict[str, Any]] = [
    {"type": "tool_use", "id": "t", "name": "get", "input": {}}, {"type": "server_tool_use"},
]  # fmt: skip
_RESULTS = [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**_CHAT, "tool_choice": "required"}),
    ("/v1/chat/completions", {**_CHAT, "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**_CHAT, "tool_choice": {"type": "function", "function": {"name": "get"}}, "n": 2, "stream": True,
                              "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", {"messages": _TALK[:1], "enable_thinking": True, "thinking_token_budget": 4, "max_tokens": 20,
                              "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _OBJECT}}}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, "stop": ["e"], "bad_words": ["a"], "allowed_token_ids": [40, 41]}),
    ("/v1/embeddings", {"input": ["a", "b c"], "encoding_format": "base64", "dimensions": 2}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "truncate_prompt_tokens": 1}),

    ("/tokenize", {"messages": _TALK, "tools": [TOOL], "add_generation_prompt": True}),
    ("/v1/responses", {"instructions": "a", "input": _ITEMS, "tools": [{"type": "function", **TOOL["function"]}],
                       "tool_choice": "required", "max_output_tokens": 40, "seed": 1, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": "a", "stream": True, "max_output_tokens": 20,
                       "text": {"format": {"type": "json_schema", "name": "n", "schema": _OBJECT}}}),
    ("/v1/messages", {"model": "m", "messages": _TALK[:1], "system": "b", "max_tokens": 40, "tool_choice": {"type": "any"},
                      "tools": [{"name": "get", "input_schema": TOOL["function"]["parameters"]}]}),
    ("/v1/responses", {"input": _ITEMS + _CUSTOM_ITEMS, "tools": [_CUSTOM, {"type": "web_search"}], "max_output_tokens": 40,
                       "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [_CUSTOM]}, "stream": True}),
    ("/v1/messages", {"model": "m", "messages": _TALK[:1], "max_tokens": 20, "stream": True, "stop_sequences": ["z"]}),
    ("/v1/messages", {"model": "m", "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}], "max_tokens": 5,
                      "messages": [{"role": "assistant", "content": _BLOCKS}, {"role": "user", "content": _RESULTS}],
                      "tools": [{"type": "bash_20250124", "name": "b"}], "thinking": {"type": "enabled", "budget_tokens": 9}}),
    ("/detokenize", {"tokens": [40, 41]}),
    ("/page/markdown", {"text": "# a\n\n- *b* [c](http://d)\n\n```\ne\n```\n\n| f | g |\n|---|---|\n| <b> | ![h](i) |"}),
]  # fmt: skip
REQUESTS = [json.dumps({"path": path, "body": body}).encode() for path, body in BODIES]
LINES = [
    json.dumps(
        {
            "custom_id": str(i),
            "method": "POST",
            "url": url,
            "body": {k: v for k, v in body.items() if k[:6] != "stream"},
        }
    ).encode()
    for i, (url, body) in enumerate(BODIES[:9])
] + [
    json.dumps({"id": 1, **_CHAT, "tool_choice": "get"}).encode(),
    json.dumps({"prompt": "a", "max_tokens": 3}).encode(),
]
