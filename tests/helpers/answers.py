"""Formats of answers, small chat templates of our own that write them, and answers in them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from nanoinfer.inputs.answers.format import HARMONY, ID, JSON_IN_MARKERS, AnswerFormat
from nanoinfer.inputs.answers.lark import gemma_text
from nanoinfer.inputs.messages import Tool

THINK = {"reasoning_start": "<think>", "reasoning_end": "</think>"}
FORMATS = {
    "hermes": JSON_IN_MARKERS,
    "llama": AnswerFormat(
        before_name='{"name": "', after_name='", "parameters": ', after_arguments="}", parallel=False,
    ),
    "nemo": AnswerFormat(
        trigger="[TOOL_CALLS]", calls_start="[TOOL_CALLS][", calls_end="]", separator=", ", before_name='{"name": "',
        after_name='", "arguments": ', after_arguments=f', "id": "{ID}"}}',
    ),
    "mistral": AnswerFormat(
        reasoning_start="[THINK]", reasoning_end="[/THINK]", trigger="[TOOL_CALLS]", before_name="[TOOL_CALLS]",
        after_name="[ARGS]",
    ),
    "deepseek": AnswerFormat(
        **THINK, trigger="<｜calls▁begin｜>", calls_start="<｜calls▁begin｜>", calls_end="<｜calls▁end｜>",
        separator="\n", before_name="<｜call▁begin｜>function<｜sep｜>", after_name="\n```json\n",
        after_arguments="\n```<｜call▁end｜>", inner_trigger="<｜call▁begin｜>function<｜sep｜>", null_content=True,
    ),
    "command": AnswerFormat(
        **THINK, content_start="<|text|>", content_end="<|/text|>", trigger="<|action|>", calls_start="<|action|>[\n",
        calls_end="\n]<|/action|>", separator=",\n", before_name=f'{{"call_id": "{ID}", "tool": "',
        after_name='", "parameters": ', after_arguments="}",
    ),
    "functionary": AnswerFormat(
        trigger="<function=", before_name="<function=", after_name=">", after_arguments="</function>",
    ),
    "coder": AnswerFormat(
        **THINK, trigger="<tool_call>", separator="\n", before_name="<tool_call>\n<function=", after_name=">",
        after_arguments="\n</function>\n</tool_call>", inner_trigger="<function=", notation="tagged",
        before_key="\n<parameter=", after_key=">\n", after_value="\n</parameter>",
    ),
    "glm": AnswerFormat(
        **THINK, trigger="<tool_call>", separator="\n", before_name="<tool_call>", after_arguments="\n</tool_call>",
        notation="tagged", before_key="\n<arg_key>", after_key="</arg_key>\n<arg_value>", after_value="</arg_value>",
    ),
    "gemma": AnswerFormat(
        reasoning_start="<|channel>thought", reasoning_end="<channel|>", trigger="<|tool_call>",
        before_name="<|tool_call>call:", after_arguments="<tool_call|>", notation="gemma",
    ),
    "harmony": HARMONY,
}  # fmt: skip

_LOOP = (
    "{{% if tools %}}{{{{ '<|system|>' + (tools | tojson) + '<|end|>' }}}}{{% endif %}}{{% for m in messages %}}"
    "{{{{ '<|' + m.role + '|>\\n' }}}}{{% if m.role == 'assistant' %}}{reasoning}{{% if m.content %}}"
    "{{{{ {content} }}}}{{% endif %}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{{{ '<|end|>\\n' }}}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|assistant|>\\n{prompt}' }}}}{{% endif %}}"
)
_THINKING = "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}"


def template(calls: str, reasoning: str = "", content: str = "m.content", prompt: str = "") -> str:
    """Return a chat template. Args: calls: what writes `m.tool_calls`."""
    return _LOOP.format(calls=calls, reasoning=reasoning, content=content, prompt=prompt)


TEMPLATES = {
    "hermes": template(
        _CALLS + "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n{\"name\": \"' + c.function.name +"
        " '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}",
        _THINKING,
    ),
    "llama": template(
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{% set c = m.tool_calls[0].function %}{{ \'{"name": "\' + c.name + \'", "parameters": \' }}'
        "{{ c.arguments | tojson }}{{ '}' }}{% endif %}"
    ),
    "nemo": template(
        "{% if m.tool_calls %}{{ '[TOOL_CALLS][' }}" + _CALLS + "{% set j = c.function | tojson %}{{ j[:-1] +"
        " ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}{% endif %}"
    ),
    "mistral": template(
        _CALLS + "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}",
        "{% if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}",
    ),
    "deepseek": template(
        "{% if m.tool_calls and m.content is none %}{{ '<｜calls▁begin｜>' }}"
        + _CALLS
        + "{% if not loop.first %}{{ '\\n' }}{% endif %}"
        "{{ '<｜call▁begin｜>function<｜sep｜>' + c.function.name + '\\n```json\\n' }}"
        "{{ c.function.arguments | tojson }}"
        "{{ '\\n```<｜call▁end｜>' }}{% endfor %}{{ '<｜calls▁end｜>' }}{% endif %}",
        "{% set x = '</think>' %}",
        prompt="<think>\\n",
    ),
    "command": template(
        "{% if m.tool_calls %}{{ '<|action|>[\\n' }}" + _CALLS + '{{ \'{"call_id": "\' + loop.index0 | string +'
        ' \'", "tool": "\' + c.function.name + \'", "parameters": \' + (c.function.arguments | tojson) + \'}\' }}'
        "{% if not loop.last %}{{ ',\\n' }}{% endif %}{% endfor %}{{ '\\n]<|/action|>' }}{% endif %}",
        _THINKING,
        content="'<|text|>' + m.content + '<|/text|>'",
    ),
    "functionary": template(
        _CALLS + "{{ '<function=' + c.function.name + '>' + (c.function.arguments | tojson) + '</function>' }}"
        "{% endfor %}"
    ),
    "coder": template(
        _CALLS + "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n<function=' + c.function.name + '>' }}"
        "{% for k, v in c.function.arguments | items %}{{ '\\n<parameter=' + k + '>\\n' + (v if v is string else v |"
        " tojson) + '\\n</parameter>' }}{% endfor %}{{ '\\n</function>\\n</tool_call>' }}{% endfor %}",
        _THINKING,
    ),
    "glm": template(
        _CALLS + "{{ '\\n<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}"
        "{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}",
        "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}",
        prompt="<think>",
    ),
    "gemma": template(
        _CALLS + "{{ '<|tool_call>call:' + c.function.name + '{' }}{% for k, v in c.function.arguments | dictsort %}"
        "{{ k + ':' }}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% else %}{{ v | tojson }}{% endif %}"
        "{% if not loop.last %}{{ ',' }}{% endif %}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}",
        "{% if m.reasoning and m.tool_calls %}{{ '<|channel>thought\\n' + m.reasoning + '\\n<channel|>' }}{% endif %}",
    ),
    "harmony": "{{ '<|start|>assistant<|channel|>final<|message|>' }}",
}
DETECTED = {**FORMATS, "hermes": JSON_IN_MARKERS}
"""The formats that TEMPLATES have."""


def tool(name: str, properties: Mapping[str, Any], required: Sequence[str] = ()) -> Tool:
    return Tool(name, "", {"type": "object", "properties": dict(properties), "required": list(required)})


def write_call(f: AnswerFormat, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the model writes it, without what surrounds all calls."""
    if f.notation == "json":
        text = json.dumps(arguments, ensure_ascii=False)
    elif f.notation == "gemma":
        text = gemma_text(dict(arguments))
    else:
        raw = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        text = "".join(f.before_key + key + f.after_key + value + f.after_value for key, value in raw.items())
    head, tail = f"{f.before_name}{name}{f.after_name}", f.after_arguments
    return head.replace(ID, "abcdefghi") + text + tail.replace(ID, "abcdefghi")


