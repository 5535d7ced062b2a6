"""Reads an answer by a response template (response_template.py), piece by piece.

Of the fields, `content` is the content, `reasoning_content`, `reasoning` and `thinking` are the reasoning, and
`tool_calls` are calls, {"function": {"name": ..., "arguments": {...}}}. Strings in arguments become the types of the
tool's schema. Other fields are dropped, which is logged. The older `response_schema` (x-regex, x-parser) is not read:
transformers drops it, too.

What differs from transformers: a call that is malformed or of an unknown tool becomes content instead of an error; a
call that the answer ends in is left out unless its name is known; text of a field that is there several times without
`join` is joined by newlines, instead of the last one alone; the part of the answer that the prompt has is not part of
the message; a pattern or a value that takes too long ends the reading: the rest is content.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from nanoinfer.inputs.answers import response_template
from nanoinfer.inputs.answers.message_builder import MessageBuilder
from nanoinfer.inputs.answers.reader import to_json
from nanoinfer.inputs.answers.response_template import CALLS, TEXTS, ResponseTemplate
from nanoinfer.inputs.answers.schema_types import types_of
from nanoinfer.inputs.tools import Tool
from nanoinfer.outputs import AnswerDelta, ChatMessage, ContentDelta

log = logging.getLogger("nanoinfer")

CONTEXT = 64  # characters before the searched text, which ^, \b and lookbehinds read
MAX_EMPTY = 10  # empty matches in a row
PLAIN = ("text", "int", "float", "bool")  # can be shown before they are complete


class ResponseTemplateParser:
    """Reads one answer, as `AnswerParser` does.

    Args:
        template: of the model.
        tools: that the model may call.
        prompt: text of the prompt.
    """

    def __init__(self, template: ResponseTemplate, tools: Sequence[Tool] = (), *, prompt: str = "") -> None:
        self._template, self._tools = template, {tool.name: tool for tool in tools}
        self._buffer, self._place = "", 0  # text from `_place` on may become a marker; before it are CONTEXT characters
        self._field, self._is_open = template.implicit, False
        self._marker, self._body, self._captures = "", [""], dict[str, str]()  # of the field
        self._failed = False  # then the rest is content
        self._built = MessageBuilder()
        try:
            prompt = template.start(prompt)
        except (TimeoutError, MemoryError) as e:
            self._fail(e)
        self.feed(prompt if not self._failed else "")
        self._built.forget()  # what the prompt has of the answer

    def feed(self, text: str) -> list[AnswerDelta]:
        """Add text; return what it completes."""
        return self._advance(text, False)

    def finish(self, is_cut: bool = True) -> list[AnswerDelta]:
        """End the answer; return what was held back. Args: is_cut: without an effect, templates are not told."""
        return self._advance("", True)

    def message(self) -> ChatMessage:
        """Return the message so far; after `finish`, the whole one."""
        return self._built.message()

    def _advance(self, text: str, end: bool) -> list[AnswerDelta]:
        self._buffer += text
        if not self._failed:
            try:
                self._scan(end)
            except (TimeoutError, MemoryError, ValueError) as e:
                self._fail(e)
        if self._failed:
            self._built.add(ContentDelta, self._buffer[self._place :])
            self._buffer, self._place = "", 0
        cut = max(0, self._place - CONTEXT)
        self._buffer, self._place = self._buffer[cut:], self._place - cut
        return self._built.take()

    def _fail(self, error: Exception) -> None:
        limit = f"it needs more than {response_template.CPU_SEC} s of CPU time"
        reason = limit if isinstance(error, TimeoutError) else error
        log.warning("the response template cannot be executed: %s: the rest of the answer is content", reason)
        self._failed = True
        self._built.add(ContentDelta, (self._marker if self._field == CALLS else "") + "".join(self._body))

    def _scan(self, end: bool) -> None:
        """Find the markers in the text from `_place` on, and set `_place` after what is read. Raises as `find`."""
        num_empty, self._deadline = 0, time.thread_time() + response_template.CPU_SEC
        while True:
            match, opened, held = self._template.find(self._field, self._buffer, self._place, end, self._deadline)
            stop = held if match is None else match.start()
            if (body := self._buffer[self._place : stop]) and self._field is not None:
                if not self._is_open:
                    self._open(self._field, "", {})
                self._add(self._field, body)
            self._place = stop
            if match is None:
                break
            if was_open := self._is_open:
                self._close("" if opened else match[0])
            self._place = match.end()
            if opened:
                self._open(opened, match[0], {k: v for k, v in match.groupdict().items() if v is not None})
            elif not match[0] and not was_open:  # it would match here again
                break
            num_empty = 0 if match[0] else num_empty + 1
            if num_empty > MAX_EMPTY:
                raise ValueError("markers match the empty string again and again")
        if end and self._is_open:
            self._close("")

    def _open(self, field: str, marker: str, captures: dict[str, str]) -> None:
        self._field, self._is_open, self._marker, self._body, self._captures = field, True, marker, [], captures
        self._built.begin()

    def _add(self, field: str, text: str) -> None:
        given = self._template.fields[field]
        if field in TEXTS and given.get("content", "text") in PLAIN and given.get("transform") is None:
            self._text(field, text, given.get("content_args", {}).get("strip", True))
        elif field in TEXTS or field == CALLS:
            self._body.append(text)

    def _text(self, field: str, text: str, strips: bool = True) -> None:
        """Release text of a field; of one that is stripped, white space only between other text."""
        join = self._template.fields.get(field, {}).get("join")
        self._built.write(TEXTS[field], text, join="\n" if join is None else join, strips=strips)

    def _close(self, marker: str) -> None:
        field, body = self._field or "", "".join(self._body)
        value: Any = None if field == CALLS else body
        is_unfinished = field == CALLS and not marker  # the answer ended in it
        if body or field == CALLS:
            try:
                value = self._template.value(field, body, self._captures, self._deadline)
                is_unfinished = False
            except (TimeoutError, MemoryError):
                raise
            except Exception:
                pass
        self._field, self._is_open, self._body = self._template.implicit, False, []
        if is_unfinished:
            self._unfinished(body)
        elif field == CALLS and not self._call(value):
            self._built.begin()
            self._text("content", self._marker + body + marker)
        elif field in TEXTS and body:
            self._text(field, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    def _call(self, value: Any) -> bool:
        """Release the calls of a value, of the form {"function": ...} or a list of such, if it is nothing else."""
        calls = []
        for item in value if isinstance(value, list) else [value]:
            try:
                name, arguments = item["function"]["name"], item["function"].get("arguments", {})
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                _cast(arguments, self._tools[name])
                calls.append((name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
            except (AttributeError, LookupError, TypeError, ValueError, RecursionError):  # another form, or tool
                return False
        for name, text in calls:
            self._built.call(name, text)
        return True

    def _unfinished(self, body: str) -> None:
        """Release the call that the answer ended in, if an opening pattern has its name and its body is JSON."""
        given = self._template.fields[CALLS]
        shape = given.get("transform")
        function = shape.get("function") if isinstance(shape, dict) else None
        if isinstance(function, dict) and given.get("content") == "json" and not given.get("content_args"):
            name = self._captures.get(str(function.get("name"))[1:-1], "")
            if name in self._tools and function.get("arguments") == "{content}":
                self._built.call(name, body.strip())


def _cast(arguments: dict[str, Any], tool: Tool) -> None:
    """Convert the strings among arguments, where the tool's schema permits other types."""
    for key, value in arguments.items():
        types = types_of(tool.parameters, key)
        if types is not None and isinstance(value, str):
            arguments[key] = json.loads(to_json(value, types))
        elif types is not None and isinstance(value, list) and "array" not in types:  # of a key that is there again
            arguments[key] = [json.loads(to_json(v, types)) if isinstance(v, str) else v for v in value]
