"""Response templates: how to read a model's answers, by the description that comes with its tokenizer.

tokenizer_config.json may have `response_template`, which transformers (5.13 and later) executes as `parse_response`. It
is data, version 1:

    start_anchor     the answer begins after the last place where this is in the prompt (without one, the whole prompt
                     is its beginning): chat templates write <think> and the like at the end of prompts
    defaults         keys of the message that are always there; not used here
    fields           name of a key of the message -> how it is written:
      open           where it begins. One field may have none: text that no other field has belongs to it. Without such
                     a field, that text is dropped
      close          where it ends; without one, at the end of the answer, which ends every field
      content        what its text is: text (the default), int, float, bool, json, xml-inline, kv-lines
      content_args   of that parser: strip (true), unquoted_keys, string_delims ([[open, close], ...]), allow_non_json,
                     tag_pattern (with the groups key and value), merge_duplicates, line_sep, kv_sep, value_parser
                     ({"name": ..., "args": ...})
      transform      the shape of the value, in which "{content}", "{content.key}" and "{group}" of the opening pattern
                     stand for values; with transform_each, of each object in a list, whose keys are "{key}"
      repeats, join  the field may be there several times; text is joined by `join`
      optional       not used here: an answer without a field is no error

An anchor, open and close are a string or a list of strings, or, as start_anchor_pattern and so on, a regular expression
in which . matches newlines. Where several match, the first counts, of those the longest, of those one that opens.

Of the fields, `content` is the content, `reasoning_content`, `reasoning` and `thinking` are the reasoning, and
`tool_calls` are calls, {"function": {"name": ..., "arguments": {...}}}. Strings in arguments become the types of the
tool's schema. Other fields are dropped, which is logged. The older `response_schema` (x-regex, x-parser) is not read:
transformers drops it, too.

What differs from transformers: a call that is malformed or of an unknown tool becomes content instead of an error; a
call that the answer ends in is left out unless its name is known; text of a field that is there several times without
`join` is joined by newlines, instead of the last one alone; the part of the answer that the prompt has is not part of
the message; patterns are those of Python's `re`.

The description does not say which white space a model writes, and in which order the keys of a call, so that no grammar
can be made of it: that comes from the chat template (detect.py), while answers are read by this module.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.answers.message_builder import MessageBuilder
from nanoinfer.inputs.answers.reader import to_json
from nanoinfer.inputs.answers.response_template_worker import PARSERS, answer
from nanoinfer.inputs.answers.schema_types import types_of
from nanoinfer.inputs.tools import Tool
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.outputs import AnswerDelta, ChatMessage, ContentDelta, ReasoningDelta
from nanoinfer.utils.checks import show
from nanoinfer.utils.files import escaped
from nanoinfer.utils.limited_process import LimitedProcess, LimitExceeded

log = logging.getLogger("nanoinfer")

MAX_CHARS = 1 << 16  # of a template as JSON; those of today have up to 2,000
MAX_LITERAL, MAX_PATTERN = 256, 512  # characters
MAX_VALUES = 64  # strings of the shape of a value; those of today have 3
MEMORY_BYTES = 512 << 20
CPU_SEC = 2.0
"""For one piece of an answer."""
TEXTS = {"content": ContentDelta} | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), ReasoningDelta)
CALLS = "tool_calls"
PLAIN = ("text", "int", "float", "bool")  # can be shown before they are complete
_SPEC_KEYS = frozenset(("version", "defaults", "fields", "start_anchor", "start_anchor_pattern"))
_FIELD_KEYS = frozenset(
    "open open_pattern close close_pattern content content_args repeats join optional transform transform_each".split()
)
_PLACEHOLDER = re.compile(r"\{\w+(?:\.\w+)*\}")


class ResponseTemplate:
    """A response template. Thread-safe.

    Args:
        spec: the object in tokenizer_config.json.

    Raises:
        NanoinferError: it is malformed, or a pattern is not one of Python's.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        _check(spec)
        self.fields: dict[str, dict[str, Any]] = spec["fields"]
        self._work: dict[str, Any] = {"template": spec, "memory_bytes": MEMORY_BYTES, "cpu_sec": CPU_SEC}
        self._process: LimitedProcess | None = None
        if '_pattern": ' in json.dumps(spec):
            script = Path(__file__).with_name("response_template_worker.py")
            self._process = LimitedProcess(script, (), self._work, "the response template cannot be executed")
        if not self.ask("check"):
            log.info("the response template has references to groups: text is held back until its field ends")
        if dropped := [name for name in self.fields if name not in TEXTS and name != CALLS]:
            log.warning("the response template has the fields %s, which are dropped", escaped(", ".join(dropped)))

    @property
    def asks_process(self) -> bool:
        """Whether a child process reads the answers, so that each piece takes its time."""
        return self._process is not None

    def ask(self, do: str, *args: Any) -> Any:
        """Return the result of a method of `response_template_worker.Template`. Raises NanoinferError: it fails."""
        request = {"do": do, "args": args}
        if self._process is not None:
            found = self._process.ask(json.dumps(request).encode() + b"\n")
        else:
            found = answer(self._work, request)
        if "error" in found:
            raise NanoinferError(f"the response template cannot be executed: {escaped(found['error'])}")
        return found["result"]


