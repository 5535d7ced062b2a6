"""Response templates: how to read a model's answers, by the description that comes with its tokenizer.

tokenizer_config.json may have `response_template`, which transformers (5.13 and later) executes as `parse_response`:
where the text of each key of the message begins and ends, and what it is. docs/chat.md lists the keys.

An anchor, open and close are a string or a list of strings, or, as start_anchor_pattern and so on, a regular expression
of the package `regex`, in which . matches newlines. Where several match, the first counts, of those the longest, of
those one that opens. The rules are those of transformers' utils/chat_parsing (Apache License 2.0). A template is data
from an untrusted file: `compile_pattern` limits the memory of its patterns, and CPU_SEC their time.

The description does not say which white space a model writes, and in which order the keys of a call, so that no grammar
can be made of it: that comes from the chat template (format.py).

What differs from transformers: a call that is malformed or of an unknown tool becomes content instead of an error; a
call that the answer ends in is left out unless its name is known; text of a field that is there several times without
`join` is joined by newlines, instead of the last one alone; the part of the answer that the prompt has is not part of
the message; a pattern or a value that takes too long ends the reading: the rest is content. Fields other than content,
reasoning and tool_calls are dropped, which is logged. The older `response_schema` is not read: transformers drops it,
too.
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

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.answers.reader import MessageBuilder, to_json
from nanoinfer.inputs.messages import Tool
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.outputs import AnswerDelta, ChatMessage, ContentDelta, ReasoningDelta
from nanoinfer.structured.schemas import types_of
from nanoinfer.utils.checks import show
from nanoinfer.utils.files import escaped

log = logging.getLogger("nanoinfer")

MAX_CHARS = 1 << 16  # of a template as JSON; those of today have up to 2,000
MAX_LITERAL, MAX_PATTERN = 256, 512  # characters
MAX_EXPANDED = 1 << 18  # characters of a pattern: `regex` compiles a+ to aa* and a{9} to aaaaaaaaa, 200 bytes each
MAX_VALUES = 64  # of the shape of a value; those of today have 5
MAX_EMPTY = 10  # empty matches in a row
CONTEXT = 64  # characters before the searched text, which ^, \\b and lookbehinds read
CPU_SEC = 1.0
"""For one piece of an answer."""
PLAIN = ("text", "int", "float", "bool")  # can be shown before they are complete
TEXTS = {"content": ContentDelta} | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), ReasoningDelta)
CALLS = "tool_calls"
_MARKER, _TEXT = (str, list, type(None)), (str, type(None))
_TEMPLATE_TYPES: dict[str, tuple[type, ...]] = {
    "version": (int,), "defaults": (object,), "fields": (dict,), "start_anchor": _MARKER, "start_anchor_pattern": _TEXT
}  # fmt: skip
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "open": _MARKER, "open_pattern": _TEXT, "close": _MARKER, "close_pattern": _TEXT, "content": (str,),
    "content_args": (dict,), "repeats": (bool,), "join": _TEXT, "optional": (object,), "transform": (object,),
    "transform_each": (bool,),
}  # fmt: skip
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_UNQUOTED_KEY = re.compile(r"(?<=[{,])(\w+):")
_SENTINEL = re.compile("\x01(\\d+)\x02")
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
    """A response template. Thread-safe.

    Args:
        spec: the object in tokenizer_config.json.

    Raises:
        NanoinferError: it is malformed, or a pattern is not one of `regex`, or is too large.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        _check_types("response_template", spec, _TEMPLATE_TYPES)
        if len(text := json.dumps(spec)) > MAX_CHARS:
            raise NanoinferError(f"response_template has more than {MAX_CHARS} characters of JSON")
        if spec.get("version", 1) != 1:
            raise NanoinferError(f"response_template.version={show(spec['version'])} is unknown: only 1 is")
        if (anchor := _to_marker("response_template", spec, "start_anchor")) is None:
            raise NanoinferError("response_template has neither start_anchor nor start_anchor_pattern")
        if not (fields := spec.get("fields")):
            raise NanoinferError(f"response_template.fields={show(fields)} is not an object with fields")
        self.fields: dict[str, dict[str, Any]] = fields
        self.has_patterns = '_pattern": ' in text
        """Whether a piece of an answer may take up to CPU_SEC."""
        self._anchor = anchor
        self._opens: dict[str, Marker] = {}
        self._closes: dict[str, Marker] = {}
        for name, field in fields.items():
            _check_field(where := f"response_template.fields.{name}", field)
            for markers, key in ((self._opens, "open"), (self._closes, "close")):
                if (marker := _to_marker(where, field, key)) is not None:
                    markers[name] = marker
        implicit = [name for name in fields if name not in self._opens]
        if len(implicit) > 1:
            raise NanoinferError(f"response_template.fields: {show(implicit)} have no open, which only one may have")
        self.implicit = implicit[0] if implicit else None
        """The field of text that no other field has."""
        if dropped := [name for name in fields if name not in TEXTS and name != CALLS]:
            log.warning("the response template has the fields %s, which are dropped", escaped(", ".join(dropped)))

    def start(self, prompt: str) -> str:
        """Return what a prompt has of the answer. Raises TimeoutError."""
        ends = [m.end() for m in self._anchor.pattern.finditer(prompt, timeout=CPU_SEC)]
        return prompt[ends[-1] if ends else 0 :]

    def find(self, field: str | None, text: str, start: int, end: bool, deadline: float) -> tuple[Any, str | None, int]:
        """Search the next marker from a place of the text, of which `end` says whether it is the whole answer.

        Returns: its match or None; the field that it opens (None: it closes `field`); where text begins that may become
        a marker.

        Raises:
            TimeoutError: a pattern takes longer than until the deadline (`time_left`).
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

    def value(self, name: str, body: str, captures: dict[str, str], deadline: float) -> Any:
        """Return the value of a field.

        Raises:
            TimeoutError: it takes too long.
            Exception: of any type: the text is not of the field's form. Arguments of the form are not checked before.
        """
        field = self.fields[name]
        value = _PARSERS[field.get("content", "text")](body, field.get("content_args", {}), deadline)
        if (shape := field.get("transform")) is None:
            return value
        if field.get("transform_each", False):
            return [_transform(shape, {**captures, **item}) for item in value]
        return _transform(shape, {**captures, "content": value})


def of_model(model: ModelInfo) -> ResponseTemplate | None:
    """Return the response template of a model; None, with a warning, if it cannot be used, and None without one."""
    if model.response_template is None:
        return None
    try:
        return ResponseTemplate(model.response_template)
    except (NanoinferError, RecursionError) as e:
        log.warning("%s: answers are read by the format of the chat template", e)
        return None


def time_left(deadline: float) -> float:
    """Return the seconds of this thread's CPU time until a deadline. Raises TimeoutError if there are none."""
    if (left := deadline - time.thread_time()) <= 0:
        raise TimeoutError
    return left


