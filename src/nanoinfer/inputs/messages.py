"""Convert the messages of a chat, in the forms that vLLM accepts, to what chat templates take.

as_conversations([{"role": "user", "content": "Hi"}])  ->  [[{"role": "user", "content": "Hi"}]]
content [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]  ->  "a\\nb"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.prompts import numbered
from nanoinfer.utils.checks import show

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}; further keys, such as tool_calls, are passed to the template."""


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """Return one conversation or several as a list of conversations. Raises as `as_conversation`."""
    many = messages if is_list(messages) and messages and all(map(is_list, messages)) else [messages]
    made = []
    for i, conversation in enumerate(many):
        with numbered(i, len(many), "conversation"):
            made.append(as_conversation(conversation))
    return made


def as_conversation(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of one conversation, at least one, with contents as strings.

    Raises:
        NanoinferError: it is not a list of messages, a message has no role, or a content is not text.
    """
    if not is_list(messages) or not messages:
        raise NanoinferError(
            f"messages={show(messages)} is not a conversation: give a list of {{'role': ..., 'content': ...}}"
        )
    made = []
    for i, message in enumerate(messages):
        with numbered(i, len(messages), "message"):
            made.append(_as_message(message))
    return made


def _as_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise NanoinferError(f"message={show(message)} is not a dict with role and content")
    for key in ("role", "content"):
        if key not in message and not (key == "content" and "tool_calls" in message):
            raise NanoinferError(f"message={show(dict(message))} has no {key}")
    if not isinstance(role := message["role"], str) or not role:
        raise NanoinferError(f"role={show(role)} is not a string such as 'user', 'assistant' or 'system'")
    content = message.get("content")
    return {**message, "content": content if content is None and "tool_calls" in message else _text(content)}


def _text(content: Any) -> str:
    """Return a content as a string: text parts are joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise NanoinferError(f"content={show(content)} is neither a string nor a list of text parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise NanoinferError(
                f"content part {show(part)} is not {{'type': 'text', 'text': ...}}: models here read text only"
            )
        texts.append(text)
    return "\n".join(texts)


def is_list(value: Any) -> bool:
    """Return whether a value is a list or another sequence, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
