"""The format of a chat model's answers: what stands around reasoning, content and tool calls, as data; its detection.

An answer is  [reasoning] [content] [calls], and a call is a sequence of pieces:

    calls_start  before_name NAME after_name ARGUMENTS after_arguments  separator  ... (more calls)  calls_end

Hermes, Qwen 3 before_name='<tool_call>\\n{"name": "', after_name='", "arguments": ', after_arguments='}\\n</tool_call>'
Mistral Nemo   calls_start='[TOOL_CALLS][', before_name='{"name": "', ..., separator=', ', calls_end=']'
DeepSeek V3.1  calls_start='<|tool_calls_begin|>', before_name='<|tool_call_begin|>', after_name='<|tool_sep|>', ...
Qwen3-Coder    before_name='<tool_call>\\n<function=', after_name='>', before_key='\\n<parameter=', after_key='>', ...
Gemma 4        before_name='<|tool_call>call:', after_arguments='<tool_call|>'

Detection renders a chat template with probe messages (content, reasoning, a call, one with two keys, two calls) and
divides the text between the names, keys and values of the probes where two renderings agree, at the borders of tags and
words. The idea is that of llama.cpp's automatic parser (its pull request 18675).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.messages import Tool
from nanoinfer.tokenizers.chat_template import ChatTemplate
from nanoinfer.utils.limited_process import LimitExceeded

log = logging.getLogger("nanoinfer")
ID = "\x00"
"""Stands for the id of a call in a piece, where a model writes one: '", "id": "\\x00"}'."""
STRING_MARK = '<|"|>'
"""Before and after a string in notation "gemma"."""
QUESTION, CONTENT, REASON = "probe question", "Probe content.", "Probe reason."
NAMES, KEYS, VALUES = ("probe_one", "probe_two"), ("alpha", "beta"), ("first value", "second value")
_ARGUMENTS = (KEYS[0], VALUES[0], KEYS[1], VALUES[1])
IDS = ("callid001", "callid002")
ENDS = ("<|eom_id|>", "<|call|>", "<|calls|>", "<|tool_response>")
"""Ends of turns with calls, where they are other tokens than those of turns without."""
MAX_MARKER = 200  # characters of a marker of reasoning
MAX_PIECE = 1000  # characters of any piece: those of known models have up to 100
MAX_PROBE = 1 << 17  # characters of a rendering: templates of today make up to 10,000 of a probe
_LEADING_ID = re.compile(r'(\{\s*"[^"]*id[^"]*":\s*")[^"]*')  # of a call in JSON
_PROBES = (QUESTION, CONTENT, REASON, *NAMES, *KEYS, *VALUES, *IDS)  # none is a part of a format
_SEGMENT = re.compile(r"</?[^<>\s]*>|\[/?[A-Z_]+\]|\w+|\s|.", re.S)
_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
_THINK = re.compile(r"(<|\[)/([\w:]{0,32}think[\w:]{0,32})(>|\])", re.I)
_PARAMETERS = {"type": "object", "properties": {key: {"type": "string", "description": key} for key in KEYS}}
PROBE_TOOLS = [Tool(name, "A probe.", _PARAMETERS).for_template() for name in NAMES]


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers. Without `before_name` it writes no calls."""

    reasoning_start: str = ""
    """Marker before the reasoning; empty if the model writes none."""
    reasoning_end: str = ""
    content_start: str = ""
    """Marker before the content; mostly empty."""
    content_end: str = ""
    trigger: str = ""
    """Beginning of the first call, up to white space or JSON: "<tool_call>". Empty: calls are the whole content, and
    begin with a brace or a bracket."""
    inner_trigger: str = ""
    """Last tag before a name, with which models begin a call when they leave out those before it: "<function="."""
    calls_start: str = ""
    """Text before the first of several calls, once."""
    calls_end: str = ""
    separator: str = ""
    """Text between two calls."""
    before_name: str = ""
    after_name: str = ""
    after_arguments: str = ""
    notation: str = "json"
    """Notation of the arguments: "json" {"k": "v", "n": 3}, "gemma" {k:<|"|>v<|"|>,n:3}, or "tagged": a piece around
    each key and value, strings as they are, other types as JSON."""
    before_key: str = ""
    after_key: str = ""
    after_value: str = ""
    parallel: bool = True
    """Whether the model can write several calls in one answer."""
    ignored: tuple[str, ...] = ()
    """Markers that are no part of reasoning, content or calls."""
    has_headers: bool = False
    """Whether an answer is messages with headers, as gpt-oss writes them. The pieces here are those of the grammar."""
    text_arguments: bool = False
    """Whether the chat template takes the arguments of earlier calls as JSON text instead of an object."""
    null_content: bool = False
    """Whether the chat template takes null, instead of "", for the content of earlier calls."""

    @property
    def has_calls(self) -> bool:
        """Whether calls can be written."""
        return bool(self.before_name)

    def reasoning_of(self, prompt: str) -> bool | None:
        """Return whether a prompt ends within reasoning (True), after it (False), or before it may begin (None)."""
        if not self.reasoning_end:
            return False
        end = prompt.rstrip()
        if self.reasoning_start and end.endswith(self.reasoning_start.rstrip()):
            return True
        return False if end.endswith(self.reasoning_end.strip()) else None


