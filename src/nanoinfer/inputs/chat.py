"""Prompts of chats: a model's chat template applied to messages, as text and as token ids; the format of answers.

A conversation is fitted to what its template accepts, found by rendering short ones with it; docs/chat.md has a table.
A message is refused if the template raises an error, leaves it out or moves it before an earlier one.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any

from nanoinfer.errors import NanoinferError, show
from nanoinfer.inputs.answers.format import ID, IDS, NAMES, PROBE_TOOLS, AnswerFormat, detect, probe_calls
from nanoinfer.inputs.answers.lark import ReleasedTools
from nanoinfer.inputs.answers.response_template import ResponseTemplate
from nanoinfer.inputs.messages import REASONING_KEYS, Message, Tool, as_choice, as_object, as_tools
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.structured.vocabulary import special_tokens
from nanoinfer.tokenizers.chat_template import ChatTemplate
from nanoinfer.tokenizers.tokenizer import decode
from nanoinfer.utils.checks import bounded, keep_fields

log = logging.getLogger("nanoinfer")
_ARGUMENTS = ("messages", "add_generation_prompt")  # of a template, with parameters of their own
_MAX_FORMATS = 8  # of chat templates that are kept
_MAX_TEMPLATES = 2  # that are kept with their processes: one for chats with tools, one for others

ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTIONS = ("system", "developer")
_BEFORE = {"user": ("user",), "assistant": ("user", "assistant"), "tool": ("user", "call", "tool")}
"""Roles of a conversation that ends with a message of a role."""


@dataclass(frozen=True)
class ChatOptions:
    """How to apply a chat template, and what the answer may be.

    The tools are checked when they are used: in a worker thread where there is one.
    """

    chat_template: str | None = None
    """Jinja template to use instead of the model's own."""
    add_generation_prompt: bool = True
    """Whether to end the prompt with the beginning of the assistant's answer."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further variables of the template."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, which the output continues."""
    tools: Any = None
    """Functions that the model may call: OpenAI's list, or `Tool`s."""
    tool_choice: Any = None
    """none, auto, required, the name of a tool or OpenAI's object with it; None: auto."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    enable_thinking: bool | None = None
    """Variable of the template: whether the model shall reason; None: as the template has it."""
    reasoning_effort: str | None = None
    """Variable of the template, such as "low"; "none" is enable_thinking=False, too."""
    thinking_token_budget: int | None = bounded(None, 0)
    """Largest number of tokens of the reasoning, after which its end is forced; None: any."""
    optional_thinking: bool = False
    """Whether a thinking_token_budget has no effect, instead of being an error, if the template has no reasoning."""
    _tools: tuple[Tool, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keep_fields(self)
        if self.continue_final_message and self.add_generation_prompt:
            raise NanoinferError(
                "continue_final_message=True continues the last message, add_generation_prompt=True begins another one:"
                " set add_generation_prompt=False"
            )
        if not isinstance(effort := self.reasoning_effort, (str, type(None))) or effort == "":
            raise NanoinferError(f"reasoning_effort={show(effort)} is not a string such as 'low'")
        extra = self.chat_template_kwargs
        if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
            raise NanoinferError(f"chat_template_kwargs={show(extra)} is not a dict of names to values")
        if clash := [name for name in _ARGUMENTS if name in (extra or {})]:
            raise NanoinferError(f"chat_template_kwargs: {clash[0]} is a parameter of its own: give it there")

    @property
    def checked_tools(self) -> tuple[Tool, ...]:
        """The tools. Raises NanoinferError as `as_tools`."""
        if self._tools is None:  # without functools.cached_property, whose lock a fork may inherit held
            object.__setattr__(self, "_tools", as_tools(self.tools))
        return self._tools or ()

    @property
    def choice(self) -> str:
        """The tool_choice: none, auto, required or the name of a tool. Raises NanoinferError as `as_choice`."""
        return as_choice(self.tool_choice, self.checked_tools)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template. Raises NanoinferError for tools that are malformed."""
        variables: dict[str, Any] = {}
        thinks = self.enable_thinking
        if (effort := self.reasoning_effort) is not None:
            variables["reasoning_effort"] = effort
            thinks = effort != "none" if thinks is None else thinks
        if thinks is not None:
            variables |= {"enable_thinking": thinks, "thinking": thinks}  # the name depends on the template
        if tools := self.checked_tools:
            variables["tools"] = [tool.for_template() for tool in tools]
        extra = self.chat_template_kwargs or {}
        if "tools" in variables and "tools" in extra:
            raise NanoinferError("chat_template_kwargs: tools is given twice: leave it out here")
        return {**variables, **extra, "add_generation_prompt": self.add_generation_prompt}


