"""The format of a model's answers is found by rendering its chat template; templates of our own stand for families."""

from __future__ import annotations

import logging

import pytest

from helpers.answers import DETECTED, TEMPLATES, template
from nanoinfer.inputs.answers.format import JSON_IN_LIST, JSON_IN_MARKERS, AnswerFormat, detect
from nanoinfer.tokenizers.chat_template import ChatTemplate

TURN_ENDS = ("<|end|>",)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_that_of_the_template(name: str) -> None:
    assert detect(ChatTemplate(TEMPLATES[name])) == DETECTED[name]


def test_the_log_names_the_format_of_a_template_without_calls(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanoinfer"):
        detected = detect(ChatTemplate(template("")))
    assert detected == AnswerFormat(**{**vars(JSON_IN_MARKERS), "reasoning_start": "", "reasoning_end": ""})
    assert "renders no tool calls: they are expected as <tool_call>" in caplog.text


def test_a_template_that_cannot_be_rendered_gives_the_last_resort() -> None:
    detected = detect(ChatTemplate("{{ raise_exception('no') }}"))
    assert (detected.trigger, detected.reasoning_end) == ("<tool_call>", "")


def test_no_piece_has_a_part_of_a_probe() -> None:
    """A format has no place for the key in "</alpha>"."""
    calls = TEMPLATES["coder"].replace("'\\n</parameter>'", "'</' + k + '>'")
    assert calls != TEMPLATES["coder"]
    assert detect(ChatTemplate(calls)) == DETECTED["hermes"]


def test_special_tokens_tell_the_format_of_a_template_without_calls() -> None:
    assert detect(ChatTemplate(template("")), special_tokens=["<|tool_call|>"]) == JSON_IN_LIST


def test_end_tokens_are_no_part_of_calls() -> None:
    calls = TEMPLATES["functionary"].replace("{% endfor %}{% else %}", "{% endfor %}{{ '<|eot|>' }}{% else %}")
    assert calls != TEMPLATES["functionary"]
    assert detect(ChatTemplate(calls), end_tokens=["<|eot|>"]) == DETECTED["functionary"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("<|assistant|>\n", None), ("<|assistant|>\n<think>\n", True), ("a<think>\n\n</think>\n\n", False)],
)
def test_the_prompt_says_where_an_answer_begins(prompt: str, expected: bool | None) -> None:
    assert DETECTED["coder"].reasoning_of(prompt) is expected
    assert DETECTED["functionary"].reasoning_of(prompt) is False
