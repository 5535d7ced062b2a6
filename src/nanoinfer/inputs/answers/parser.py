"""Read a model's answer, in pieces or as a whole: its reasoning, content and tool calls.

Text is released as soon as it can no longer be part of a marker. White space beside a marker belongs to the marker.
Arguments become JSON text, whatever the model's notation. The result does not depend on how the text was cut.

    truncated answer   what is there: a call whose name is complete has the arguments so far. The beginning of a call
                       without its name is left out
    malformed call     (bad JSON, a name that is not a tool's, text between parameters, an answer that the model ended
                       within the call) it becomes content, as it was written, or reasoning within reasoning
    call in reasoning  ends the reasoning
    reasoning marker   within content, where no call or other marker stands directly before it, is content: the model
                       writes about markers. One that is a special token is a marker anywhere

So that a malformed call can become content, the arguments of a call are released when they are complete. Those of
answers that a grammar constrains cannot be malformed: with `constrained=True` they are released as they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

from nanoinfer.inputs.answers.format import ID, STRING_MARK, AnswerFormat, markers
from nanoinfer.inputs.answers.reader import (
    Ended,
    Malformed,
    Markers,
    MessageBuilder,
    Reader,
    Waiting,
    quoted,
    strict_json,
    to_json,
)
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import AnswerDelta, ChatMessage, ContentDelta, ReasoningDelta
from nanoinfer.structured.schemas import types_of

_NAME = re.compile(r"[\w.-]+")
_HEADER_STARTS = ("<|start|>", "<|channel|>")
_MESSAGE_ENDS = Markers((*_HEADER_STARTS, "<|end|>", "<|call|>", "<|return|>"))
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.S)


class AnswerParser:
    """Reads one answer.

    Args:
        format: of the model.
        tools: that the model may call. Without any, the text of a call is content.
        starts_in_reasoning: whether the prompt has opened the reasoning (`AnswerFormat.reasoning_of`).
        constrained: whether a grammar constrains the answer (grammar.py).
        special_tokens: of the tokenizer.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Sequence[Tool] = (),
        *,
        starts_in_reasoning: bool = False,
        constrained: bool = False,
        special_tokens: Collection[str] = (),
    ) -> None:
        self._format, self._tools, self._constrained = format, {tool.name: tool for tool in tools}, constrained
        self._special_tokens = tuple(special_tokens)
        self._reader, self._built = Reader(), MessageBuilder()
        self._name = ""  # of a call that is not released yet
        self._held: list[str] = []  # of its arguments
        self._releases = constrained  # arguments as they arrive
        self._in_reasoning, self._is_cut = starts_in_reasoning, True
        self._running: Waiting[None] | None = self._messages() if format.has_headers else self._run()

    def feed(self, text: str) -> list[AnswerDelta]:
        """Add text; return what it completes."""
        self._reader.feed(text)
        return self._advance()

    def finish(self, is_cut: bool = True) -> list[AnswerDelta]:
        """End the answer; return what was held back. Args: is_cut: whether it did not end by an end token."""
        self._reader.closed, self._is_cut = True, is_cut
        return self._advance()

    def message(self) -> ChatMessage:
        """Return the message so far; after `finish`, the whole one."""
        return self._built.message()

    def _advance(self) -> list[AnswerDelta]:
        if self._running is not None:
            try:
                next(self._running)
            except StopIteration:
                self._running = None
        return self._built.take()

    def _run(self) -> Waiting[None]:
        f, built = self._format, self._built
        calls = bool(self._tools) and f.has_calls
        triggers = markers(f.trigger, f.inner_trigger) if calls else set()
        starts, ends = markers(f.reasoning_start), markers(f.reasoning_end)
        spoken = {text for text in starts | ends if not text.startswith(self._special_tokens)}
        dropped = markers(f.content_start, f.content_end, *f.ignored) | ends
        in_content, in_reasoning = Markers({*triggers, *starts, *dropped}), Markers({*triggers, *ends})
        bare = calls and not f.trigger
        if bare and not self._in_reasoning:
            yield from self._bare_call()
        while True:
            kind, watched = (ReasoningDelta, in_reasoning) if self._in_reasoning else (ContentDelta, in_content)
            marker = yield from self._reader.until(watched, partial(built.write, kind), True)
            if marker is None:
                return built.end(kind)
            if marker in spoken and not self._in_reasoning and not built.blank:
                built.write(ContentDelta, marker)
            elif marker in triggers:
                if not self._in_reasoning:
                    built.begin()
                self._releases = self._constrained and marker == f.trigger.strip()
                yield from self._section(marker)
            else:
                built.begin()
                self._in_reasoning = not self._in_reasoning and marker in starts
                if bare and not self._in_reasoning and marker in dropped:
                    yield from self._bare_call()

    def _messages(self) -> Waiting[None]:
        """Read messages with headers, as gpt-oss writes them."""
        built, in_body, mark = self._built, self._in_reasoning, ""
        while True:
            if not in_body:
                yield from self._header(mark)
            kind = ReasoningDelta if self._in_reasoning else ContentDelta
            marker = yield from self._reader.until(_MESSAGE_ENDS, partial(built.write, kind), True)
            if marker is None:
                return built.end(kind)
            built.begin()
            mark, in_body = (marker if marker in _HEADER_STARTS else ""), False

    def _header(self, mark: str) -> Waiting[None]:
        """Read a header, if there is one, and the call that it begins. Args: mark: its beginning, which was read."""
        reader, self._in_reasoning = self._reader, False
        reader.unread(mark)
        header = yield from reader.match(_header_pattern())
        if header is None or (header.partial and "<|" not in header[0]):
            self._built.write(ContentDelta, reader.take(len(mark)) if header is None else header[0])
        elif not header.partial:  # else the answer ends in it
            recipient = header["recipient"] or ""
            name = recipient.removeprefix("functions.")
            if name in self._tools:
                yield from self._call("", header[0], name)
            elif recipient not in ("", "assistant", "user", "all"):
                self._built.write_apart(header[0])
            else:
                self._built.begin()
                self._in_reasoning = header["channel"] == "analysis"

    def _bare_call(self) -> Waiting[None]:
        """Read calls that begin without a marker, if any."""
        f, reader = self._format, self._reader
        space = yield from reader.space()
        if (yield from reader.begins((f.calls_start + f.before_name).strip()[:1])):
            yield from self._section("", space)
        else:
            self._built.write(ContentDelta, space)

    def _section(self, trigger: str, space: str = "") -> Waiting[None]:
        """Read calls after their trigger."""
        f, reader = self._format, self._reader
        opening, separator, end = f.calls_start + f.before_name, f.separator.strip(), f.calls_end.strip()
        more = yield from self._call(opening[opening.find(trigger) + len(trigger) :], space + trigger)
        first = f.before_name.split(ID)[0].strip()
        first = "{" if first.startswith("{") else (first.split() or [""])[0]
        while more:
            yield from reader.space()
            if f.trigger and not f.calls_start:  # further calls are found in the text
                break
            if end and (yield from reader.skip(end)):
                break
            if separator:
                yield from reader.skip(separator)
                yield from reader.space()
            if not (yield from reader.begins(first)):
                break
            more = yield from self._call(f.before_name, "")
        if reader.ends_within([end, separator, first]):
            reader.rest()

    def _call(self, before: str, raw: str, name: str = "") -> Waiting[bool]:
        """Read one call; return whether more may follow.

        Args:
            before: the piece before its name.
            raw: text before it that becomes content with the call if it is malformed.
            name: of the tool; empty if it is read.
        """
        f, reader, num_calls = self._format, self._reader, self._built.num_calls
        self._name, self._held = "", []
        reader.raw, is_refused = [raw], False
        try:
            yield from reader.piece(before)
            if not name:
                yield from reader.space()
                name = yield from reader.run(_NAME)
                yield from reader.next()
                if name not in self._tools:
                    raise Malformed
                yield from reader.piece(f.after_name)
            self._name = name
            self._argument("")
            if f.notation == "tagged":
                yield from self._tagged(self._tools[name])
            else:
                yield from reader.object(STRING_MARK if f.notation == "gemma" else '"', self._argument)
                if not self._releases:
                    strict_json("".join(self._held))
        except Ended:
            reader.rest()
            is_refused = not self._is_cut or not (self._name or f.trigger)  # text that only begins like a call
        except (Malformed, ValueError, RecursionError):
            is_refused = True
        else:
            self._flush()
            reader.raw = None
            yield from self._tail()
            return True
        text, reader.raw = "".join(reader.raw), None
        is_refused = is_refused and self._built.num_calls == num_calls
        if is_refused and self._in_reasoning:  # which may end within what was read as the call
            begin, _, _ = Markers(markers(f.reasoning_end)).find(text, len(raw), True)
            self._built.write(ReasoningDelta, text[:begin])
            reader.unread(text[begin:])
        elif is_refused:
            self._built.write_apart(text)
        elif self._name:
            self._flush()
        return False

    def _tail(self) -> Waiting[None]:
        """Read the end of a call, as far as it is there: the call is complete without it."""
        piece = self._format.after_arguments
        for part in [piece, piece.strip()[-1]] if ID in piece else piece.split():  # an id may be missing
            try:
                yield from self._reader.piece(part)
            except Ended:
                self._reader.rest()
            except Malformed:
                pass

    def _tagged(self, tool: Tool) -> Waiting[None]:
        """Read arguments of notation "tagged"."""
        reader, f, comma = self._reader, self._format, ""
        after_key, _, rest = f.after_key.strip().partition("\n")  # any white space may stand there
        after_keys, after_values = Markers([after_key]), Markers([f.after_value.strip()])
        space_before = f.after_key[len(f.after_key.rstrip()) :]  # a value is without the white space of the pieces
        space_after = f.after_value[: -len(f.after_value.lstrip())]
        self._argument("{")
        while True:
            yield from reader.space()
            yield from reader.next()
            if not (yield from reader.skip(f.before_key.strip())):
                break
            key = (yield from reader.text(after_keys)).strip()
            yield from reader.piece(rest)
            value = yield from reader.text(after_values)
            section = _CDATA.fullmatch(value)
            value = section[1] if section else value.removeprefix(space_before).removesuffix(space_after)
            self._argument(f"{comma}{quoted(key)}: {to_json(value, types_of(tool.parameters, key))}")
            comma = ", "
        ends = f.after_arguments.split()
        if ends and not (yield from reader.begins(ends[0])):
            raise Ended if reader.ends_within([f.before_key.strip(), ends[0]]) else Malformed
        self._argument("}")

    def _argument(self, text: str) -> None:
        self._held.append(text)
        if self._releases:
            self._flush()

    def _flush(self) -> None:
        """Release the call, or what is held of its arguments."""
        if self._name:
            if self._in_reasoning:
                self._built.begin()
            self._built.call(self._name)
            self._name, self._in_reasoning = "", False
        self._built.add_arguments("".join(self._held))
        self._held = []


@cache
def _header_pattern() -> Any:
    """Return the header of a message of gpt-oss, whose parts stand in any order."""
    import regex  # here: most models have none

    fields = r"<\|start\|>assistant|<\|channel\|>(?P<channel>\w+)|to=(?P<recipient>[^\s<]+)"
    return regex.compile(rf"\s*(?:(?:{fields}|<\|constrain\|>\w+|json|code)\s*)*<\|message\|>")