class ChatFormatter:
    """Applies the chat template of a model, or another one."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        # lru_cache holds no lock that an interrupt or a fork could leave held.
        self._make_template = lru_cache(_MAX_TEMPLATES)(lambda source: ChatTemplate(source, model.special_tokens))
        self._detect = lru_cache(_MAX_FORMATS)(self._detect_format)
        self._compile = lru_cache(1)(self._compile_response_template)
        self._special_tokens = lru_cache(1)(lambda: special_tokens(model.require_tokenizer(), model.vocab_size))
        self.released_tools = ReleasedTools()
        self._warned = False  # that a template does not show the tools

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Return the text of the prompt for checked messages.

        Raises:
            NanoinferError: as `ChatTemplate.render` and `template`; or the last message cannot be continued.
        """
        if options.continue_final_message and "tool_calls" in messages[-1]:
            raise NanoinferError("continue_final_message=True: the last message has calls: give their results")
        variables = options.variables()
        template = self.template(self.source(options))
        messages = History(template, self.format(template.source), bool(variables.get("tools"))).fit(messages)
        if options.continue_final_message:
            text = _up_to_end(template, messages, variables)
        else:
            text = template.render(messages, **variables)
        if not self._warned and (hidden := [tool.name for tool in options.checked_tools if tool.name not in text]):
            self._warned = True
            log.warning(
                "the chat template does not show tool %r to the model: describe the tools in a message", hidden[0]
            )
        return text

    def source(self, options: ChatOptions) -> str | None:
        """Return the source of the template to use; None: the model's own."""
        own = self._model.tool_template if options.checked_tools else None
        return own if options.chat_template is None else options.chat_template

    def format(self, source: str | None) -> AnswerFormat:
        """Return the format of the answers to what a template, or the model's own, makes. Raises as `template`.

        It is found once for each template, in about a tenth of a second.
        """
        return self._detect(self.template(source).source)

    def _detect_format(self, source: str) -> AnswerFormat:
        ends = [self.decode([token]) for token in self._model.end_token_ids]
        format = detect(self.template(source), ends, self.special_tokens)
        log.debug("answers of the chat template: %s", format)
        return format

    def response_template(self, source: str | None) -> ResponseTemplate | None:
        """Return the model's response template, which is about its own chat template only; None without one."""
        return None if source is not None else self._compile()

    def _compile_response_template(self) -> ResponseTemplate | None:
        if (spec := self._model.response_template) is None:
            return None
        try:
            return ResponseTemplate(spec)
        except (NanoinferError, RecursionError) as e:
            log.warning("%s: answers are read by the format of the chat template", e)
            return None

    def template(self, source: str | None) -> ChatTemplate:
        """Return a template, or the model's own. Raises NanoinferError if the model has none, or it is too large."""
        model = self._model
        if source is None and (source := model.chat_template) is None:
            raise NanoinferError(
                f"{model.no_chat_template_reason or f'model {model.name!r} has no chat template'}: give one by"
                " chat_template= (--chat-template FILE), or use generate"
            )
        return self._make_template(source)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Text -> id of the tokenizer's special tokens, which an answer's markers may be."""
        return self._special_tokens() if self._model.tokenizer is not None else {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt; the template, not the tokenizer, has added its start token."""
        return self._model.require_tokenizer().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; empty without a tokenizer."""
        return decode(self._model.tokenizer, token_ids) if self._model.tokenizer else ""


def _up_to_end(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Return the text of the messages up to the end of the last one's content, or of its reasoning without content.

    As in transformers (`apply_chat_template`), a mark after it is rendered with it. White space at its end is kept if
    the template keeps it.
    """
    last = messages[-1]
    names = [name for name in REASONING_KEYS if name in last] if ends_in_reasoning(last) else ["content"]
    mark = f"mark{secrets.token_hex(8)}"
    marked = {**last, **{name: f"{last[name]}{mark} " for name in names}}
    before, is_there, after = template.render([*messages[:-1], marked], **variables).rpartition(mark)
    if not is_there:
        raise NanoinferError(
            f"continue_final_message=True: the chat template leaves the {names[0]} of the last message out: give"
            " another message, or another chat_template"
        )
    return before if after.startswith(" ") else before.rstrip()


def ends_in_reasoning(message: Message) -> bool:
    """Return whether a checked message ends within its reasoning: it has no content."""
    return bool(message.get(REASONING_KEYS[0])) and not message.get("content") and message["role"] == "assistant"


