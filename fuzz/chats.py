"""Targets of chats: how answers are written and read, chat and response templates, and the grammars of tools.

Templates, schemas and what a model writes are untrusted. Child processes render, match and compile: their limits of CPU
time are lowered here, below those of a case.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from chat_seeds import FORMATS, MARKUP, PIECES, SNIPPETS, TOOL
from choices import Choices
from mutate import mutate_bytes, mutate_json

from nanoinfer import NanoinferError
from nanoinfer.inputs.answers import response_template
from nanoinfer.inputs.answers.format import AnswerFormat, detect, markers
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.answers.parser import AnswerParser
from nanoinfer.inputs.answers.response_template import ResponseTemplate, ResponseTemplateParser
from nanoinfer.inputs.messages import Tool, as_choice, as_tools
from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta
from nanoinfer.structured import grammars
from nanoinfer.structured.vocabulary import special_tokens
from nanoinfer.tokenizers import chat_template
from nanoinfer.tokenizers.chat_template import ChatTemplate

CPU_SEC = 0.5
chat_template.CPU_SEC = response_template.CPU_SEC = CPU_SEC
grammars._SETUP["cpu_sec"] = CPU_SEC
MAX_TEXT = 20_000
TOOLS = as_tools([TOOL])
_TEXTS = ("trigger", "reasoning_start", "reasoning_end", "content_start", "content_end", "calls_start", "calls_end")
_FIELDS = (
    *_TEXTS,
    "separator",
    "before_name",
    "after_name",
    "after_arguments",
    "before_key",
    "after_key",
    "after_value",
)

Parser = AnswerParser | ResponseTemplateParser


def check_parser(parser: Parser, whole: Parser, text: str, sizes: Sequence[int]) -> ChatMessage:
    """Read an answer in pieces and as a whole; return the message, which must be that of the deltas of both."""
    deltas, at, i = [], 0, 0
    while at < len(text):
        size = sizes[i % len(sizes)]
        deltas += parser.feed(text[at : at + size])
        at, i = at + size, i + 1
    deltas += parser.finish()
    message = parser.message()
    assert joined(deltas) == plain(message), "the deltas are another message"
    at_once = whole.feed(text) + whole.finish()
    assert joined(at_once) == plain(whole.message()), "the deltas of the whole text are another message"
    assert parser.feed("") == [] and parser.finish() == [], "something follows the end"  # noqa: PT018
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls), "two calls have one id"
    for text in (message.content or "", message.reasoning or "", *(call.arguments for call in message.tool_calls)):
        text.encode(errors="surrogatepass")
    return message


def plain(message: ChatMessage) -> tuple[Any, ...]:
    """Return a message as plain values without ids."""
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def joined(deltas: Sequence[AnswerDelta]) -> tuple[Any, ...]:
    """Return what a client makes of deltas."""
    texts: dict[type, str] = {ContentDelta: "", ReasoningDelta: ""}
    calls: list[list[str]] = []
    for delta in deltas:
        if not isinstance(delta, CallDelta):
            assert delta.text, "an empty delta"
            texts[type(delta)] += delta.text
        elif delta.id is not None:
            assert delta.index == len(calls) and delta.arguments == "", "a call does not begin with its name"  # noqa: PT018
            calls.append([str(delta.name), ""])
        else:
            assert delta.name is None and delta.index == len(calls) - 1, "arguments of another call"  # noqa: PT018
            calls[-1][1] += delta.arguments
    content = texts[ContentDelta] or (None if calls else "")
    return content, texts[ReasoningDelta] or None, [(name, arguments) for name, arguments in calls]


def run_answer(data: bytes, folder: Path) -> None:
    """Read a random text by a random format."""
    c = Choices(data)
    format: AnswerFormat = c.pick(FORMATS)
    changes: dict[str, Any] = {c.pick(_FIELDS): c.pick(PIECES) for _ in range(c.number(4))}
    format = replace(format, **changes)
    tools = () if c.odd(4) else TOOLS
    options: dict[str, Any] = {"starts_in_reasoning": c.odd(4), "constrained": c.odd(3)}
    sizes = [c.pick((1, 1, 2, 3, 7, 50, 10_000)) for _ in range(1 + c.number(4))]
    own = [text for name in _FIELDS if (text := getattr(format, name))]
    parts: list[str] = []
    while c and len(parts) < 60:
        part = c.pick(own) if c.odd(2) and own else c.pick(MARKUP)
        parts.append(part * (c.pick((50, 50, 5000)) if c.odd(200) else 1))
    text = "".join(parts)[:MAX_TEXT]
    check_answer(format, tools, text, sizes, options)


def check_answer(
    format: AnswerFormat, tools: Sequence[Tool], text: str, sizes: Sequence[int], options: dict[str, Any]
) -> None:
    """Read a text by a format; check that the message does not depend on the pieces, and has no markers."""
    parser, whole = AnswerParser(format, tools, **options), AnswerParser(format, tools, **options)
    message = check_parser(parser, whole, text, sizes)
    assert plain(message) == plain(whole.message()), "the message depends on how the text was cut"
    assert all(call.name in [tool.name for tool in tools] for call in message.tool_calls), "a call of another tool"
    for call in () if options["constrained"] else message.tool_calls[:-1]:  # the text may end in the last one
        assert isinstance(json.loads(call.arguments), dict), "arguments are no object"
    if format.has_headers:  # its markers are others than the fields, and a header that is none is content
        return
    starts, ends = markers(format.reasoning_start), markers(format.reasoning_end)
    begins = [format.before_name, format.trigger, format.inner_trigger]  # what begins a call does not end reasoning
    separate = [end for end in ends if not any(end in text for text in begins)]
    assert not any(end in (message.reasoning or "") for end in separate), "reasoning has its end marker"
    spoken = starts | ends  # of which one in a text is content
    dropped = markers(format.content_start, format.content_end)
    dropped = {text for text in dropped if not any(text in marker for marker in spoken)}
    if not tools:
        assert not any(marker in (message.content or "") for marker in dropped), "content has a marker"


def run_template(data: bytes, folder: Path) -> None:
    """Find the format of a chat template; read an answer of its markers, and make its grammars."""
    source = data.decode(errors="replace")
    found = detect(ChatTemplate(source, {"eos_token": "<|end|>"}), ("<|end|>",), ("<|tool_call_start|>",))
    pieces = [text for name in _FIELDS if (text := getattr(found, name))]
    call = f"{found.calls_start}{found.before_name}{TOOL['function']['name']}{found.after_name}"
    text = "".join([*pieces, call, '{"a": 1}', found.after_arguments, found.calls_end, "a", *reversed(pieces)])
    for constrained in (False, True):
        check_answer(found, TOOLS, text[:MAX_TEXT], (1, 3), {"starts_in_reasoning": False, "constrained": constrained})
    for choice in ("auto", "required"):
        to_grammar(found, TOOLS, choice, special_tokens={"<|end|>": 1, "<|call|>": 2})


def mutate_template(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Insert or replace pieces of templates, or change bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data, others)[:20_000]
    places = [i for i in range(len(data)) if data[i : i + 2] in (b"{{", b"{%")] or [0]
    at, end = sorted((rng.choice(places), rng.choice(places)))
    return (data[:at] + rng.choice(SNIPPETS).encode() + data[at if rng.random() < 0.7 else end :])[:20_000]


def run_response_template(data: bytes, folder: Path) -> None:
    """Read an answer by a response template: {"template": ..., "prompt": ..., "text": ...}."""
    given = _object(data)
    prompt, text = (value if isinstance(value := given.get(key), str) else "" for key in ("prompt", "text"))
    spec: Any = given.get("template")
    template = ResponseTemplate(spec)
    parsers = [ResponseTemplateParser(template, TOOLS, prompt=prompt[:MAX_TEXT]) for _ in range(2)]
    message = check_parser(parsers[0], parsers[1], text[:MAX_TEXT], (1, 3, 8) if len(text) < 200 else (len(text) // 8,))
    assert all(call.name == TOOLS[0].name for call in message.tool_calls), "a call of another tool"
    for call in message.tool_calls[:-1]:
        assert isinstance(json.loads(call.arguments), dict), "arguments are no object"


def run_tools(data: bytes, folder: Path) -> None:
    """Compile the grammars of tools: {"tools": ..., "tool_choice": ..., "format": number, ...}."""
    given = _object(data)
    tools = as_tools(given.get("tools"))
    choice = as_choice(given.get("tool_choice"), tools)
    which, budget = given.get("format"), given.get("thinking_budget")
    found = to_grammar(
        FORMATS[which % len(FORMATS) if type(which) is int else 0],
        tools,
        choice,
        parallel=given.get("parallel") is not False,
        thinking_budget=budget % 2**31 if type(budget) is int else None,
        in_reasoning=given.get("in_reasoning") if isinstance(given.get("in_reasoning"), bool) else None,
        special_tokens=special() if given.get("special") else None,
    )
    if found is not None:
        compiler().compile(found)


@cache
def compiler() -> grammars.Grammars:
    """Return what compiles the grammars of a small model."""
    from requests_over_http import chat_llm

    return grammars.Grammars(chat_llm().model)


@cache
def special() -> dict[str, int]:
    """Return the special tokens of the small model: text -> id."""
    from requests_over_http import chat_llm

    model = chat_llm().model
    assert model.tokenizer is not None
    return special_tokens(model.tokenizer, model.vocab_size)


def mutate_text_in(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate JSON, or the string under "text" in it."""
    try:
        given = json.loads(data)
        text = given["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return mutate_json(rng, data, others)
    if rng.random() < 0.6 or not isinstance(text, str):
        return mutate_json(rng, data, others)
    at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    given["text"] = text[:at] + rng.choice((*MARKUP, text[at:end] * 2)) + text[rng.choice((at, end)) :]
    return json.dumps(given).encode()


def _object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of an input. Raises NanoinferError if it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise NanoinferError("not JSON") from None
    return found if isinstance(found, dict) else {}
