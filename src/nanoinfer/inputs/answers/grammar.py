"""The grammar that a model's answer must match: its own format of calls, with arguments that match the tools' schemas.

    choice      answer
    none        text without calls, or the structured output that is asked for
    auto        text; once it opens a call, the call must be complete before the text goes on
    required    calls only
    a name      one call of that tool

Before it, reasoning is free text up to its end marker, with at most `thinking_budget` tokens. Markers that are special
tokens of the tokenizer are references to them; what is not constrained cannot spell a marker by other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from nanoinfer.errors import NanoinferError, about
from nanoinfer.inputs.answers.format import AnswerFormat
from nanoinfer.inputs.answers.lark import Arguments, Lark, ReleasedTools, regex
from nanoinfer.inputs.messages import Tool
from nanoinfer.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from nanoinfer.structured.grammars import AnswerGrammar, to_text

ANY = "/(?s:.*)/"
SPACE = "/[ \\n]{1,4}/"
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")


def to_grammar(
    format: AnswerFormat,
    tools: Sequence[Tool] = (),
    choice: str = "auto",
    *,
    parallel: bool = True,
    answer: StructuredOutputsParams | None = None,
    in_reasoning: bool | None = False,
    thinking_budget: int | None = None,
    special_tokens: Mapping[str, int] | None = None,
    released: ReleasedTools | None = None,
) -> StructuredOutputsParams | None:
    """Return what an answer must match; None if it is free.

    Args:
        format: of the model's answers.
        tools: that it may call.
        choice: none, auto, required or the name of a tool.
        parallel: whether it may write several calls, if the format can; with a name, there is one.
        answer: what the content must match, without the reasoning; with choice auto, an answer is calls or this.
        in_reasoning: what `AnswerFormat.reasoning_of` says about the prompt.
        thinking_budget: largest number of tokens of the reasoning.
        special_tokens: text -> id of the tokenizer's special tokens (`structured.vocabulary.special_tokens`).
        released: tools whose arguments may be any object. Those without `strict` are added for which no grammar can be
            made, and the largest if the grammar of all is too large.

    Raises:
        NanoinferError: the format has no calls that could be required, or cannot express the schema of a tool with
            `strict`; the tools are too large.
    """
    calling = bool(tools) and choice != "none" and format.has_calls
    if tools and choice not in ("none", "auto") and not format.has_calls:
        raise NanoinferError(f"tool_choice={choice!r} needs a chat template with tool calls: use tool_choice='auto'")
    begins = in_reasoning is None and thinking_budget != 0
    reasons = bool(format.reasoning_end) and (begins or in_reasoning is True)
    forbids = bool(tools) and choice == "none" and bool(format.trigger) and answer is None
    if not (calling or forbids or (reasons and (answer is not None or thinking_budget is not None))):
        return answer
    released = ReleasedTools() if released is None else released
    while True:
        builder = _Answer(format, special_tokens or {}, in_reasoning if reasons else False)
        named = [tool for tool in tools if choice in ("auto", "required", tool.name)] if calling else []
        sizes = builder.add_tools(named, parallel and choice in ("auto", "required"), released)
        text = builder.text(choice, answer, thinking_budget)
        if len(text) <= MAX_GRAMMAR_CHARS:
            free = calling and choice == "auto" and answer is None and thinking_budget is None
            return AnswerGrammar(grammar=text, marker_starts=_marker_starts(format) if free else None)
        why = f"the grammar of all tools has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS}"
        if not sizes:
            raise NanoinferError(f"tools: {why}: give fewer tools")
        released.add(named[max(sizes, key=lambda i: sizes[i])], why)


def _marker_starts(f: AnswerFormat) -> str | None:
    """Return the characters that markers in a text begin with; None: an answer cannot begin with text."""
    if not f.trigger or f.has_headers:
        return None
    markers = [f.trigger, f.inner_trigger, f.reasoning_start, f.reasoning_end]
    return "".join(sorted({text[0] for marker in markers for text in (marker, marker.strip()) if text}))


class _Answer:
    """Builds one grammar.

    Args:
        format: of the answers.
        special_tokens: text -> id.
        in_reasoning: whether the answer begins within reasoning; None: reasoning may begin it.
    """

    def __init__(self, format: AnswerFormat, special_tokens: Mapping[str, int], in_reasoning: bool | None) -> None:
        self._format, self._lark, self._in_reasoning = format, Lark(special_tokens), in_reasoning
        self._openings: list[str] = []
        self._bodies: list[str] = []
        self._parallel = False

    def add_tools(self, tools: Sequence[Tool], parallel: bool, released: ReleasedTools) -> dict[int, int]:
        """Add the rules of calls; return the characters of the rules of each tool that may be released."""
        f, lark, sizes = self._format, self._lark, dict[int, int]()
        self._parallel = parallel and f.parallel
        for i, tool in enumerate(tools):
            num_rules = len(lark.rules)
            with about(f"tool {tool.name!r}"):
                arguments = Arguments(lark, f, tool, released).rule()
            if not tool.strict and tool not in released:
                sizes[i] = sum(map(len, lark.rules[num_rules:]))
            self._openings.append(f.before_name + tool.name + f.after_name)
            self._bodies.append(lark.rule(f"{arguments} {lark.literal(f.after_arguments)}"))
        return sizes

    def text(self, choice: str, answer: StructuredOutputsParams | None, thinking_budget: int | None) -> str:
        """Return the grammar."""
        f, lark = self._format, self._lark
        if not self._bodies:
            body = self._structured(answer) if answer is not None else self._plain(f.trigger)
        elif choice != "auto":
            body = f"{self._noise(*f.ignored)} {self._calls()}"
        elif answer is not None:
            body = f"({self._calls()} | {self._structured(answer)})"
        else:
            body = self._auto()
        if self._in_reasoning is False:
            return lark.text(body)
        free = answer is None and choice in ("none", "auto")
        space = "" if free else lark.rule(SPACE, "SPACE") + "?"
        start = "" if self._in_reasoning else self._reasoning_start()
        calling = bool(self._bodies and f.trigger) and not f.has_headers
        thought = f"{start} {self._reasoning(thinking_budget, f.trigger if calling else '')} {space}"
        grammar = f"{thought} {body}" if self._in_reasoning else f"({thought})? {body}"
        if calling and thinking_budget != 0:
            rest = "" if not free else body if self._parallel else self._plain(f.trigger)
            grammar += f" | {start} {self._reasoning_with_call(thinking_budget)} {rest}"
        return lark.text(grammar)

    def _reasoning_start(self) -> str:
        """Return the marker before the reasoning, after the white space that some templates write there."""
        lark, start = self._lark, self._format.reasoning_start
        if lark.is_special(start):
            return f"{lark.rule(SPACE, 'SPACE')}? {lark.literal(start)}"
        return lark.rule(f"/[ \\n]{{0,4}}{regex(start)}/", "START")

    def _reasoning(self, budget: int | None, trigger: str) -> str:
        """Return the rule of the reasoning and its end marker. Args: trigger: that the reasoning does not contain."""
        lark, end = self._lark, self._format.reasoning_end
        if budget is None:
            return lark.until(end, _without(trigger))
        if budget == 0:
            return lark.literal(end)
        text = lark.rule(_without(trigger), "TEXT")
        if lark.is_special(end):
            return f"{lark.rule(text, 'thought', f'[max_tokens={budget}]')} {lark.literal(end)}"
        # At the budget, llguidance ends the lexeme that stands first in the grammar: that of a text without the marker.
        cut = lark.rule(lark.rule(_without(trigger, end), "TEXT"), "thought", f"[max_tokens={budget}]")
        ended = lark.rule(text, "thought", f"[max_tokens={budget}, suffix={json.dumps(end)}]")
        return lark.rule(f"{cut} {lark.literal(end)} | {ended}")

    def _reasoning_with_call(self, budget: int | None) -> str:
        """Return the rule of reasoning that calls end, and of these."""
        f, lark = self._format, self._lark
        special = lark.is_special(f.trigger)
        options = [] if budget is None else [f"max_tokens={budget}"]
        options += [] if special else [f"suffix={json.dumps(f.trigger)}"]
        thought = lark.rule(_without(f.reasoning_end), "TEXT")
        if options:
            thought = lark.rule(thought, "thought", f"[{', '.join(options)}]")
        return f"{thought}? {self._calls()}" if special else f"{thought} {self._calls(f.trigger)}"

    def _structured(self, answer: StructuredOutputsParams) -> str:
        f, lark = self._format, self._lark
        text = to_text(answer)
        if answer.grammar is not None and not _LARK.search(text):
            raise NanoinferError("structured_outputs.grammar in GBNF cannot follow reasoning or tools: give it in Lark")
        inner = lark.rule(f"%lark {{\n{text}\n}}")
        start = f"({lark.literal(f.content_start)})?" if lark.is_special(f.content_start) else ""
        return f"{self._noise(*f.ignored)} {start} {inner}"

    def _calls(self, skipped: str = "") -> str:
        """Return calls. Args: skipped: the beginning of the first one, which the grammar has already."""
        f, lark = self._format, self._lark
        first, end = self._one(f.calls_start, skipped), lark.literal(f.calls_end)
        if not self._parallel or (skipped and not f.calls_start):  # more are searched in the text
            return f"{first} {end}"
        return f"{first} ({self._one(f.separator)})* {end}"

    def _one(self, before: str, skipped: str = "") -> str:
        """Return a call of any tool after a piece. Each opening is one literal, so that text can be told from it."""
        pairs = zip(self._openings, self._bodies, strict=True)
        return self._lark.rule(
            " | ".join(f"{self._lark.literal((before + opening)[len(skipped) :])} {body}" for opening, body in pairs)
        )

    def _auto(self) -> str:
        """Return text with calls in it."""
        f, lark = self._format, self._lark
        if not f.trigger:
            openings = "|".join(regex(f.calls_start + opening) for opening in self._openings)
            text = lark.rule(f"{ANY} & ~/\\s*({openings})(?s:.*)/", "TEXT")
            return f"({self._calls()} | {text})"
        if lark.is_special(f.trigger):
            text, calls = self._plain(f.trigger, f.inner_trigger), self._calls()
            noise = self._noise(f.content_start, f.content_end, *f.ignored, one=True)
            between = lark.rule(f"({calls}{noise and ' | '}{noise})" if self._parallel else noise or '""')
            return f"({text}? {between})* {text}?" + ("" if self._parallel else f" ({calls})?")
        text, repeated = self._plain(), "*" if self._parallel else "?"
        head = lark.rule(lark.rule(f"{text} {lark.literal(f.trigger)}", "HEAD"), "head", "[lazy]")
        return f"({head} {self._calls(f.trigger)}){repeated} {text}"

    def _plain(self, *refused: str) -> str:
        """Return a terminal for text that contains no marker of another part."""
        start = self._format.reasoning_start if self._in_reasoning is None else ""
        return self._lark.rule(_without(*(text.strip() for text in (*refused, start))), "TEXT")

    def _noise(self, *pieces: str, one: bool = False) -> str:
        """Return markers between the parts that are special tokens: one of them, or any number."""
        texts = " | ".join(self._lark.literal(text) for text in sorted(set(pieces)) if self._lark.is_special(text))
        return texts if one or not texts else f"({texts})*"


def _without(*refused: str) -> str:
    """Return a terminal's body for any text that does not contain some texts, which may be empty."""
    texts = "|".join(regex(text) for text in refused if text)
    return f"{ANY} & ~/(?s:.*)({texts})(?s:.*)/" if texts else ANY
