"""Chat templates: the same text as transformers', and no template that harms the process or stays without an end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from helpers.chat_templates import TEMPLATES
from helpers.models import refuses
from nanoinfer.tokenizers import chat_template
from nanoinfer.tokenizers.chat_template import ChatTemplate
from nanoinfer.utils import limited_process

SYSTEM = [{"role": "system", "content": "Answer <b>shortly</b>."}]
TURNS = [
    {"role": "user", "content": "  Grüße, \U0001f600 \u0627\u0644 & 'quotes' \"too\" {{ 1 }}\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello there. "},
    {"role": "user", "content": "<|im_end|> again?"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_the_text_is_that_of_transformers(name: str, generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **TOKENS)
    ours = ChatTemplate(TEMPLATES[name], TOKENS)
    num_refused = 0
    for messages in (TURNS[:1], TURNS, [*SYSTEM, *TURNS], [*SYSTEM, TURNS[1]], TURNS[:2]):
        for variables in ({}, {"enable_thinking": False, "bos_token": "<other>"}):
            options = {"add_generation_prompt": generation_prompt, **variables}
            try:
                expected = theirs.apply_chat_template(
                    messages, chat_template=TEMPLATES[name], tokenize=False, **options
                )
            except Exception as e:
                num_refused += 1
                refuses(lambda m=messages, o=options: ours.render(m, **o), "the chat template refuses", str(e))
            else:
                assert ours.render(messages, **options) == expected
    assert (num_refused > 0) == (name in ("gemma", "mistral"))


def test_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == str(datetime.now().year)


# Hostile templates ------------------------------------------------------------------------------------------------

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
GROWS = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
# Name -> template, and what the message says
HOSTILE = {
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "globals": ("{{ raise_exception.__globals__['sys'].exit() }}", "SecurityError"),
    "init": ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    "format": ("{{ '{0.__class__.__mro__[1]}'.format(1) }}", "SecurityError"),
    "attr-filter": ("{{ (''|attr('__class__')).__mro__ }}", "SecurityError"),
    "getitem": ("{{ ''['__class__'].mro() }}", "SecurityError"),
    "namespace": ("{{ namespace(__class__=1) }}", "SecurityError"),
    "namespace-set": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "loops": (LOOPS, "CPU time"),
    "range": ("{{ range(10**9) | list }}", "Range too big"),
    "power": ("{{ 3 ** (10 ** 9) }}", "CPU time"),
    "huge-string": ("{{ 'x' * 10**9 }}", "MiB of memory"),
    "huge-format": ("{{ '%1000000000d' % 1 }}", "MiB of memory"),
    "huge-at-once": ("{{ 'x' * (2**62) }}", "MiB of memory"),
    "concatenation": (GROWS, "it needs more than"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "more than 4194304 characters"),
    "recursion": ("{% macro a(n) %}{{ a(n) }}{% endmacro %}{{ a(1) }}", "nests too deep"),
    "parentheses": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "nests too deep"),
    "blocks": ("{% if 1 %}" * 500 + "{% endif %}" * 500, "nests too deep"),
    "filters": ("{{ 1" + "|string" * 20000 + " }}", ""),
    "syntax": ("{% for %}", "line 1: "),
    "escapes": ("{{ raise_exception('\x1b[2J\nnanoinfer: done\u202e') }}", "\\x1b[2J\\nnanoinfer: done\\u202e"),
    "long-message": ("{{ raise_exception('x' * 10**6) }}", "refuses the messages: xxx"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
}


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_SEC", 0.5)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow_if(lambda name: name in ("concatenation", "filters", "power"))
def test_hostile_templates_are_one_line(name: str, little_time: None) -> None:
    source, message = HOSTILE[name]
    template = ChatTemplate(source)
    start = time.monotonic()
    refuses(lambda: template.render(TURNS), "the chat template", message)
    assert time.monotonic() - start < 20  # 0.5 s of CPU time on a machine that others use
    with pytest.raises(ValueError) as caught:
        template.render(TURNS)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1200
    assert ChatTemplate("{{ messages[0].role }}").render(TURNS) == "user"  # the process lives


def test_attributes_that_the_sandbox_hides_are_empty() -> None:
    """Jinja gives an undefined value for them, which prints as nothing."""
    for source in ("{{ ''.__class__ }}", "{{ dict.__globals__ }}", "{{ dict.mro }}", "{{ namespace.__init__ }}"):
        assert ChatTemplate(source).render(TURNS) == ""


def test_sizes_of_templates() -> None:
    refuses(lambda: ChatTemplate("x" * 10_000_000), "the chat template has 10000000 characters; the limit is 1048576")
    text = "{# \u202e #}é\U0001f600\0" * 5_000
    assert ChatTemplate(text).render([]) == "é\U0001f600\0" * 5_000
    for bad in ("", None, 3, b"x"):
        refuses(lambda b=bad: ChatTemplate(b), "is not a Jinja template")


def test_values_that_a_template_cannot_get() -> None:
    template = ChatTemplate("{{ messages | length }}")
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), float("nan"), {1, 2}, nested):
        refuses(lambda v=value: template.render([{"role": "user", "content": v}]), "cannot be given")
    assert template.render([{"role": "user", "content": "\ud800"}]) == "1"


def test_a_template_that_failed_renders_again(little_time: None) -> None:
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}")
    for content in ("a", "loop", "b", "loop", "c"):
        messages = [{"role": "user", "content": content}]
        if content == "loop":
            refuses(lambda m=messages: template.render(m), "needs more than 0.5 s of CPU time")
        else:
            assert template.render(messages) == content


def test_a_worker_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].role }}")
    assert template.render(TURNS) == "user"
    worker = template._worker._child
    assert worker is not None
    worker._process.kill()
    worker._process.wait()
    assert worker.end(1.0) == "there was no answer within 30 s, or memory was short"
    assert template.render(TURNS) == "user"
    assert template._worker._child is not worker


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    refuses(lambda: ChatTemplate("x").render([]), "the chat template cannot be rendered: no process can be started")


def test_the_worker_can_open_nothing() -> None:
    """In case that the sandbox has a hole: no files, sockets or processes, and nothing of the environment."""
    os.environ["NANOINFER_TEST_SECRET"] = "1"
    try:
        template = ChatTemplate("x")
        template.render([])
        worker = template._worker._child
        assert worker is not None
        place = f"/proc/{worker._process.pid}"
        with open(f"{place}/environ", "rb") as f:
            assert b"SECRET" not in f.read()
        with open(f"{place}/limits") as f:
            limits = {line[:26].strip(): line[26:].split()[:2] for line in f}
    finally:
        del os.environ["NANOINFER_TEST_SECRET"]
    assert limits["Max open files"] == ["3", "3"]
    assert limits["Max file size"] == ["0", "0"]
    assert limits["Max processes"] == ["0", "0"]
    assert limits["Max address space"] == [str(chat_template.MEMORY_BYTES)] * 2


def test_threads_and_forks_share_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")

    def render(i: int) -> str:
        return template.render([{"role": "user", "content": str(i)}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render, range(200))) == [str(i) for i in range(200)]
    if (child := os.fork()) == 0:  # the child starts a worker of its own
        os._exit(0 if render(7) == "7" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render(8) == "8"


def test_an_interrupt_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "a"}]) == "a"
    ask: Callable[..., bytes] = limited_process._Child.ask

    def interrupted(self: Any, request: bytes) -> bytes:
        ask(self, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(limited_process._Child, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "b"}])
    monkeypatch.setattr(limited_process._Child, "ask", ask)
    assert template.render([{"role": "user", "content": "c"}]) == "c"
    assert threading.active_count() >= 1