class History:
    """Fits conversations to one template, which keeps what it shows of short ones.

    Args:
        template: of the conversations.
        format: that `detect` found for it.
        has_tools: whether they have tools, for which templates may have another branch.
    """

    def __init__(self, template: ChatTemplate, format: AnswerFormat, has_tools: bool) -> None:
        self._template, self._format = template, format
        self._variables: dict[str, Any] = {"tools": PROBE_TOOLS} if has_tools else {}
        self._shown = template.shown

    def fit(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return checked messages as the template accepts them.

        Raises:
            NanoinferError: a role is unknown to the template.
        """
        if not self._shows("user"):  # one of another kind, as a reranker's
            return [self._with_calls(dict(message)) for message in messages]
        fitted = [{**message, "role": self._role(message["role"])} for message in messages]
        first = list(takewhile(lambda message: message["role"] in _INSTRUCTIONS, fitted))
        fitted = [*([_joined(*first)] if first else []), *fitted[len(first) :]]
        if any("tool_calls" in message for message in fitted):
            fitted = [self._with_calls(message) for message in self._shown_calls(fitted)]
        placed: list[dict[str, Any]] = []
        for message in fitted:
            role, before = message["role"], _BEFORE.get(placed[-1]["role"], ()) if placed else ()
            if role in _INSTRUCTIONS and not self._shows(*before, role, *(() if before else ("user",))):
                role = "user"
            if role == "user" and before in (_BEFORE["user"], _BEFORE["tool"]) and not self._shows(*before, role):
                placed[-1] = _joined(placed[-1], message)
            else:
                placed.append({**message, "role": role})
        return placed

    def _role(self, role: str) -> str:
        """Return the role of a message, of the system for that of the developer where the template does not name it."""
        if re.search(rf"""(['"]){re.escape(role)}\1""", self._template.source):
            return role
        if role not in ROLES:
            raise NanoinferError(f"role={show(role)} is unknown to the chat template: use {', '.join(ROLES)}")
        return "system" if role == "developer" else role

    def _shown_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with calls and results as texts, if the template does not show them."""
        if self._shows("user", "call") or self._shows("user", "call", "tool"):
            return messages
        shown = []
        for message in messages:
            if calls := message.pop("tool_calls", None):
                parts = [message.get("content"), write_calls(self._format, [call["function"] for call in calls])]
                message["content"] = "\n".join(filter(None, parts))
            elif message["role"] == "tool":
                message = {"role": "user", "content": f"Result of a tool: {message['content']}"}
            shown.append(message)
        return shown

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with arguments as text or objects, and no content as null or "": what the template takes."""
        if "tool_calls" not in message:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        content = message.get("content") or (None if self._format.null_content else "")
        return {**message, "content": content, "tool_calls": calls}

    def _arguments(self, arguments: Any) -> Any:
        if self._format.text_arguments:
            return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if (values := as_object(arguments)) is not None:
            return values
        return arguments if self._format.notation == "json" else {"arguments": arguments}  # cut off: not JSON

    def _shows(self, *roles: str) -> bool:
        """Return whether the template shows messages of some roles, in this order."""
        key = "tools" in self._variables, *roles
        if key not in self._shown:
            self._shown[key] = self._probe(roles)
        return self._shown[key]

    def _probe(self, roles: Sequence[str]) -> bool:
        messages, texts = [], []
        for i, role in enumerate(roles):
            message: dict[str, Any] = {"role": role, "content": f"Probe {i}."}
            if role == "call":
                message |= {"role": "assistant", "content": "", "tool_calls": probe_calls(1)}
                texts.append(NAMES[0])
            else:
                texts.append(message["content"])
            if role == "tool":
                message |= {"tool_call_id": IDS[0], "name": NAMES[0]}
            messages.append(self._with_calls(message))
        try:
            text = self._template.render(messages, **self._variables, add_generation_prompt=True)
        except NanoinferError:
            return False
        at = 0
        return all((at := text.find(expected, at)) >= 0 for expected in texts)


def write_calls(f: AnswerFormat, functions: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as a model writes them. Args: functions: {"name": ..., "arguments": JSON text or an object}."""
    calls = []
    for function in functions:
        arguments = as_object(function["arguments"])
        text = function["arguments"] if arguments is None else json.dumps(arguments, ensure_ascii=False)
        calls.append(f.before_name + function["name"] + f.after_name + text + f.after_arguments)
    return (f.calls_start + f.separator.join(calls) + f.calls_end).replace(ID, "0" * 9)


def _joined(*messages: Message) -> dict[str, Any]:
    """Return messages as one, with the keys of the first."""
    return {**messages[0], "content": "\n\n".join(filter(None, (message["content"] for message in messages)))}
