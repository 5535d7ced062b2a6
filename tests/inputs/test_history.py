"""Conversations as chat templates accept them: roles, their places, calls and results."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.answers import TEMPLATES, template
from helpers.chat_templates import TEMPLATES as FAMILIES
from helpers.models import refuses
from nanoinfer.inputs.answers.format import detect
from nanoinfer.inputs.chat import History
from nanoinfer.inputs.messages import as_conversation
from nanoinfer.tokenizers.chat_template import ChatTemplate


def fit(source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return History(made, detect(made), False).fit(as_conversation(messages))


def turns(text: str) -> list[dict[str, Any]]:
    """Return messages: "s:A u:B" -> [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}].

    c is an assistant's call, t its result.
    """
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    made = []
    for kind, _, content in (turn.partition(":") for turn in text.split()):
        message: dict[str, Any] = {"role": roles[kind], "content": content.replace("_", "\n\n")}
        if kind == "c":
            message["tool_calls"] = [
                {"id": "callid009", "type": "function", "function": {"name": "f", "arguments": {}}}
            ]
        elif kind == "t":
            message["tool_call_id"] = "callid009"
        made.append(message)
    return made


# Places of roles --------------------------------------------------------------------------------------------------

HOISTS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DEVELOPER = (
    "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role not in ('system', 'developer') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WITH_CALLS = template("{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{{ c.function.arguments }}{% endfor %}")
# As Mistral's: roles alternate, without calls and results; a system message is the first, or an error.
ALTERNATES = WITH_CALLS.replace(
    "{% for m in messages %}",
    "{% set ns = namespace(user=true) %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system') }}{% endif %}{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}{% endfor %}{% for m in messages %}",
)


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        (FAMILIES["chatml"], "s:A d:B u:C a:D s:E u:F u:G", "s:A_B u:C a:D s:E u:F u:G"),
        (FAMILIES["mistral"], "s:A s:B u:C a:D s:E u:F u:G", "s:A_B u:C a:D u:E_F_G"),
        (FAMILIES["gemma"], "d:A u:B a:C s:D", "u:A_B a:C u:D"),
        (HOISTS, "s:A u:B a:C s:D u:E", "s:A u:B a:C u:D u:E"),
        (HOISTS, "u:A s:B a:C", "u:A u:B a:C"),
        (DEVELOPER, "d:A u:B", "d:A u:B"),
        (DEVELOPER, "s:A d:B d:C u:D", "s:A_B_C u:D"),
        (WITH_CALLS, "u:A c:B t:C s:D", "u:A c:B t:C s:D"),
        (ALTERNATES, "u:A c:B t:C s:D a:E u:F", "u:A c:B t:C_D a:E u:F"),
        (ALTERNATES, "u:A u:B c:C t:D u:E", "u:A_B c:C t:D_E"),
    ],
)
def test_messages_are_placed_where_the_template_accepts_them(source: str, given: str, expected: str) -> None:
    made = fit(source, turns(given))
    assert made == turns(expected)
    ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(made)


def test_roles_that_the_template_does_not_know() -> None:
    messages = [*turns("u:A"), {"role": "critic", "content": "B"}]
    refuses(lambda: fit(FAMILIES["chatml"], messages), "role='critic' is unknown to the chat template: use system,")
    known = FAMILIES["chatml"] + "{% if messages[0].role == 'critic' %}{% endif %}"
    assert fit(known, messages) == messages
    reranker = "{% for m in messages %}{% if m.role in roles %}{{ m.content }}{% endif %}{% endfor %}"
    assert fit(reranker, messages) == messages  # it shows no user


# Calls ------------------------------------------------------------------------------------------------------------

CALLS = "{% for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %}"
# Written for this test in the styles in which templates read the content of a message that has tool calls.
NULL_STYLES = {
    "sum": "{{ m.role + ':' + m['content'] }}" + CALLS,
    "sum of a variable": "{% set content = m['content'] %}{{ m.role + ':' + content }}" + CALLS,
    "filter": "{{ m.role }}:{{ m['content'] | trim }}" + CALLS,
    "output": "{{ m.role }}:{{ m.content }}" + CALLS,
    "search": "{{ m.role }}:{% if '</think>' in m.content %}thought{% else %}{{ m.content }}{% endif %}" + CALLS,
    "truth": "{{ m.role }}:{% if m.content %}{{ m.content }}{% endif %}" + CALLS,
    "is string": "{{ m.role }}:{{ m.content if m.content is string else '' }}" + CALLS,
    "other is none": "{{ m.role }}:{% if m.reasoning_content is not none %}{{ m.content }}{% endif %}" + CALLS,
    "is none": "{{ m.role }}:{% if m['content'] is none %}" + CALLS + "{% else %}{{ m['content'] }}{% endif %}",
    "get is none": "{{ m.role }}:{% if m.get('content') is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "== none": "{{ m.role }}:{% if m.content == none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
    "is not none": "{{ m.role }}:{% if m.content is defined and m.content is not none %}[{{ m.content }}]{% endif %}"
    + CALLS,
    "empty is a turn": "{{ m.role }}:{% if m.content is not none %}{{ m.content }}<end>{{ m.role }}:{% endif %}"
    + CALLS,
    "null is refused": "{{ m.role }}:{% if m.content is none %}{{ raise_exception('null') }}{% endif %}{{ m.content }}"
    + CALLS,
    "variable": "{% set c = m.content %}{{ m.role }}:{% if c is none %}" + CALLS + "{% else %}{{ c }}{% endif %}",
}


@pytest.mark.parametrize("style", NULL_STYLES)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=["null", "missing", "empty"])
@pytest.mark.slow_if(lambda content: content != {})
def test_a_message_with_tool_calls_needs_no_content(style: str, content: dict[str, Any]) -> None:
    """It is null or empty, as the template shows the calls, and nothing but the calls."""
    source = "{% for m in messages %}" + NULL_STYLES[style] + "{% endfor %}"
    checked = as_conversation([{**turns("c:")[0], "content": None, **content}])
    assert ChatTemplate(source).render(fit(source, checked)) == "assistant:<f>"


CUT = '{"city": "Tu'


@pytest.mark.parametrize(
    ("style", "arguments", "expected"),
    [
        ("hermes", None, "{}"),
        ("hermes", "", "{}"),
        ("hermes", CUT, '"{\\"city\\": \\"Tu"'),
        ("coder", "", "<function=f>\n</function>"),
        ("coder", CUT, f"<parameter=arguments>\n{CUT}\n</parameter>"),
    ],
)
def test_arguments_are_those_that_the_template_takes(style: str, arguments: Any, expected: str) -> None:
    messages = turns("u:A c: t:B")
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert expected in ChatTemplate(TEMPLATES[style]).render(fit(TEMPLATES[style], messages))


def test_calls_that_the_template_does_not_show_are_written() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert fit(FAMILIES["gemma"], turns("u:A c:B t:C")) == [
        *turns("u:A"),
        {"role": "assistant", "content": f"B\n{call}"},
        {"role": "user", "content": "Result of a tool: C"},
    ]


def test_parts_of_results_that_are_no_text_and_results_without_a_call() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "image", "source": {}}, {"type": "input_file"}]
    assert as_conversation([*turns("u:A c: t:"), {"role": "tool", "tool_call_id": "callid009", "content": parts}])[
        -1
    ] == {
        "role": "tool",
        "tool_call_id": "callid009",
        "content": "A\n[image: left out, because this model reads text only]"
        "\n[input_file: left out, because this model reads text only]",
    }
    assert as_conversation(turns("t:A"))[-1] == {"role": "user", "content": "Result of an earlier call: A"}
    assert as_conversation([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]
    refuses(lambda: as_conversation([{"role": "user", "content": parts}]), "content part {'type': 'image'")