def markers(*pieces: str) -> set[str]:
    """Return pieces that are not empty without the white space around them."""
    return {piece.strip() for piece in pieces} - {""}


JSON_IN_MARKERS = AnswerFormat(
    reasoning_start="<think>", reasoning_end="</think>", trigger="<tool_call>", before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ', after_arguments="}\n</tool_call>", separator="\n",
)  # fmt: skip
"""The last resort, for models whose own format cannot be found."""
JSON_IN_LIST = AnswerFormat(
    trigger="<|tool_call|>", calls_start="<|tool_call|>[", before_name='{"name": "', after_name='", "arguments": ',
    after_arguments="}", separator=", ", calls_end="]",
)  # fmt: skip
"""Granite 3's, whose templates describe it in words only; Phi-4-mini's has an end marker."""
HARMONY = AnswerFormat(
    reasoning_start="<|channel|>analysis<|message|>",
    reasoning_end="<|end|>",
    content_start="<|channel|>final<|message|>",
    content_end="<|end|>",
    trigger="<|channel|>commentary to=functions.",
    inner_trigger="to=functions.",
    before_name="<|channel|>commentary to=functions.",
    after_name=" <|constrain|>json<|message|>",
    parallel=False,
    ignored=(
        "<|start|>assistant", "<|call|>", "<|return|>", "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
    ),
    has_headers=True,
)  # fmt: skip
"""gpt-oss's, whose templates write messages in another order of parts than the model does."""


def detect(
    template: ChatTemplate, end_tokens: Collection[str] = (), special_tokens: Collection[str] = ()
) -> AnswerFormat:
    """Return the format of the answers of a model with a chat template.

    Args:
        template: of the model.
        end_tokens: texts of the tokens that end an output.
        special_tokens: texts of the tokenizer's special tokens.
    """
    if "<|channel|>" in template.source and "<|message|>" in template.source:
        return HARMONY
    prober = _Prober(template, end_tokens)
    if (calls := prober.calls()) is None:
        described = prober.prompt + " ".join(special_tokens)
        calls = JSON_IN_LIST if "<|tool_call|>" in described or "<|/tool|>" in described else JSON_IN_MARKERS
        calls = replace(calls, calls_end="]<|/tool_call|>") if "<|/tool|>" in described else calls
        log.info("the chat template renders no tool calls: they are expected as %s", calls.calls_start or calls.trigger)
    format = replace(calls, **prober.texts, null_content=prober.null_content)
    if any(isinstance(text, str) and len(text) > MAX_PIECE for text in vars(format).values()):
        log.warning(
            "the chat template surrounds answers by more than %d characters: they are read as others", MAX_PIECE
        )
        return JSON_IN_MARKERS
    return format