def write(
    f: AnswerFormat, calls: Sequence[tuple[str, Mapping[str, Any]]] = (), content: str = "", reasoning: str = ""
) -> str:
    """Return an answer as the model writes it."""
    made = f"{f.reasoning_start}{reasoning}{f.reasoning_end}\n\n" if reasoning else ""
    made += f"{f.content_start}\n{content}{f.content_end}" if content and f.content_start else content
    if calls:
        made += f.calls_start + f.separator.join(write_call(f, *call) for call in calls) + f.calls_end
    return made


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema, whose strings may be of any length."""
    kinds = ["string", "integer", "boolean", "enum", "short", "union", "number"] + ["array", "object"] * (depth < 2)
    kind = chance.choice(kinds)
    if kind == "enum":
        return {"enum": chance.choice([["a", "b c"], [1, 2], ["x", None]])}
    if kind == "short":
        return {"type": "string", "minLength": 1, "maxLength": 4}
    if kind == "union":
        return {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(chance, depth + 1),
            "minItems": chance.randrange(2),
            "maxItems": 3,
        }
    if kind == "object":
        return random_object(chance, depth + 1)
    return {"type": kind, "description": "What it is."}


def random_object(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of an object."""
    names = chance.sample(["a", "bb", "c_d", "description", "é1"], chance.randrange(0 if depth == 0 else 1, 4))
    required = [name for name in names if chance.random() < 0.6]
    made = {"type": "object", "properties": {n: random_schema(chance, depth) for n in names}, "required": required}
    return made | {"additionalProperties": False}


def valid(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a value matches a schema, for the keywords that these tests use."""
    if "$ref" in schema:
        return valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(valid(value, option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    kinds = {"string": str, "boolean": bool, "integer": int, "object": dict, "array": list, "null": type(None)}
    named = schema.get("type", "object" if "properties" in schema else None)
    if named == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if named is not None and type(value) is not kinds[named]:
        return False
    if named == "object":
        known = schema.get("properties", {})
        closed = schema.get("additionalProperties", not known) is False
        return (
            set(schema.get("required", ())) <= value.keys()
            and (not closed or value.keys() <= known.keys())
            and all(valid(item, known[key], root) for key, item in value.items() if key in known)
        )
    if named == "array":
        sizes = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return sizes and all(valid(item, schema.get("items", {}), root) for item in value)
    if named == "string":
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
    return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value)) if named == "integer" else True
