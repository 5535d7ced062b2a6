"""Chat templates and response templates that are made to do harm: answers are read in bounded work."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from helpers.answers import TEMPLATES, template
from helpers.models import refuses
from nanoinfer.inputs.answers import response_template
from nanoinfer.inputs.answers.format import JSON_IN_MARKERS, MAX_PIECE, detect
from nanoinfer.inputs.answers.response_template import MAX_VALUES, ResponseTemplate, ResponseTemplateParser
from nanoinfer.inputs.messages import Tool
from nanoinfer.tokenizers import chat_template
from nanoinfer.tokenizers.chat_template import ChatTemplate

CALL = {"function": {"name": "{name}", "arguments": "{content}"}}


def calls(**field: Any) -> dict[str, Any]:
    given = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": CALL, **field}
    return {"start_anchor": "x", "fields": {"tool_calls": given, "content": {}}}


def test_markers_are_short(caplog: pytest.LogCaptureFixture) -> None:
    source = TEMPLATES["functionary"].replace("'<function='", f"'<' * {MAX_PIECE} + '<function='")
    assert source != TEMPLATES["functionary"]
    with caplog.at_level(logging.WARNING, "nanoinfer"):
        assert detect(ChatTemplate(source)) == JSON_IN_MARKERS
    assert f"surrounds answers by more than {MAX_PIECE} characters" in caplog.text


def test_renderings_are_short() -> None:
    source = template("").replace("{{ m.content }}", "{{ m.content }}{{ '<a>' * 100000 }}")
    assert detect(ChatTemplate(source)).trigger == "<tool_call>"


@pytest.mark.parametrize("text", ["</" + "think" * 30_000, "</think" * 30_000, "</" * 30_000, "[/think:" * 30_000])
def test_the_end_of_reasoning_is_searched_in_linear_time(text: str) -> None:
    found = detect(ChatTemplate(template("", "{% set x = '" + text + "' %}")))
    assert (found.trigger, found.reasoning_end) == ("<tool_call>", "")


def test_a_template_that_exceeds_a_limit_is_rendered_once_more_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SEC", 0.2)
    loop = "{% for i in range(99999) %}"
    made = ChatTemplate("{{ messages[0].content }}" + loop * 2 + "{% endfor %}" * 2)
    rendered, render = [0], ChatTemplate.render

    def count(self: ChatTemplate, *args: Any, **variables: Any) -> str:
        rendered[0] += 1
        return render(self, *args, **variables)

    monkeypatch.setattr(ChatTemplate, "render", count)
    assert detect(made).trigger == "<tool_call>"
    assert rendered[0] == 1


def test_a_value_that_exceeds_a_limit_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(response_template, "CPU_SEC", 0.2)
    args = {"tag_pattern": "(?P<key>(?:a|aa)+)(?P<value>)$b"}
    template = ResponseTemplate(
        calls(content="xml-inline", content_args=args, open_pattern="<(?P<name>get)>", open=None)
    )
    num_values, value = [0], ResponseTemplate.calls

    def count(self: ResponseTemplate, *args: Any) -> Any:
        num_values[0] += 1
        return value(self, *args)

    monkeypatch.setattr(ResponseTemplate, "calls", count)
    parser = ResponseTemplateParser(template, [Tool("get")])
    text = "<get>" + "a" * 60 + "c</call>"
    parser.feed(text * 3)
    parser.finish()
    assert parser.message().content == text * 3
    assert num_values[0] == 1


def test_the_shape_of_a_value_is_small() -> None:
    shape = {"function": {"name": "get", "arguments": {str(i): "{content}" for i in range(MAX_VALUES)}}}
    refuses(lambda: ResponseTemplate(calls(transform=shape)), f"transform has more than {MAX_VALUES} values")