class _Prober:
    """Renders probes and divides them."""

    def __init__(self, template: ChatTemplate, end_tokens: Collection[str]) -> None:
        self._template = template
        self._exceeded = False
        self.null_content = False
        self._ends = {*end_tokens, *ENDS, template.special_tokens.get("eos_token", "")} - {""}
        self.prompt = self._render([], add_generation_prompt=True)
        self._opening = self._after_question(self.prompt)
        before, _, self._turn_end = self._answer({"content": CONTENT}).partition(CONTENT)
        self.texts: dict[str, Any] = self._reasoning(before)
        end = self.texts["reasoning_end"]
        start = (before.rpartition(end)[2] if end else before).strip()
        if start and start != self.texts["reasoning_start"]:
            self.texts |= {"content_start": start, "content_end": "".join(_SEGMENT.findall(self._turn_end.strip())[:1])}

    def _render(self, answer: Sequence[dict[str, Any]], **variables: Any) -> str:
        """Return a rendering; empty if the template refuses the messages, and after one that exceeds a limit."""
        messages = [{"role": "user", "content": QUESTION}, *answer]
        try:
            text = "" if self._exceeded else self._template.render(messages, tools=PROBE_TOOLS, **variables)
        except NanoinferError as e:
            self._exceeded = isinstance(e, LimitExceeded)
            return ""
        return text if len(text) <= MAX_PROBE else ""

    @staticmethod
    def _after_question(text: str) -> str:
        return text[text.rfind(QUESTION) + len(QUESTION) :]

    def _answer(self, message: dict[str, Any], **variables: Any) -> str:
        """Return what the template makes of an assistant's message, without what begins its turn."""
        text = self._render([{"role": "assistant", "content": "", **message}], add_generation_prompt=False, **variables)
        if QUESTION not in text:
            return ""
        text = self._after_question(text)
        return text[len(_common(text, self._opening)) :]

    def _reasoning(self, before_content: str) -> dict[str, str]:
        """Return the markers of reasoning. Args: before_content: what an answer without it has before its content."""
        reason = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), REASON)
        thinks, calls = {"enable_thinking": True, "thinking": True}, {"tool_calls": probe_calls(1)}
        before, is_there, rest = self._answer({"content": CONTENT, **reason}, **thinks).partition(REASON)
        end = rest.partition(CONTENT)[0].strip()
        before_call, beside_call, rest_of_call = self._answer({**calls, **reason}, **thinks).partition(REASON)
        end_of_call = rest_of_call.partition(NAMES[0])[0]
        if not is_there:  # a template may keep reasoning beside calls only
            plain, _, _ = self._answer(calls).partition(NAMES[0])
            before, is_there, end = before_call, beside_call, end_of_call.removesuffix(plain.lstrip()).strip()
            if before.strip() and (empty := before_content.partition(before.strip())[2]):  # beside content it is empty
                end = _common(empty.strip(), end_of_call.lstrip()).strip() or end
        elif beside_call and (shared := _common(end, end_of_call.lstrip()).strip()):  # the rest begins the content
            end = shared
        start = before.strip()
        if not is_there or not end or len(end) > MAX_MARKER:
            tag = _THINK.search(self._template.source) or _THINK.search(self.prompt)
            end = tag[0] if tag is not None else ""
            start = end.replace("/", "", 1)
        elif not start or start == end:  # the prompt has it, and may have the end, too
            opening = self._opening.rstrip().removesuffix(end).rstrip()
            tag = _TAG.search(opening)
            start = tag[1] if tag is not None else opening.rpartition("\n")[2]
        return {"reasoning_start": start, "reasoning_end": end}

    def calls(self) -> AnswerFormat | None:
        """Return the format of calls; None if the template writes none. It sets `null_content`."""
        for as_text in (False, True):
            self.null_content = self._needs_null(as_text)
            parts = self._parts(1, 1, as_text)
            if parts is None or "\\" in parts[2]:
                continue
            format = self._format(parts, as_text)
            if format is not None and not any(probe in repr(vars(format)) for probe in _PROBES):
                return format
        self.null_content = self._needs_null(False)
        return None

    def _needs_null(self, as_text: bool) -> bool:
        """Return whether calls are shown with content null, and with "" not, or with more text, as of a second turn."""
        calls = {"tool_calls": probe_calls(1, 1, as_text)}
        with_null, with_empty = (self._answer({**calls, "content": content}) for content in (None, ""))
        return NAMES[0] in with_null and (NAMES[0] not in with_empty or len(with_null) < len(with_empty))

    def _parts(self, num_calls: int, num_keys: int, as_text: bool) -> list[str] | None:
        """Return the text between the probe's names, keys and values, in their order."""
        content = None if self.null_content else ""
        text = self._answer({"content": content, "tool_calls": probe_calls(num_calls, num_keys, as_text)})
        for call_id in IDS:
            text = text.replace(call_id, ID)
        text = _LEADING_ID.sub(rf"\1{ID}", text)
        if (end := self.texts["reasoning_end"]) and end in text.partition(NAMES[0])[0]:
            text = text.partition(end)[2]
        for end in self._ends:
            text = text.partition(end)[0]
        text = text.removesuffix(_common(text, self._turn_end, backwards=True))
        parts = []
        for name in NAMES[:num_calls]:
            for probe in (name, *_ARGUMENTS[: 2 * num_keys]):
                before, is_there, text = text.partition(probe)
                if not is_there:
                    return None
                parts.append(before)
        return [*parts, text]

    def _format(self, parts: list[str], as_text: bool) -> AnswerFormat | None:
        head, name_to_key, key_to_value, tail = parts
        between = None
        if (two := self._parts(2, 1, as_text)) is not None:
            head, between, tail = two[0], two[3], two[6]  # some write the end after the second call only
        head = head.lstrip().removeprefix(self.texts.get("content_start", "") + self.texts.get("content_end", ""))
        if re.fullmatch(r'"\s*:\s*"', key_to_value):
            pieces: dict[str, Any] = {"after_name": name_to_key[: name_to_key.rfind("{")]}
            end = r'"\s*\}'
        elif STRING_MARK in key_to_value:
            pieces = {"notation": "gemma", "after_name": name_to_key.removesuffix("{")}
            end = re.escape(STRING_MARK + "}")
        elif pieces := self._tagged(name_to_key, key_to_value, as_text):
            end = re.escape(pieces["after_value"])
        if not pieces or (ending := re.match(end, tail)) is None:
            return None
        around = _divide(head, tail[ending.end() :], None if between is None else between[ending.end() :])
        opening = around.get("calls_start", "") + around["before_name"]
        tag = None if "{" in opening else re.match(r"[<\[]\S*?[>\]]", opening)
        trigger = opening.partition("{")[0].rstrip("[ \t\n") if tag is None else tag[0]
        inner = around["before_name"].strip().rpartition("\n")[2]
        if inner[:1] != "<" or len(inner) < 4 or "{" in inner or inner.startswith(trigger):
            inner = ""
        return AnswerFormat(text_arguments=as_text, trigger=trigger, inner_trigger=inner, **pieces, **around)

    def _tagged(self, name_to_key: str, key_to_value: str, as_text: bool) -> dict[str, Any]:
        """Return the pieces around each key and value, and before the first; empty if they cannot be told apart."""
        if (both := self._parts(1, 2, as_text)) is None:
            return {}
        between, tail = both[3], both[5]
        before_key = _common(name_to_key, between, backwards=True)
        after_value = _common(between.removesuffix(before_key), tail)
        if not before_key.strip() or not after_value.strip():
            return {}
        pieces = {"notation": "tagged", "after_name": name_to_key.removesuffix(before_key), "before_key": before_key}
        return {**pieces, "after_key": key_to_value, "after_value": after_value}


