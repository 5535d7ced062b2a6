"""Executes a response template: finds its markers in a text and parses what is between them. Imports nothing of ours.

response_template.py describes templates and checks them. It starts this file as a child process if a template has
patterns; without patterns it calls `answer` itself. The child reads one JSON document a line: first the template and
its limits, then requests, {"do": ..., "args": [...]}. It answers each with {"result": ...} or {"error": ...}. A pattern
comes from an untrusted file and can take any time and memory, which the operating system limits.

The rules are those of transformers' utils/chat_parsing (Apache License 2.0), which matches by the package `regex`. Here
Python's `re` does; a pattern that it does not accept is an error. `re` does not tell whether a text is the beginning of
a match, so `beginnings` makes, from the parsed pattern, another one that matches the beginnings.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_NAMES = ("re._parser", "re._constants", "re._compiler")  # CPython's own modules: `re` has no public access to the tree
if sys.version_info < (3, 11):
    _NAMES = ("sre_parse", "sre_constants", "sre_compile")
_parser, _ops, _compiler = (importlib.import_module(name) for name in _NAMES)
_END = (_ops.AT, _ops.AT_END_STRING)
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "ANY_ALL", "IN")  # match one character

MAX_ERROR = 1000  # characters
CONTEXT = 64  # characters before the searched text, which ^, \b and lookbehinds read
MAX_EMPTY = 10  # empty matches in a row
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_UNQUOTED_KEY = re.compile(r"(?<=[{,])(\w+):")
_SENTINEL = re.compile("\x01(\\d+)\x02")


class Marker(NamedTuple):
    """A compiled pattern, or several literal strings."""

    full: re.Pattern[str]
    begins: re.Pattern[str] | None
    """Matches, at the end of a text, the beginnings of a match; None: not known, so text is held back until the end."""
    needle: str
    """Each match contains it: without it in a text, there is nothing to search. May be empty."""
    can_grow: bool
    """Whether a match at the end of a text may become longer."""

    def search(self, text: str, start: int, end: bool) -> tuple[re.Match[str] | None, int]:
        """Return the first match if it is final, and where the text begins that may become a match."""
        found = self.full.search(text, start) if text.find(self.needle, start) >= 0 else None
        if end:
            return found, len(text)
        if found is None:
            held = self.begins.search(text, start) if self.begins is not None else None
            return None, start if held is None else held.start()
        if found.end() == len(text) and (self.can_grow or found.start() == found.end()):
            return None, found.start()
        return found, len(text)


def to_marker(where: str, given: dict[str, Any], key: str) -> Marker | None:
    """Compile the literals or the pattern `key` of a dict; None without one. Raises ValueError with the reason."""
    if (pattern := given.get(f"{key}_pattern")) is not None:
        full, can_grow = _compile(f"{where}.{key}_pattern", pattern), True
    elif (literals := given.get(key)) is not None:
        literals = {literals} if isinstance(literals, str) else set(literals)
        can_grow = any(a != b and a.startswith(b) for a in literals for b in literals)
        pattern = "|".join(re.escape(text) for text in sorted(literals, key=len, reverse=True))  # the longest is meant
        full = re.compile(pattern)
    else:
        return None
    parsed = _parser.parse(pattern, full.flags)
    try:
        begins = _compiler.compile(_parser.SubPattern(parsed.state, beginnings(parsed.state, parsed)))
    except NotImplementedError:
        begins = None
    runs = "".join(chr(value) if op is _ops.LITERAL else "\0" for op, value in parsed).split("\0")
    return Marker(full, begins, "" if full.flags & re.IGNORECASE else max(runs, key=len), can_grow)


def _compile(where: str, pattern: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning names syntax that `regex` reads in another way
            return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, Warning) as e:
        raise ValueError(f"{where}={pattern!r}: {e}") from None


def beginnings(state: Any, items: Sequence[Any]) -> list[Any]:
    """Return the sequence that matches, up to the end of a text, what `items` matches and the beginnings of that.

    For a, b: (end | a (end | b end)). Raises NotImplementedError for references to groups.
    """
    rest: list[Any] = [_END]
    for item in reversed(items):
        if item in ((_ops.AT, _ops.AT_BEGINNING), (_ops.AT, _ops.AT_BEGINNING_STRING)):
            rest = [item, *rest]
        else:
            branches = [_parser.SubPattern(state, branch) for branch in (_beginning(state, *item), [item, *rest])]
            rest = [(_ops.BRANCH, (None, branches))]
    return rest


def _beginning(state: Any, op: Any, value: Any) -> list[Any]:
    """Return the sequence that matches, up to the end of a text, the beginnings of one item."""

    def inside(items: Any) -> Any:
        return _parser.SubPattern(state, beginnings(state, items))

    name = str(op)
    if name.startswith("GROUPREF"):
        raise NotImplementedError
    if name == "SUBPATTERN":  # a group without a number
        return [(op, (None, value[1], value[2], inside(value[3])))]
    if name == "BRANCH":
        return [(op, (None, [inside(branch) for branch in value[1]]))]
    if name == "ATOMIC_GROUP":
        return list(inside(value))
    if name.endswith("_REPEAT") and value[1] > 0:
        if len(value[2]) == 1 and str(value[2][0][0]) in _SINGLE:  # white space, mostly: the same, faster
            return [(_ops.MAX_REPEAT, (0, value[1], value[2])), _END]
        most = value[1] if value[1] is _ops.MAXREPEAT else value[1] - 1
        return [(_ops.MAX_REPEAT, (0, most, value[2])), *inside(value[2])]
    if name == "ASSERT" and value[0] > 0:
        return [(op, (1, inside(value[1])))]
    return [_END]


def _text(text: str, args: dict[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: dict[str, Any]) -> Any:
    work = text
    strings: list[str] = []
    if args.get("string_delims") and ("\x01" in text or "\x02" in text):
        raise ValueError("the text has the characters \\x01 or \\x02")
    for opening, closing in args.get("string_delims", []):
        if not opening or not closing:  # it would be found at one place again and again
            raise ValueError("string_delims has an empty text")
        pieces, place = [], 0
        while (start := work.find(opening, place)) >= 0:
            if (stop := work.find(closing, start + len(opening))) < 0:
                break
            pieces += [work[place:start], f"\x01{len(strings)}\x02"]
            strings.append(work[start + len(opening) : stop])
            place = stop + len(closing)
        work = "".join([*pieces, work[place:]])
    if args.get("unquoted_keys", False):
        work = _UNQUOTED_KEY.sub(r'"\1":', work)
    try:
        return json.loads(_SENTINEL.sub(lambda m: json.dumps(strings[int(m[1])]), work) if strings else work)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _xml_inline(text: str, args: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for m in _compile("tag_pattern", args["tag_pattern"]).finditer(text):
        key, value = m["key"], _inner(m["value"], args)
        if key in found and args.get("merge_duplicates", False):
            value = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        found[key] = value
    return found


def _kv_lines(text: str, args: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, given, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if given:
            found[_text(key, args)] = _inner(_text(value, args), args)
    return found


def _inner(text: str, args: dict[str, Any]) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else PARSERS[parser.get("name", "text")](text, parser.get("args", {}))


# Each returns the value of a text; it raises ValueError and others if the text is not of its form.
PARSERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}


def transform(shape: Any, scope: dict[str, Any]) -> Any:
    """Return a shape with values for placeholders: {"a": "{content.b}"} with {"content": {"b": 1}} -> {"a": 1}."""
    if isinstance(shape, dict):
        return {key: transform(value, scope) for key, value in shape.items()}
    if isinstance(shape, list):
        return [transform(value, scope) for value in shape]
    whole = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    value: Any = scope if whole else shape
    for key in whole[1].split(".") if whole else ():
        value = value[key]
    return value


class Template:
    """A compiled response template. Args: spec: checked by response_template.py. Raises ValueError: a wrong pattern."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._fields: dict[str, dict[str, Any]] = spec["fields"]
        self._opens = {name: to_marker(name, given, "open") for name, given in self._fields.items()}
        self._closes = {name: to_marker(name, given, "close") for name, given in self._fields.items()}
        self._implicit = next((name for name, marker in self._opens.items() if marker is None), None)
        self._anchor = to_marker("response_template", spec, "start_anchor")

    def check(self) -> bool:
        """Return whether all fields release text before the answer ends."""
        return all(m is None or m.begins is not None for m in (*self._opens.values(), *self._closes.values()))

    def start(self, prompt: str) -> tuple[list[list[Any]], dict[str, Any]]:
        """Scan a prompt: what follows the last anchor in it, or all of it, is the beginning of the answer."""
        assert self._anchor is not None
        place = 0
        for m in self._anchor.full.finditer(prompt):
            place = m.end()
        state: dict[str, Any] = {"field": self._implicit, "captures": {}, "opened": False, "before": "", "held": ""}
        return self.scan(state, prompt[place:], False)

    def scan(self, state: dict[str, Any], text: str, end: bool) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return what the next piece of an answer adds to the fields, and the new state.

        Args:
            state: as `start` or the last scan returned it.
            text: the piece.
            end: whether it is the last one.

        Returns: events: ["open", field, marker], ["text", field, text], ["close", field, marker, captures].
        """
        buffer, place, num_empty = state["before"] + state["held"] + text, len(state["before"]), 0
        field, captures, opened = state["field"], state["captures"], state["opened"]
        events: list[list[Any]] = []
        while True:
            found, opens, held = self._find(field, buffer, place, end)
            body = buffer[place : held if found is None else found.start()]
            if body and field is not None:  # else it is outside of all fields, where none is implicit
                events += [["text", field, body]] if opened else [["open", field, ""], ["text", field, body]]
                opened = True
            if found is None:
                break
            if opened:
                events.append(["close", field, "" if opens else found[0], captures])
            empty, was_open, place = found.start() == found.end(), opened, found.end()
            field, captures, opened = self._implicit, {}, False
            if opens:
                captures = {key: value for key, value in found.groupdict().items() if value is not None}
                field, opened = opens, True
                events.append(["open", field, found[0]])
            elif empty and not was_open:  # it would match here again
                held = place
                break
            num_empty = num_empty + 1 if empty else 0
            if num_empty > MAX_EMPTY:
                raise ValueError("markers match the empty string again and again")
        if end and opened:
            events.append(["close", field, "", captures])
            field, captures, opened = self._implicit, {}, False
        state = {"field": field, "captures": captures, "opened": opened}
        return events, {**state, "before": buffer[max(0, held - CONTEXT) : held], "held": buffer[held:]}

    def _find(
        self, current: str | None, buffer: str, place: int, end: bool
    ) -> tuple[re.Match[str] | None, str | None, int]:
        """Return the first marker, the field that it opens (None: it closes one), and where held text begins."""
        watched: dict[str | None, Marker | None] = {} if current is None else {None: self._closes[current]}
        if current == self._implicit:
            watched.update(self._opens)
        searched = [
            (opens, *marker.search(buffer, place, end)) for opens, marker in watched.items() if marker is not None
        ]
        held = min((begin for _, _, begin in searched), default=len(buffer))
        # the first, the longest, one that opens
        found = [(m.start(), -m.end(), opens is None, opens or "", m) for opens, m, _ in searched if m is not None]
        best = min(found, key=lambda one: one[:4], default=None)
        if best is None or best[0] >= held:  # also at the end: the reference takes no empty match there
            return None, None, held
        return best[4], best[3] or None, held

    def value(self, name: str, body: str, captures: dict[str, str]) -> Any:
        """Return the value of a field. Raises ValueError and others if the text is not of its form."""
        given = self._fields[name]
        value = PARSERS[given.get("content", "text")](body, given.get("content_args", {}))
        if (shape := given.get("transform")) is None:
            return value
        if given.get("transform_each", False):
            return [transform(shape, {**captures, **item}) for item in value]
        return transform(shape, {**captures, "content": value})


def answer(work: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Execute a request and return {"result": ...} or {"error": ...}.

    Args:
        work: {"template": ...}; one that is not compiled is compiled and replaced.
        request: {"do": the name of a method of `Template`, "args": [...]}.
    """
    try:
        if isinstance(work["template"], dict):
            work["template"] = Template(work["template"])
        return {"result": getattr(work["template"], request["do"])(*request["args"])}
    except MemoryError:
        message = "it needs too much memory"
    except RecursionError:
        message = "it nests too deep"
    except Exception as e:  # of any type: the template's arguments are not checked
        message = f"{type(e).__name__}: {e}"
    return {"error": message[:MAX_ERROR]}


def main() -> None:
    """Answer until standard input is closed."""
    work = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for name, limit in (("AS", work["memory_bytes"]), ("NOFILE", 3), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, work["cpu_sec"])
        content = json.dumps(answer(work, json.loads(line))).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
