"""Read a model's answer, in pieces or as a whole: its reasoning, content and tool calls.

Text is released as soon as it can no longer be part of a marker. White space beside a marker belongs to the marker.
Arguments become JSON text, whatever the model's notation. The result does not depend on how the text was cut.

    truncated answer   what is there: a call whose name is complete has the arguments so far, a prefix of JSON text. The
                       beginning of a call without its name is left out
    malformed call     (bad JSON, a name that is not a tool's, text between parameters, an answer that the model ended
                       within the call) it becomes content, as it was written, or reasoning within reasoning
    call in reasoning  ends the reasoning
    reasoning marker   within content, where no call or other marker stands directly before it, is content: the model
                       writes about markers. One that is a special token is a marker anywhere

So that a malformed call can become content, the arguments of a call are released when they are complete. Those of
answers that a grammar constrains cannot be malformed: with `constrained=True` they are released as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import partial

from nanoinfer.inputs.answers.format import PLACEHOLDER, AnswerFormat
from nanoinfer.inputs.answers.reader import Ended, Malformed, Markers, MessageBuilder, Reader, Values, Waiting, to_json
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import AnswerDelta, ChatMessage, ContentDelta, ReasoningDelta
from nanoinfer.structured.schemas import types_of

_NAME = re.compile(r"[\w.-]+")
_ARGUMENT_KEYS = ("arguments", "parameters")
_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>")
_MESSAGE_ENDS = Markers(("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"))
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.S)
_WORD = re.compile(r"[^\s<]+")


class _Repeated(Exception):
    """A call ends the answer."""


class AnswerParser:
    """Reads one answer.

    Args:
        format: of the model.
        tools: that the model may call. Without any, the text of a call is content.
        starts_in_reasoning: whether the prompt has opened the reasoning (`AnswerFormat.reasoning_of`).
        constrained: whether a grammar constrains the answer (grammar.py).
        special_tokens: of the tokenizer.
        ends_repeated: whether a call with the name and the arguments of an earlier one ends the answer. It is left out.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Sequence[Tool] = (),
        *,
        starts_in_reasoning: bool = False,
        constrained: bool = False,
        special_tokens: Collection[str] = (),
        ends_repeated: bool = False,
    ) -> None:
        self._format, self._tools, self._constrained = format, {tool.name: tool for tool in tools}, constrained
        self._special_tokens = tuple(special_tokens)
        self._reader, self._built = Reader(), MessageBuilder()
        self._reasoning_ends = Markers(format.markers("reasoning_end"))
        self._reader.feed(format.opened)
        self._name: str | None = None  # of a call that is not released yet; empty: it is
        self._held: list[str] = []  # of its arguments
        self._releases = constrained  # arguments as they arrive
        self._in_reasoning, self._is_cut = starts_in_reasoning, True
        self._ends_repeated, self.has_repeated = ends_repeated, False
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
            except (StopIteration, _Repeated):
                self._running = None
        return self._built.take()

    def _run(self) -> Waiting[None]:
        f, built = self._format, self._built
        calls = bool(self._tools) and f.has_calls
        triggers = {*f.markers("trigger"), *_inner_trigger(f)} if calls else set()
        starts, ends = f.markers("reasoning_start"), f.markers("reasoning_end")
        spoken = {text for text in starts | ends if not text.startswith(self._special_tokens)}
        dropped = f.markers("content_start", "content_end", "ignored") | ends
        in_content, in_reasoning = Markers({*triggers, *starts, *dropped}), Markers({*triggers, *ends})
        bare = calls and not f.trigger
        if bare and not self._in_reasoning:
            yield from self._bare_call()
        while True:
            kind, watched = (ReasoningDelta, in_reasoning) if self._in_reasoning else (ContentDelta, in_content)
            found = yield from self._reader.until(watched, partial(built.write, kind), True)
            if found is None:
                return built.end(kind)
            if found in spoken and not self._in_reasoning and not built.blank:
                built.write(ContentDelta, found)
                continue
            if found in triggers:
                if not self._in_reasoning:
                    built.begin()
                self._releases = self._constrained and found in f.markers("trigger")
                yield from self._section(found)
                continue
            built.begin()
            self._in_reasoning = not self._in_reasoning and found in starts
            if bare and not self._in_reasoning and found in dropped:
                yield from self._bare_call()

    def _messages(self) -> Waiting[None]:
        """Read messages with headers, as gpt-oss writes them."""
        built, mark, in_body = self._built, "", self._in_reasoning
        while True:
            if not in_body:
                yield from self._header(mark)
            kind = ReasoningDelta if self._in_reasoning else ContentDelta
            found = yield from self._reader.until(_MESSAGE_ENDS, partial(built.write, kind), True)
            if found is None:
                return built.end(kind)
            built.begin()
            mark, in_body = found, False

    def _header(self, mark: str) -> Waiting[None]:
        """Read a header, if there is one, and the call that it begins. Args: mark: that ended the message before."""
        reader, field = self._reader, mark if mark in _HEADER else ""
        fields, reader.raw, self._in_reasoning = dict.fromkeys(filter(None, [field]), ""), [field], False
        while field != "<|message|>":
            yield from reader.space()
            for text in ("<|message|>", *_HEADER, "to="):
                if (yield from reader.skip(text)):
                    field, fields[text] = text, ""
                    break
            else:  # the value of a field, or a type without its marker
                word = (yield from reader.run(_WORD)) if field or "json" not in fields else ""
                if not word or not fields:
                    break
                fields[field or "json"] = word
                field = ""
        recipient = fields.get("to=", "")
        name = recipient.removeprefix("functions.")
        raw, reader.raw = "".join(reader.raw), None
        if field != "<|message|>":
            if reader.ends_within(("<|message|>", *_HEADER)) and fields.keys() & _HEADER:
                reader.rest()  # the header is not complete
            else:
                self._built.write(ContentDelta, raw)
        elif name in self._tools:
            yield from self._call("", raw, name)
        elif recipient not in ("", "assistant", "user", "all"):
            self._built.write_apart(raw)
        else:
            self._built.begin()
            self._in_reasoning = fields.get("<|channel|>") == "analysis"

    def _bare_call(self) -> Waiting[None]:
        """Read calls that begin without a marker, if any."""
        f, reader = self._format, self._reader
        space = yield from reader.space()
        if (yield from reader.peek()) == (f.calls_start + f.before_name).strip()[:1]:
            yield from self._section("", space)
        else:
            self._built.write(ContentDelta, space)

    def _section(self, trigger: str, space: str = "") -> Waiting[None]:
        """Read calls after their trigger."""
        f, reader = self._format, self._reader
        head = f.before_name.partition("{")[0] if f.name_key else f.before_name  # before the name, or the object
        if (f.calls_start + f.before_name).strip().startswith(trigger):
            before = (f.calls_start + head).strip()[len(trigger) :]
        else:
            before = f.calls_start + head if f.name_key and f.trigger != trigger else ""
        separator, end = f.separator.strip(), f.calls_end.strip()
        first = (PLACEHOLDER.split(head)[0].split() or ["{" if f.name_key else ""])[0]
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

    def _call(self, before: str, raw: str, name: str = "") -> Waiting[bool]:
        """Read one call; return whether more may follow.

        Args:
            before: the piece before its name or its object.
            raw: text before it that becomes content with the call if it is malformed.
            name: of the tool; empty if it is read.
        """
        reader, num_calls = self._reader, self._built.num_calls
        self._forget()
        reader.raw, refused = [raw], False
        try:
            yield from reader.piece(before)
            yield from self._object() if self._format.name_key else self._pieces(name)
        except Ended:
            reader.rest()
            refused = self._name is None and not self._format.trigger  # text that only begins like a call
            refused = refused or (not self._is_cut and self._built.num_calls == num_calls)
        except Malformed:
            refused = self._built.num_calls == num_calls
        else:
            self.has_repeated = self._ends_repeated and self._repeats(whole=True)
            if self.has_repeated:
                raise _Repeated
            self._flush()
            reader.raw = None
            yield from self._tail()
            return True
        text, reader.raw = "".join(reader.raw), None
        if refused and self._in_reasoning:  # which may end within what was read as the call
            begin, _, _ = self._reasoning_ends.find(text, len(raw), True)
            self._built.write(ReasoningDelta, text[:begin])
            reader.unread(text[begin:])
        elif refused:
            self._built.write_apart(text)
        elif self._name is not None:
            self._flush()
        return False

    def _tail(self) -> Waiting[None]:
        """Read the end of a call, as far as it is there: the call is complete without it."""
        piece = self._format.after_arguments
        piece = piece.partition("}")[2] if self._format.name_key else piece
        for part in [piece] if PLACEHOLDER.search(piece) else piece.split():
            try:
                yield from self._reader.piece(part)
            except Ended:
                self._reader.rest()
            except Malformed:
                pass

    def _object(self) -> Waiting[None]:
        """Read a call that is a JSON object, with its keys in any order."""
        reader, f = self._reader, self._format
        yield from reader.expect("{")
        values, has_arguments = Values(reader, f.notation, self._argument), False
        while (found := (yield from reader.next())) != "}":
            if found == ",":
                reader.take(1)
                continue
            key = yield from values.text()
            yield from reader.expect(":")
            if key == f.name_key and self._name is None:
                if (yield from reader.next()) not in "\"'":
                    raise Malformed
                self._named((yield from values.text()))
            elif key in (f.arguments_key, *_ARGUMENT_KEYS) and not has_arguments:
                has_arguments = True
                yield from values.arguments()
            elif f.trigger or key in ("id", "type"):
                yield from Values(reader, "json", lambda _: None).value()
            else:  # an answer in JSON
                raise Malformed
        reader.take(1)
        if self._name is None:
            raise Malformed
        if not has_arguments:
            self._argument("{}")

    def _pieces(self, name: str) -> Waiting[None]:
        """Read a call whose name is not in JSON, after the piece before the name. Args: name: if it is known."""
        reader, f = self._reader, self._format
        if not name:
            yield from reader.space()
            name = yield from reader.run(_NAME)
            yield from reader.next()
            if name not in self._tools:
                raise Malformed
            yield from reader.piece(f.after_name)
        self._named(name)
        if f.notation == "tagged":
            yield from self._tagged(self._tools[name])
        else:
            yield from Values(reader, f.notation, self._argument).arguments()

    def _tagged(self, tool: Tool) -> Waiting[None]:
        reader, f = self._reader, self._format
        before_key, comma = f.before_key.strip(), ""
        _, _, rest = f.after_key.strip().partition("\n")  # any white space may stand there
        after_key = Markers(text.removesuffix(rest).strip() for text in f.markers("after_key"))
        after_value = Markers(f.markers("after_value"))
        space_before = f.after_key[len(f.after_key.rstrip()) :]  # a value is without the white space of the pieces
        space_after = f.after_value[: -len(f.after_value.lstrip())]
        others = [before_key + key + f.after_key.strip() for key in tool.parameters.get("properties", ())]
        self._argument("{")
        while (yield from reader.next()) and (yield from reader.skip(before_key)):
            key = (yield from reader.text(after_key)).strip()
            yield from reader.piece(rest)
            value = yield from reader.text(after_value)
            while f.cdata and not self._releases and "]]>" not in value and value.lstrip().startswith("<![CDATA["):
                value += f.after_value.strip() + (yield from reader.text(after_value))
            if not self._releases and any(other in value for other in others):  # its end is missing
                raise Malformed
            if f.cdata and (section := _CDATA.fullmatch(value)) is not None:
                value = section[1]
            value = value.removeprefix(space_before).removesuffix(space_after)
            made = to_json(value, types_of(tool.parameters, key))
            self._argument(f"{comma}{json.dumps(key, ensure_ascii=False)}: {made}")
            comma = ", "
        ends = f.after_arguments.split()
        if ends and not (yield from reader.begins(*ends)):
            raise Ended if reader.ends_within([before_key, *ends]) else Malformed
        self._argument("}")

    def _forget(self) -> None:
        self._name, self._held = None, []

    def _named(self, name: str) -> None:
        if name not in self._tools:
            raise Malformed
        self._name = name
        self._argument("")

    def _argument(self, text: str) -> None:
        self._held.append(text)
        if self._releases and self._name is not None and not (self._ends_repeated and self._repeats(whole=False)):
            self._flush()

    def _repeats(self, whole: bool) -> bool:
        """Return whether the call that is held is an earlier one. Args: whole: False: whether it may become one."""
        name, text = self._name, "".join(self._held)
        calls = [call.arguments for call in self._built.message().tool_calls if call.name == name]
        return text in calls if whole else any(call.startswith(text) for call in calls)

    def _flush(self) -> None:
        """Release the call, or what is held of its arguments."""
        if self._name:
            if self._in_reasoning:
                self._built.begin()
            self._built.call(self._name)
            self._name, self._in_reasoning = "", False
        self._built.add_arguments("".join(self._held))
        self._held = []


def _inner_trigger(f: AnswerFormat) -> set[str]:
    """Return the last tag before a name, with which models begin a call when they leave out those before it."""
    tag = "" if f.name_key else f.before_name.strip().rpartition("\n")[2]
    return {tag} if tag[:1] in "<[" and len(tag) > 3 and not tag.startswith(f.trigger) else set()