def probe_calls(num_calls: int, num_keys: int = 1, as_text: bool = False) -> list[dict[str, Any]]:
    """Return calls of an assistant's message with known ids, names, keys and values; at most two of each."""
    arguments: Any = dict(zip(KEYS[:num_keys], VALUES, strict=False))
    if as_text:
        arguments = json.dumps(arguments)
    pairs = list(zip(IDS, NAMES, strict=True))[:num_calls]
    return [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}} for i, name in pairs]


def _common(a: str, b: str, backwards: bool = False) -> str:
    """Return the beginning that two texts share, or the end, in whole tags and words."""
    step = -1 if backwards else 1
    pairs = zip(_SEGMENT.findall(a)[::step], _SEGMENT.findall(b)[::step], strict=False)
    shared = [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "".join(shared[::step])


def _divide(head: str, tail: str, between: str | None) -> dict[str, Any]:
    """Return the pieces around calls.

    Args:
        head: the text before the first name.
        tail: the text after the last call's arguments.
        between: the text between the arguments of a call and the name of the next; None if there is only one.
    """
    if between is None:
        return {"before_name": head, "after_arguments": tail.rstrip(), "parallel": False}
    before_name = _common(head, between, backwards=True).lstrip()
    middle = between.removesuffix(before_name)
    after_arguments = _common(middle, tail)
    return {
        "calls_start": head.removesuffix(before_name),
        "calls_end": tail.removeprefix(after_arguments).rstrip(),
        "separator": middle.removeprefix(after_arguments),
        "before_name": before_name,
        "after_arguments": after_arguments,
    }