def of_model(model: ModelInfo) -> ResponseTemplate | None:
    """Return the response template of a model; None, with a warning, if it cannot be used, and None without one."""
    if model.response_template is None:
        return None
    try:
        return ResponseTemplate(model.response_template)
    except NanoinferError as e:
        log.warning("%s: answers are read by the format of the chat template", e)
        return None


class ResponseTemplateParser:
    """Reads one answer, as `AnswerParser` does.

    Args:
        template: of the model.
        tools: that the model may call.
        prompt: text of the prompt.
    """

    def __init__(self, template: ResponseTemplate, tools: Sequence[Tool] = (), *, prompt: str = "") -> None:
        self._template, self._tools = template, {tool.name: tool for tool in tools}
        self._field: str | None = None
        self._marker, self._body = "", [""]  # of the field that the answer is in
        self._state: dict[str, Any] | None = {}  # None: the template has failed
        self._exceeded = False  # whether the parser of a field has exceeded a limit: further fields are text
        self._built = MessageBuilder()
        self._advance("start", prompt)
        self._built.forget()  # what the prompt has of the answer

    def feed(self, text: str) -> list[AnswerDelta]:
        """Add text; return what it completes."""
        return self._advance("scan", text, False)

    def finish(self, is_cut: bool = True) -> list[AnswerDelta]:
        """End the answer; return what was held back. Args: is_cut: without an effect, templates are not told."""
        return self._advance("scan", "", True)

    def message(self) -> ChatMessage:
        """Return the message so far; after `finish`, the whole one."""
        return self._built.message()

    def _advance(self, do: str, text: str, *end: bool) -> list[AnswerDelta]:
        if (state := self._state) is None:
            self._built.add(ContentDelta, text)
            return self._built.take()
        try:
            events, self._state = self._template.ask(do, *([state] if end else []), text, *end)
        except NanoinferError as e:
            log.warning("%s: the rest of the answer is content", e)
            self._state, events = None, []
            raw = (self._marker + "".join(self._body)) if self._field == CALLS else ""
            self._built.add(ContentDelta, raw + state.get("held", "") + text if end else "")
        do_with: dict[str, Callable[..., None]] = {"open": self._open, "text": self._add, "close": self._close}
        for kind, field, *rest in events:
            do_with[kind](field, *rest)
        return self._built.take()

    def _open(self, field: str, marker: str) -> None:
        self._field, self._marker, self._body = field, marker, []
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

    def _close(self, field: str, marker: str, captures: dict[str, str]) -> None:
        body, self._field, self._body = "".join(self._body), None, []
        if field != CALLS and (field not in TEXTS or not body):
            return
        value: Any = None if field == CALLS else body
        try:
            if not self._exceeded:
                value = self._template.ask("value", field, body, captures)
        except NanoinferError as e:
            self._exceeded = isinstance(e, LimitExceeded)
            if field == CALLS and not marker:  # the answer ended in it
                self._unfinished(body, captures)
                return
        if field != CALLS:
            self._text(field, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        elif not self._call(value):
            self._built.begin()
            self._text("content", self._marker + body + marker)

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

    def _unfinished(self, body: str, captures: dict[str, str]) -> None:
        """Release the call that the answer ended in, if an opening pattern has its name and its body is JSON."""
        given = self._template.fields[CALLS]
        shape = given.get("transform")
        function = shape.get("function") if isinstance(shape, dict) else None
        if isinstance(function, dict) and given.get("content") == "json" and not given.get("content_args"):
            name = captures.get(str(function.get("name"))[1:-1], "")
            if name in self._tools and function.get("arguments") == "{content}":
                self._built.call(name, body.strip())


def _check(spec: Any) -> None:
    """Raise NanoinferError if a template does not have the documented form. Patterns are not compiled."""
    _check_keys("response_template", spec, _SPEC_KEYS)
    if len(json.dumps(spec)) > MAX_CHARS:
        raise NanoinferError(f"response_template has more than {MAX_CHARS} characters of JSON")
    if spec.get("version", 1) != 1:
        raise NanoinferError(f"response_template.version={show(spec['version'])} is unknown: only 1 is")
    if not _check_marker("response_template", spec, "start_anchor"):
        raise NanoinferError("response_template has neither start_anchor nor start_anchor_pattern")
    if not isinstance(fields := spec.get("fields"), dict) or not fields:
        raise NanoinferError(f"response_template.fields={show(fields)} is not an object with fields")
    implicit = [name for name, field in fields.items() if not _check_field(f"response_template.fields.{name}", field)]
    if len(implicit) > 1:
        raise NanoinferError(f"response_template.fields: {show(implicit)} have no open, which only one may have")


def _check_field(where: str, field: Any) -> bool:
    """Check a field; return whether it has an opening marker."""
    _check_keys(where, field, _FIELD_KEYS)
    _check_marker(where, field, "close")
    if (parser := field.get("content", "text")) not in list(PARSERS):  # of any type
        raise NanoinferError(f"{where}.content={show(parser)} is none of {', '.join(PARSERS)}")
    if not isinstance(field.get("content_args", {}), dict):
        raise NanoinferError(f"{where}.content_args is not an object")
    join, each = field.get("join"), field.get("transform_each", False)
    if join is not None and (not isinstance(join, str) or not field.get("repeats", False)):
        raise NanoinferError(f"{where}.join={show(join)} is not a string, or repeats is not true")
    if not isinstance(each, bool) or (each and field.get("transform") is None):
        raise NanoinferError(f"{where}.transform_each={show(each)} is not a boolean, or there is no transform")
    texts = list(_strings(field.get("transform")))
    if len(texts) > MAX_VALUES:  # each may stand for the whole text of the field
        raise NanoinferError(f"{where}.transform has {len(texts)} strings; the limit is {MAX_VALUES}")
    for text in texts:
        if _PLACEHOLDER.search(text) and not _PLACEHOLDER.fullmatch(text):
            raise NanoinferError(f"{where}.transform has {show(text)}: a placeholder must be the whole string")
    return _check_marker(where, field, "open")


def _check_keys(where: str, given: Any, known: frozenset[str]) -> None:
    if not isinstance(given, dict):
        raise NanoinferError(f"{where}={show(given)} is not an object")
    if unknown := sorted(set(given) - known):
        raise NanoinferError(f"{where} has the unknown key {show(unknown[0])}")


def _check_marker(where: str, given: dict[str, Any], key: str) -> bool:
    """Check a string, a list of strings or a pattern; return whether there is one."""
    limits = {key: MAX_LITERAL, f"{key}_pattern": MAX_PATTERN}
    found = [name for name in limits if given.get(name) is not None]
    if len(found) > 1:
        raise NanoinferError(f"{where} has both {key} and {key}_pattern")
    for name in found:
        value, limit = given[name], limits[name]
        texts = value if isinstance(value, list) and name == key else [value]
        if not texts or not all(isinstance(text, str) and 0 < len(text) <= limit for text in texts):
            raise NanoinferError(f"{where}.{name}={show(value)} is not a text of 1 to {limit} characters")
    return bool(found)


def _strings(shape: Any) -> Iterator[str]:
    for item in shape.values() if isinstance(shape, dict) else shape if isinstance(shape, list) else ():
        yield from _strings(item)
    if isinstance(shape, str):
        yield shape


def _cast(arguments: dict[str, Any], tool: Tool) -> None:
    """Convert the strings among arguments, where the tool's schema permits other types."""
    for key, value in arguments.items():
        types = types_of(tool.parameters, key)
        if types is not None and isinstance(value, str):
            arguments[key] = json.loads(to_json(value, types))
        elif types is not None and isinstance(value, list) and "array" not in types:  # of a key that is there again
            arguments[key] = [json.loads(to_json(v, types)) if isinstance(v, str) else v for v in value]
