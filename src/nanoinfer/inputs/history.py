"""Fit a conversation to what a chat template accepts, found by rendering short ones with it.

    developer                          system, unless the template names it
    system messages at the beginning   one message
    a system message that is refused   of the user, in its place: what stands before it stays as it was (prefix cache)
    two messages of the user in a row  one message, where they are refused; after a result, a part of it
    calls that are not shown           content, as the model writes them; their results: of the user

A message is refused if the template raises an error, leaves it out or moves it before an earlier one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.answers.format import ID, IDS, NAMES, PROBE_TOOLS, AnswerFormat, probe_calls
from nanoinfer.inputs.messages import Message, as_object
from nanoinfer.inputs.tools import Tool
from nanoinfer.tokenizers.chat_template import ChatTemplate
from nanoinfer.utils.checks import show

ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTIONS = ("system", "developer")
_BEFORE = {"user": ("user",), "assistant": ("user", "assistant"), "tool": ("user", "call", "tool")}
"""Roles of a conversation that ends with a message of a role."""


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

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows the tools of a conversation."""
        return self._shows("tools", "user") or self._shows("user", "tools")

    def fit(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return checked messages as the template accepts them.

        Raises:
            NanoinferError: a role is unknown to the template.
        """
        made = [dict(message) for message in messages]
        if not self._shows("user"):  # one of another kind, as a reranker's
            return [self._with_calls(message) for message in made]
        for message in made:
            self._set_role(message)
        made = self._joined_beginning(made)
        if any("tool_calls" in message for message in made):
            made = [self._with_calls(message) for message in self._shown_calls(made)]
        placed: list[dict[str, Any]] = []
        for message in made:
            role, before = message["role"], _BEFORE.get(placed[-1]["role"], ()) if placed else ()
            if role in _INSTRUCTIONS and not self._shows(*before, role, *(() if before else ("user",))):
                role = "user"
            if role == "user" and before in (_BEFORE["user"], _BEFORE["tool"]) and not self._shows(*before, role):
                placed[-1] = _joined(placed[-1], message)
            else:
                placed.append({**message, "role": role})
        return placed

    def _set_role(self, message: dict[str, Any]) -> None:
        """Replace the role developer where the template does not name it."""
        role = message["role"]
        if re.search(rf"""(['"]){re.escape(role)}\1""", self._template.source):
            return
        if role not in ROLES:
            raise NanoinferError(f"role={show(role)} is unknown to the chat template: use {', '.join(ROLES)}")
        message["role"] = "system" if role == "developer" else role

    def _joined_beginning(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with one of the system at the beginning; also one of the developer, if both are shown."""
        first = list(takewhile(lambda message: message["role"] in _INSTRUCTIONS, messages))
        joined = [_joined(*run) for _, run in groupby(first, key=lambda message: message["role"])]
        if len(joined) > 1 and not self._shows(*(message["role"] for message in joined), "user"):
            joined = [_joined(*joined)]
        return [*joined, *messages[len(first) :]]

    def _shown_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with calls and results as texts, if the template does not show them."""
        if self._shows("user", "call") or self._shows("user", "call", "tool"):
            return messages
        made = []
        for message in messages:
            if calls := message.pop("tool_calls", None):
                parts = [message.get("content"), write_calls(self._format, [call["function"] for call in calls])]
                message["content"] = "\n".join(filter(None, parts))
            elif message["role"] == "tool":
                message = {"role": "user", "content": f"Result of a tool: {message['content']}"}
            made.append(message)
        return made

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
        if (made := as_object(arguments)) is not None:
            return made
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
            if role == "tools":
                texts.append(NAMES[0])
                continue
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


def describe_tools(format: AnswerFormat, tools: Sequence[Tool]) -> str:
    """Return what a system message says about tools, for a template that does not show them."""
    listed = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    example = write_calls(format, [{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}])
    return (
        f"You can call these functions. Each has a JSON schema of its parameters:\n{listed}\n\n"
        f"To call a function, write exactly this, with its name and its arguments:\n{example}"
    )


def write_calls(format: AnswerFormat, functions: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as a model writes them. Args: functions: {"name": ..., "arguments": JSON text or an object}."""
    f, made = format, []
    for function in functions:
        arguments = as_object(function["arguments"])
        if arguments is None:
            text = function["arguments"]
        elif f.notation == "python":
            text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        else:
            text = json.dumps(arguments, ensure_ascii=False)
        made.append(f.before_name + function["name"] + f.after_name + text + f.after_arguments)
    return (f.calls_start + f.separator.join(made) + f.calls_end).replace(ID, "0" * 9)


def _joined(*messages: Message) -> dict[str, Any]:
    """Return messages as one, with the keys of the first."""
    return {**messages[0], "content": "\n\n".join(filter(None, (message["content"] for message in messages)))}
