"""Read a model's answer, in pieces or as a whole: its reasoning, content and tool calls.

Text is released as soon as it can no longer be part of a marker. White space beside a marker belongs to the marker.
Arguments become JSON text, whatever the model's notation. The result does not depend on how the text was cut.

    truncated answer   what is there: a call whose name is complete has the arguments so far, a prefix of JSON text. The
                       beginning of a call without its name is left out
    malformed call     (bad JSON, a name that is not a tool's) it becomes content, as it was written

So that a malformed call can become content, the arguments of a call are released when they are complete. Those of
answers that a grammar constrains cannot be malformed: with `constrained=True` they are released as they arrive.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence

from nanoinfer.inputs.answers.format import AnswerFormat
from nanoinfer.inputs.answers.reader import Ended, Malformed, Markers, Reader, Values, Waiting
from nanoinfer.inputs.answers.schema_types import to_json, types_of
from nanoinfer.inputs.tools import Tool
from nanoinfer.outputs import AnswerDelta, CallDelta, ChatMessage, ContentDelta, ReasoningDelta, ToolCall

_NAME = re.compile(r"[\w.-]+")
_ARGUMENT_KEYS = ("arguments", "parameters")


class AnswerParser:
    """Reads one answer.

    Args:
        format: of the model.
        tools: that the model may call. Without any, the text of a call is content.
        starts_in_reasoning: whether the prompt has opened the reasoning (`AnswerFormat.reasoning_of`).
        constrained: whether a grammar constrains the answer (grammar.py).
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Sequence[Tool] = (),
        *,
        starts_in_reasoning: bool = False,
        constrained: bool = False,
    ) -> None:
        self._format, self._tools, self._constrained = format, {tool.name: tool for tool in tools}, constrained
        self._reader = Reader()
        self._reader.feed(format.opened)
        self._deltas: list[AnswerDelta] = []
        self._texts: dict[type[ContentDelta | ReasoningDelta], list[str]] = {ContentDelta: [], ReasoningDelta: []}
        self._calls: list[tuple[str, str, list[str]]] = []
        self._space, self._blank, self._joins = "", True, False
        self._name: str | None = None
        self._held: list[str] = []
        self._running: Waiting[None] | None = self._run(starts_in_reasoning)

    def feed(self, text: str) -> list[AnswerDelta]:
        """Add text; return what it completes."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[AnswerDelta]:
        """End the answer; return what was held back."""
        self._reader.closed = True
        return self._advance()

    def message(self) -> ChatMessage:
        """Return the message so far; after `finish`, the whole one."""
        content, reasoning = ("".join(self._texts[kind]) for kind in (ContentDelta, ReasoningDelta))
        calls = tuple(ToolCall(id, name, "".join(arguments)) for id, name, arguments in self._calls)
        return ChatMessage(content or (None if calls else ""), reasoning or None, calls)

    def _advance(self) -> list[AnswerDelta]:
        self._deltas = []
        if self._running is not None:
            try:
                next(self._running)
            except StopIteration:
                self._running = None
        return self._deltas

    def _run(self, in_reasoning: bool) -> Waiting[None]:
        f = self._format
        triggers = set(f.spellings("trigger") if self._tools and f.has_calls else ())
        starts, ends = f.spellings("reasoning_start"), f.spellings("reasoning_end")
        dropped = {*f.spellings("content_start"), *f.spellings("content_end"), *f.ignored, *ends}
        in_content = Markers(text.strip() for text in {*triggers, *starts, *dropped})
        in_reasoning_markers = Markers(text.strip() for text in ends)
        triggers, begins = {text.strip() for text in triggers}, {text.strip() for text in starts}
        if self._tools and f.has_calls and not f.trigger and not in_reasoning:
            yield from self._bare_call()
        while True:
            if in_reasoning:
                marker = yield from self._reader.until(in_reasoning_markers, self._emit_reasoning, True)
            else:
                marker = yield from self._reader.until(in_content, self._emit_content, True)
            if marker is None:
                self._end_text(ReasoningDelta if in_reasoning else ContentDelta)
                return
            if marker in begins and not in_reasoning and not self._blank:
                self._emit_content(marker)  # a model that writes about markers
                continue
            self._begin_text()
            in_reasoning = not in_reasoning and marker in begins
            if marker in triggers and not in_reasoning:
                yield from self._section(marker)
            elif not in_reasoning and self._tools and f.has_calls and not f.trigger and marker in dropped:
                yield from self._bare_call()

    # Text -----------------------------------------------------------------------------------------------------

    def _emit_content(self, text: str) -> None:
        self._emit_text(ContentDelta, text)

    def _emit_reasoning(self, text: str) -> None:
        self._emit_text(ReasoningDelta, text)

    def _emit_text(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        """Release text, but white space at its end only when more follows, and none at the beginning after a marker."""
        kept = text.rstrip()
        if not kept:
            self._space += text
            return
        if not (self._blank and self._joins):
            kept = self._space + kept
        else:
            kept = ("\n" if self._texts[kind] else "") + kept.lstrip()
        self._space, self._blank = text[len(text.rstrip()) :], False
        self._release(kind, kept)

    def _release(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        self._texts[kind].append(text)
        if self._deltas and isinstance(last := self._deltas[-1], kind):
            self._deltas[-1] = kind(last.text + text)
        else:
            self._deltas.append(kind(text))

    def _begin_text(self) -> None:
        """Leave out white space before a marker, and after it."""
        self._space, self._blank, self._joins = "", True, True

    def _end_text(self, kind: type[ContentDelta | ReasoningDelta]) -> None:
        if self._space and not (self._blank and self._joins):
            self._release(kind, self._space)

    # Calls ----------------------------------------------------------------------------------------------------

    def _bare_call(self) -> Waiting[None]:
        """Read calls that begin without a marker, if any."""
        f = self._format
        self._reader.raw = []
        yield from self._reader.space()
        space, self._reader.raw = "".join(self._reader.raw), None
        if (yield from self._reader.peek()) == (f.calls_start + f.before_name).strip()[:1]:
            yield from self._section("", space)
        else:
            self._space += space

    def _section(self, trigger: str, space: str = "") -> Waiting[None]:
        """Read calls after their trigger."""
        f, reader = self._format, self._reader
        opening, head = f.calls_start + f.before_name, _head(f)
        if opening.strip().startswith(trigger):
            before = (f.calls_start + head).strip()[len(trigger) :]
        else:
            before = f.calls_start + head if f.name_key and f.trigger != trigger else ""
        separator, end = f.separator.strip(), f.calls_end.strip()
        first = (head.split() or ["{" if f.name_key else ""])[0]
        more = yield from self._call(before, space + trigger)
        while more:
            yield from reader.space()
            if end and (yield from reader.skip(end)):
                break
            separated = bool(separator) and (yield from reader.skip(separator))
            yield from reader.space()
            own_trigger = f.trigger and not f.calls_start  # then it is found in the text
            if own_trigger or not ((yield from reader.begins(first)) if first else separated):
                break
            more = yield from self._call(head, "")
        if reader.ends_within([end, separator, first]):
            reader.rest()

    def _call(self, before: str, raw: str) -> Waiting[bool]:
        """Read one call; return whether more may follow.

        Args:
            before: the piece before its name or its object.
            raw: text before it that becomes content with the call if it is malformed.
        """
        reader, opened = self._reader, len(self._calls)
        reader.raw = [raw]
        self._forget()
        try:
            yield from reader.piece(before)
            if self._format.name_key:
                yield from self._object()
            else:
                yield from self._pieces()
            self._flush()
        except Ended:
            reader.rest()
            if self._name is not None:
                self._flush()
            elif not self._format.trigger:  # text that only begins like a call
                self._refuse()
            return False
        except Malformed:
            if len(self._calls) == opened:
                self._refuse()
            return False
        finally:
            reader.raw = None
        yield from self._tail()
        return True

    def _refuse(self) -> None:
        """Make the text of a call content."""
        text = "".join(self._reader.raw or ())
        self._blank, self._joins, self._space = True, False, ""
        self._emit_content(("\n" if self._texts[ContentDelta] else "") + text)

    def _tail(self) -> Waiting[None]:
        """Read the end of a call, as far as it is there."""
        piece = self._format.after_arguments
        if self._format.name_key:
            piece = piece.partition("}")[2]
        try:
            yield from self._reader.piece(piece)
        except Ended:
            self._reader.rest()
        except Malformed:  # the call is complete without it
            pass

    def _object(self) -> Waiting[None]:
        """Read a call that is a JSON object, with its keys in any order."""
        reader, f = self._reader, self._format
        yield from reader.space()
        yield from reader.expect("{")
        values, has_arguments = Values(reader, f.notation, self._argument), False
        while True:
            yield from reader.space()
            if (found := (yield from reader.next())) in "},":
                reader.take(1)
                if found == "}":
                    break
                continue
            key = yield from values.text()
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if key == f.name_key and self._name is None:
                if (yield from reader.next()) != '"':
                    raise Malformed
                self._named((yield from values.text()))
            elif key in (f.arguments_key, *_ARGUMENT_KEYS) and not has_arguments:
                has_arguments = True
                yield from values.arguments()
            elif f.trigger or key in ("id", "type"):
                yield from Values(reader, "json", lambda _: None).value()
            else:  # an answer in JSON
                raise Malformed
        if self._name is None:
            raise Malformed
        if not has_arguments:
            self._argument("{}")

    def _pieces(self) -> Waiting[None]:
        """Read a call whose name is not in JSON, after the piece before the name."""
        reader, f = self._reader, self._format
        yield from reader.space()
        name = yield from reader.run(_NAME)
        yield from reader.next()
        if name not in self._tools:
            raise Malformed
        yield from reader.one_of(f.spellings("after_name"))
        self._named(name)
        if f.notation == "tagged":
            yield from self._tagged(self._tools[name])
        else:
            yield from Values(reader, f.notation, self._argument).arguments()

    def _tagged(self, tool: Tool) -> Waiting[None]:
        reader, f = self._reader, self._format
        first, before = True, f.before_key.strip()
        after_key, end = Markers(text.strip() for text in f.spellings("after_key")), Markers([f.after_value.strip()])
        self._argument("{")
        while True:
            yield from reader.space()
            yield from reader.next()
            if not (yield from reader.skip(before)):
                if reader.ends_within([before]):
                    raise Ended
                break
            parts: list[str] = []
            if (yield from reader.until(after_key, parts.append)) is None:
                raise Ended
            key, parts = "".join(parts).strip(), []
            if (yield from reader.until(end, parts.append)) is None:
                raise Ended
            value = _without("".join(parts), _space_after(f.after_key), _space_before(f.after_value))
            made = json.dumps(key, ensure_ascii=False) + ": " + to_json(value, types_of(tool.parameters, key))
            self._argument(made if first else ", " + made)
            first = False
        self._argument("}")

    # Deltas of calls ------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._name, self._held = None, []

    def _named(self, name: str) -> None:
        if name not in self._tools:
            raise Malformed
        self._name = name
        if self._constrained:
            self._flush()

    def _argument(self, text: str) -> None:
        self._held.append(text)
        if self._constrained and self._name is not None:
            self._flush()

    def _flush(self) -> None:
        """Release the call, or what is held of its arguments."""
        if self._name:
            self._calls.append((f"call_{secrets.token_hex(12)}", self._name, []))
            self._deltas.append(CallDelta(len(self._calls) - 1, *self._calls[-1][:2], ""))
            self._name = ""
        text, self._held = "".join(self._held), []
        if not text:
            return
        self._calls[-1][2].append(text)
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, CallDelta) and last.id is None:
            text, _ = last.arguments + text, self._deltas.pop()
        self._deltas.append(CallDelta(len(self._calls) - 1, None, None, text))


def _head(format: AnswerFormat) -> str:
    """Return what stands before the name of a call, or before its object."""
    return format.before_name.partition("{")[0] if format.name_key else format.before_name


def _space_after(piece: str) -> str:
    return piece[len(piece.rstrip()) :]


def _space_before(piece: str) -> str:
    return piece[: len(piece) - len(piece.lstrip())]


def _without(text: str, prefix: str, suffix: str) -> str:
    """Return a raw value without the white space of the pieces around it."""
    return text.removeprefix(prefix).removesuffix(suffix)
