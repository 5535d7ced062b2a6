"""Response templates: how to read a model's answers, by the description that comes with its tokenizer.

tokenizer_config.json may have `response_template`, which transformers (5.13 and later) executes as `parse_response`:
docs/chat.md lists its keys and limits, and what differs. The rules are those of transformers' utils/chat_parsing
(Apache License 2.0): where several markers match, the first counts, of those the longest, of those one that opens. A
template is data from an untrusted file: `compile_pattern` limits the memory of its patterns, and CPU_SEC their time.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from nanoinfer.errors import NanoinferError, show
from nanoinfer.inputs.answers.format import STRING_MARK
from nanoinfer.inputs.answers.reader import MessageBuilder, to_json, whole_object
from nanoinfer.inputs.messages import Tool
from nanoinfer.outputs import AnswerDelta, ChatMessage, ContentDelta, ReasoningDelta
from nanoinfer.structured.schemas import types_of

log = logging.getLogger("nanoinfer")

MAX_CHARS = 1 << 16  # of a template as JSON; those of today have up to 2,000
MAX_LITERAL, MAX_PATTERN = 256, 512  # characters
MAX_EXPANDED = 1 << 18  # characters of a pattern: `regex` compiles a+ to aa* and a{9} to aaaaaaaaa, 200 bytes each
MAX_VALUES = 64  # of the shape of a value; those of today have 5
CONTEXT = 64  # characters before the searched text, which ^, \\b and lookbehinds read
CPU_SEC = 1.0
"""For one piece of an answer."""
TEXTS = {"content": ContentDelta} | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), ReasoningDelta)
CALLS = "tool_calls"
_KEYS = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
_FIELD_KEYS = (
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
)  # fmt: skip
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_REFUSED = re.compile(r"\(\?(?:[\w-]*x|R|[+-]?\d|P?&|P>)")  # white space in patterns, which hides numbers; recursion


class Marker(NamedTuple):
    """A compiled pattern, or several literal strings."""

    pattern: Any
    can_grow: bool
    """Whether a match at the end of a text may become longer."""

    def search(self, text: str, start: int, end: bool, deadline: float) -> tuple[Any, int]:
        """Return the first match if it is final, and where the text begins that may become a match."""
        match = self.pattern.search(text, start, partial=not end, timeout=time_left(deadline))
        if match is None:
            return None, len(text)
        if not end and (match.partial or (match.end() == len(text) and (self.can_grow or not match[0]))):
            return None, match.start()
        return match, len(text)


class ResponseTemplate:
    """A response template: the object in tokenizer_config.json. Thread-safe.

    Raises NanoinferError: it is malformed, or a pattern is not one of `regex`, or is too large.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        _check_keys("response_template", spec, _KEYS)
        if len(text := json.dumps(spec)) > MAX_CHARS:
            raise NanoinferError(f"response_template has more than {MAX_CHARS} characters of JSON")
        if spec.get("version", 1) != 1:
            raise NanoinferError(f"response_template.version={show(spec['version'])} is unknown: only 1 is")
        if (anchor := _to_marker("response_template", spec, "start_anchor")) is None:
            raise NanoinferError("response_template has neither start_anchor nor start_anchor_pattern")
        if not isinstance(fields := spec.get("fields"), dict) or not fields:
            raise NanoinferError(f"response_template.fields={show(fields)} is not an object with fields")
        self.fields: dict[str, dict[str, Any]] = fields
        self.has_patterns = '_pattern": ' in text
        """Whether a piece of an answer may take up to CPU_SEC."""
        self.anchor = anchor
        self._opens: dict[str, Marker] = {}
        self._closes: dict[str, Marker] = {}
        for name, field in fields.items():
            _check_field(name, field)
            for markers, key in ((self._opens, "open"), (self._closes, "close")):
                if (marker := _to_marker(f"response_template.fields.{name}", field, key)) is not None:
                    markers[name] = marker
        implicit = [name for name in fields if name not in self._opens]
        if len(implicit) > 1:
            raise NanoinferError(f"response_template.fields: {show(implicit)} have no open, which only one may have")
        self.implicit = implicit[0] if implicit else None
        """The field of text that no other field has."""

    def find(self, field: str | None, text: str, start: int, end: bool, deadline: float) -> tuple[Any, str | None, int]:
        """Search the next marker from a place of the text. Args: end: whether the text is the whole answer.

        Returns: its match or None; the field that it opens (None: it closes `field`); where text begins that may become
        a marker. Raises TimeoutError as `time_left`.
        """
        watched = [*self._opens.items()] if field == self.implicit else []
        if field in self._closes:
            watched.append(("", self._closes[field]))
        searched = [(opened, *marker.search(text, start, end, deadline)) for opened, marker in watched]
        held = min((begin for _, _, begin in searched), default=len(text))
        # the first, the longest, one that opens
        matches = [(m.start(), -m.end(), not opened, opened, m) for opened, m, _ in searched if m is not None]
        first = min(matches, key=lambda one: one[:4], default=None)
        if first is None or first[0] >= held:  # also at the end: the reference takes no empty match there
            return None, None, held
        return first[4], first[3] or None, held

    def calls(
        self, body: str, captures: dict[str, str], tools: Mapping[str, Tool], deadline: float
    ) -> list[tuple[str, str]]:
        """Return names and arguments of the calls in a text.

        Raises TimeoutError; any other exception: the text is not of the field's form, or a tool is unknown.
        """
        field, calls = self.fields[CALLS], []
        value = _PARSERS[field.get("content", "text")](body, field.get("content_args") or {}, deadline)
        if (shape := field.get("transform")) is not None and field.get("transform_each"):
            value = [_transform(shape, {**captures, **item}) for item in value]
        elif shape is not None:
            value = _transform(shape, {**captures, "content": value})
        for item in value if isinstance(value, list) else [value]:
            name, arguments = item["function"]["name"], item["function"].get("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            parameters = tools[name].parameters
            for key, argument in arguments.items():
                types = types_of(parameters, key)
                if types is not None and isinstance(argument, str):
                    arguments[key] = json.loads(to_json(argument, types))
            calls.append((name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        return calls


def time_left(deadline: float) -> float:
    """Return the seconds of this thread's CPU time until a deadline. Raises TimeoutError if there are none."""
    if (left := deadline - time.thread_time()) <= 0:
        raise TimeoutError
    return left


def compile_pattern(where: str, pattern: Any) -> Any:
    """Compile a pattern. Raises NanoinferError: it is not one, or its compilation may take too much memory."""
    import regex  # here: most models have no response template

    _check_text(where, pattern, MAX_PATTERN)
    if _REFUSED.search(pattern):
        raise NanoinferError(f"{where}={pattern!r} is recursive or has the flag x, which are not supported")
    counts = re.findall(r"[0-9]+", " ".join(re.findall(r"\{([^{}]*)", pattern)))
    if len(pattern) * math.prod(int(count) + 1 for count in counts) << pattern.count("+") > MAX_EXPANDED:
        raise NanoinferError(f"{where}={pattern!r} is too large: it has too many + or too large numbers in braces")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except Exception as e:  # regex.error, and others for some malformed patterns
        raise NanoinferError(f"{where}={pattern!r}: {e}") from None


def _to_marker(where: str, spec: Mapping[str, Any], key: str) -> Marker | None:
    """Compile the string, list of strings or pattern of a key; return None if there is none."""
    import regex

    texts, pattern = spec.get(key), spec.get(f"{key}_pattern")
    if pattern is not None:
        return Marker(compile_pattern(f"{where}.{key}_pattern", pattern), True)
    literals = texts if isinstance(texts, list) and texts else [] if texts is None else [texts]
    for text in literals:
        _check_text(f"{where}.{key}", text, MAX_LITERAL)
    literals = sorted(set(literals), reverse=True)  # the longest first, of those that begin alike
    can_grow = any(longer.startswith(shorter) for longer, shorter in pairwise(literals))
    return Marker(regex.compile("|".join(map(regex.escape, literals))), can_grow) if literals else None


def _check_text(where: str, text: Any, limit: int) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= limit:
        raise NanoinferError(f"{where}={show(text)} is not a text of 1 to {limit} characters")


def _check_field(name: str, field: Any) -> None:
    where = f"response_template.fields.{name}"
    _check_keys(where, field, _FIELD_KEYS)
    content = field.get("content", "text")
    if not isinstance(content, str) or content not in _PARSERS:
        raise NanoinferError(f"{where}.content={show(content)} is none of {', '.join(_PARSERS)}")
    if name in TEXTS and (content != "text" or field.get("transform") is not None):
        raise NanoinferError(f"{where} is a value: only {CALLS} may be one, {name} is text")
    for key, kind in (("content_args", dict), ("join", str)):
        if not isinstance(value := field.get(key), (kind, type(None))):
            raise NanoinferError(f"{where}.{key}={show(value)} is not of the type {kind.__name__}")
    if len(re.findall(r"[,{\[]", json.dumps(field.get("transform")))) > MAX_VALUES:  # each may be the whole text
        raise NanoinferError(f"{where}.transform has more than {MAX_VALUES} values")


def _check_keys(where: str, value: Any, keys: Sequence[str]) -> None:
    if not isinstance(value, dict):
        raise NanoinferError(f"{where}={show(value)} is not an object")
    if unknown := [key for key in value if key not in keys]:
        raise NanoinferError(f"{where} has the unknown key {show(unknown[0])}")


def _transform(shape: Any, scope: dict[str, Any]) -> Any:
    """Return a shape with values for placeholders: {"a": "{content.b}"} with {"content": {"b": 1}} -> {"a": 1}."""
    if isinstance(shape, dict):
        return {key: _transform(value, scope) for key, value in shape.items()}
    if isinstance(shape, list):
        return [_transform(value, scope) for value in shape]
    whole = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    value: Any = scope if whole else shape
    for key in whole[1].split(".") if whole else ():
        value = value[key]
    return value


def _json(text: str, args: dict[str, Any], deadline: float = 0.0) -> Any:
    """Parse JSON, or the dialect of Gemma 4."""
    work = text
    if args.get("string_delims") == [[STRING_MARK] * 2] and args.get("unquoted_keys"):
        work = whole_object(text, STRING_MARK)
    try:
        return json.loads(work)
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _xml_inline(text: str, args: dict[str, Any], deadline: float) -> dict[str, Any]:
    values: dict[str, Any] = {}
    parser = args.get("value_parser", {})
    for m in compile_pattern("tag_pattern", args["tag_pattern"]).finditer(text, timeout=time_left(deadline)):
        spans = m.spans("key") + m.spans("value")
        if any(start < m.start() or stop > m.end() for start, stop in spans):  # each could be the whole text
            raise ValueError
        read = _PARSERS[parser.get("name", "text")]
        values[m["key"]] = read(m["value"], parser.get("args", {}), deadline) if parser else m["value"]
    return values


# Each returns the value of a text; it raises ValueError and others if the text is not of its form.
_PARSERS: dict[str, Callable[[str, dict[str, Any], float], Any]] = {
    "text": lambda text, args, _: text.strip() if args.get("strip", True) else text,
    "json": _json,
    "xml-inline": _xml_inline,
}


class ResponseTemplateParser:
    """Reads one answer, as `AnswerParser` does. Args: tools: that the model may call; prompt: text of the prompt."""

    def __init__(self, template: ResponseTemplate, tools: Sequence[Tool] = (), *, prompt: str = "") -> None:
        self._template, self._tools = template, {tool.name: tool for tool in tools}
        self._buffer, self._place = "", 0  # text from `_place` on may become a marker; before it are CONTEXT characters
        self._field, self._is_open = template.implicit, False
        self._marker, self._body, self._captures = "", [""], dict[str, str]()  # of the field
        self._failed = False  # then the rest is content
        self._built = MessageBuilder()
        try:
            ends = [m.end() for m in template.anchor.pattern.finditer(prompt, timeout=CPU_SEC)]
            self.feed(prompt[ends[-1] if ends else 0 :])
        except (TimeoutError, MemoryError) as e:
            self._fail(e)
        self._built.forget()  # what the prompt has of the answer

    def finish(self, is_cut: bool = True) -> list[AnswerDelta]:
        """End the answer; return what was held back. Args: is_cut: without an effect, templates are not told."""
        return self.feed("", end=True)

    def message(self) -> ChatMessage:
        """Return the message so far; after `finish`, the whole one."""
        return self._built.message()

    def feed(self, text: str, end: bool = False) -> list[AnswerDelta]:
        """Add text; return what it completes. Args: end: the answer ends here."""
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
        reason = f"it needs more than {CPU_SEC} s of CPU time" if isinstance(error, TimeoutError) else error
        log.warning("the response template cannot be executed: %s: the rest of the answer is content", reason)
        self._failed = True
        self._built.add(ContentDelta, (self._marker if self._field == CALLS else "") + "".join(self._body))

    def _scan(self, end: bool) -> None:
        """Find the markers in the text from `_place` on, and set `_place` after what is read. Raises as `find`."""
        self._deadline = time.thread_time() + CPU_SEC  # also of markers that match the empty string for ever
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
        if end and self._is_open:
            self._close("")

    def _open(self, field: str, marker: str, captures: dict[str, str]) -> None:
        self._field, self._is_open, self._marker, self._body, self._captures = field, True, marker, [], captures
        self._built.begin()

    def _add(self, field: str, text: str) -> None:
        """Release text of a field, white space only between other text if it is stripped; keep that of calls."""
        spec = self._template.fields[field]
        if field == CALLS:
            self._body.append(text)
        elif field in TEXTS:
            strips, join = (spec.get("content_args") or {}).get("strip", True), spec.get("join")
            self._built.write(TEXTS[field], text, join="\n" if join is None else join, strips=strips)

    def _close(self, marker: str) -> None:
        field, body = self._field, "".join(self._body)
        if field == CALLS:
            try:
                for call in self._template.calls(body, self._captures, self._tools, self._deadline):
                    self._built.call(*call)
            except (TimeoutError, MemoryError):
                raise
            except Exception:  # another form, or tool
                if marker:  # else the answer ends in the call
                    self._built.begin()
                    self._built.write(ContentDelta, self._marker + body + marker)
        self._field, self._is_open, self._body = self._template.implicit, False, []