def compile_pattern(where: str, pattern: Any) -> Any:
    """Compile a pattern. Raises NanoinferError: it is not one, or its compilation may take too much memory."""
    import regex  # here: most models have no response template

    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise NanoinferError(f"{where}={show(pattern)} is not a text of 1 to {MAX_PATTERN} characters")
    if _REFUSED.search(pattern):
        raise NanoinferError(f"{where}={pattern!r} is recursive or has the flag x, which are not supported")
    counts = re.findall(r"[0-9]+", " ".join(re.findall(r"\{([^{}]*)", pattern)))
    if len(pattern) * math.prod(int(count) + 1 for count in counts) << pattern.count("+") > MAX_EXPANDED:
        raise NanoinferError(f"{where}={pattern!r} is too large: it has too many + or too large numbers in braces")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except Exception as e:  # regex.error, and others for some malformed patterns
        raise NanoinferError(f"{where}={pattern!r}: {e}") from None


def _to_marker(where: str, given: Mapping[str, Any], key: str) -> Marker | None:
    """Compile the string, list of strings or pattern of a key; return None if there is none."""
    import regex

    texts, pattern = given.get(key), given.get(f"{key}_pattern")
    if texts is not None and pattern is not None:
        raise NanoinferError(f"{where} has both {key} and {key}_pattern")
    if pattern is not None:
        return Marker(compile_pattern(f"{where}.{key}_pattern", pattern), True)
    if texts is None:
        return None
    literals = texts if isinstance(texts, list) else [texts]
    if not literals or not all(isinstance(text, str) and 0 < len(text) <= MAX_LITERAL for text in literals):
        raise NanoinferError(f"{where}.{key}={show(texts)} is not a text of 1 to {MAX_LITERAL} characters")
    literals = sorted(set(literals), reverse=True)  # the longest first, of those that begin alike
    can_grow = any(longer.startswith(shorter) for longer, shorter in pairwise(literals))
    return Marker(regex.compile("|".join(map(regex.escape, literals))), can_grow)


def _check_field(where: str, field: Any) -> None:
    _check_types(where, field, _FIELD_TYPES)
    if (parser := field.get("content", "text")) not in _PARSERS:
        raise NanoinferError(f"{where}.content={show(parser)} is none of {', '.join(_PARSERS)}")
    if field.get("join") is not None and not field.get("repeats", False):
        raise NanoinferError(f"{where}.join={show(field['join'])} is given, and repeats is not true")
    if field.get("transform_each", False) and field.get("transform") is None:
        raise NanoinferError(f"{where}.transform_each=True is given, and no transform")
    values = [field.get("transform")]
    for value in values:  # which grows
        if len(values) > MAX_VALUES:  # each may stand for the whole text of the field
            raise NanoinferError(f"{where}.transform has more than {MAX_VALUES} values")
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for value in values:
        if isinstance(value, str) and _PLACEHOLDER.search(value) and not _PLACEHOLDER.fullmatch(value):
            raise NanoinferError(f"{where}.transform has {show(value)}: a placeholder must be the whole string")


def _check_types(where: str, given: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    if not isinstance(given, dict):
        raise NanoinferError(f"{where}={show(given)} is not an object")
    for key, value in given.items():
        if key not in types:
            raise NanoinferError(f"{where} has the unknown key {show(key)}")
        if not isinstance(value, types[key]):
            names = " or ".join(kind.__name__ for kind in types[key])
            raise NanoinferError(f"{where}.{key}={show(value)} is not of the type {names}")


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


def _text(text: str, args: dict[str, Any], deadline: float = 0.0) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: dict[str, Any], deadline: float) -> Any:
    """Parse JSON, or a dialect of it: {a: <"b">} with string_delims [['<"', '">']] and unquoted_keys -> {"a": "b"}."""
    work, strings = text, list[str]()

    def keep(match: Any) -> str:
        strings.append(match[1])
        return f"\x01{len(strings) - 1}\x02"

    for opening, closing in args.get("string_delims", []):
        if not opening or not closing or "\x01" in text:
            raise ValueError("string_delims has an empty text, or the text has the character \\x01")
        pattern = compile_pattern("string_delims", f"{re.escape(opening)}(.*?){re.escape(closing)}")
        work = pattern.sub(keep, work, timeout=time_left(deadline))
    if args.get("unquoted_keys", False):
        work = _UNQUOTED_KEY.sub(r'"\1":', work)
    try:
        return json.loads(_SENTINEL.sub(lambda m: json.dumps(strings[int(m[1])]), work) if strings else work)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _xml_inline(text: str, args: dict[str, Any], deadline: float) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for m in compile_pattern("tag_pattern", args["tag_pattern"]).finditer(text, timeout=time_left(deadline)):
        places = m.spans("key") + m.spans("value")
        if any(start < m.start() or stop > m.end() for start, stop in places):  # each could be the whole text
            raise ValueError("a group of tag_pattern is outside of its match")
        key, value = m["key"], _inner(m["value"], args, deadline)
        if key in values and args.get("merge_duplicates", False):
            values[key] = values[key] if isinstance(values[key], list) else [values[key]]
            values[key].append(value)
        else:
            values[key] = value
    return values


def _kv_lines(text: str, args: dict[str, Any], deadline: float) -> dict[str, Any]:
    values = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            values[_text(key, args)] = _inner(_text(value, args), args, deadline)
    return values


def _inner(text: str, args: dict[str, Any], deadline: float) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else _PARSERS[parser.get("name", "text")](text, parser.get("args", {}), deadline)


# Each returns the value of a text; it raises ValueError and others if the text is not of its form.
_PARSERS: dict[str, Callable[[str, dict[str, Any], float], Any]] = {
    "text": _text,
    "int": lambda text, args, _: int(_text(text, args)),
    "float": lambda text, args, _: float(_text(text, args)),
    "bool": lambda text, args, _: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}


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
        limit = f"it needs more than {CPU_SEC} s of CPU time"
        reason = limit if isinstance(error, TimeoutError) else error
        log.warning("the response template cannot be executed: %s: the rest of the answer is content", reason)
        self._failed = True
        self._built.add(ContentDelta, (self._marker if self._field == CALLS else "") + "".join(self._body))

    def _scan(self, end: bool) -> None:
        """Find the markers in the text from `_place` on, and set `_place` after what is read. Raises as `find`."""
        num_empty, self._deadline = 0, time.thread_time() + CPU_SEC
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
