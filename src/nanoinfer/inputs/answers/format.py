"""The format of a chat model's answers: what stands around reasoning, content and tool calls, as data.

An answer is  [reasoning] [content] [calls], and a call is a sequence of pieces:

    calls_start  before_name NAME after_name ARGUMENTS after_arguments  separator  ... (more calls)  calls_end

Hermes, Qwen 3 before_name='<tool_call>\\n{"name": "', after_name='", "arguments": ', after_arguments='}\\n</tool_call>'
Mistral Nemo   calls_start='[TOOL_CALLS][', before_name='{"name": "', ..., separator=', ', calls_end=']'
DeepSeek V3.1  calls_start='<|tool_calls_begin|>', before_name='<|tool_call_begin|>', after_name='<|tool_sep|>', ...
Qwen3-Coder    before_name='<tool_call>\\n<function=', after_name='>', before_key='\\n<parameter=', after_key='>', ...
LFM2           calls_start='<|tool_call_start|>[', after_name='(', after_arguments=')', calls_end=']<|tool_call_end|>'

The parser (parser.py) reads all of them with any white space; the grammar (grammar.py) writes exactly these pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ID = "\x00"
"""Stands for the id of a call in a piece, where a model writes one: '", "id": "\\x00"}'."""
COUNT = "\x01"
"""Stands for a number that counts the calls of an answer: ":\x01<|tool_call_argument_begin|>"."""
PLACEHOLDER = re.compile(f"([{ID}{COUNT}])")
NOTATIONS = ("json", "tagged", "python", "gemma")
"""Of arguments: {"k": "v", "n": 3} | a piece around each key and value, strings as they are, other types as JSON |
k="v", n=3 | {k:<|"|>v<|"|>,n:3}"""


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its answers. Without `before_name` and `after_name` it writes no calls."""

    reasoning_start: str = ""
    """Marker before the reasoning; empty if the model writes none."""
    reasoning_end: str = ""
    content_start: str = ""
    """Marker before the content; mostly empty."""
    content_end: str = ""
    trigger: str = ""
    """The text that begins calls, up to white space or JSON: "<tool_call>". Empty: calls are the whole content, and
    begin with a brace or a bracket."""
    calls_start: str = ""
    """Before the first of several calls, once."""
    calls_end: str = ""
    separator: str = ""
    """Between two calls."""
    before_name: str = ""
    after_name: str = ""
    after_arguments: str = ""
    name_key: str = ""
    """Key of the name if a call is a JSON object; else empty."""
    arguments_key: str = ""
    notation: str = "json"
    """Of the arguments: one of NOTATIONS."""
    before_key: str = ""
    """Of notation "tagged": before each key, ..."""
    after_key: str = ""
    """... between key and value, ..."""
    after_value: str = ""
    """... and after each value."""
    cdata: bool = False
    """Whether values of notation "tagged" may be <![CDATA[...]]>."""
    parallel: bool = True
    """Whether the model can write several calls in one answer."""
    opened: str = ""
    """The part of a marker that the prompt ends with, so that answers begin after it."""
    also: tuple[tuple[str, str], ...] = ()
    """Further spellings that the parser accepts: (name of a field, text)."""
    ignored: tuple[str, ...] = ()
    """Markers that are no part of reasoning, content or calls."""
    has_headers: bool = False
    """Whether an answer is messages with headers, as gpt-oss writes them. The pieces here are those of the grammar."""
    text_arguments: bool = False
    """Whether the chat template takes the arguments of earlier calls as JSON text instead of an object."""
    null_content: bool = False
    """Whether the chat template takes null, instead of "", for the content of earlier calls."""

    @property
    def has_calls(self) -> bool:
        """Whether calls can be written."""
        return bool(self.before_name or self.after_name)

    def spellings(self, *fields: str) -> list[str]:
        """Return what some fields may be in answers, of each its own value first; none for an empty field."""
        own = [(name, getattr(self, name)) for name in fields]
        texts = [value if isinstance(value, tuple) else (value,) for _, value in own]
        also = [text for name, text in self.also if name in fields]
        return [text for text in (*(text for some in texts for text in some), *also) if text]

    def markers(self, *fields: str) -> set[str]:
        """Return the spellings of some fields without white space around them."""
        return {text.strip() for text in self.spellings(*fields)}

    def reasoning_of(self, prompt: str) -> bool | None:
        """Return whether a prompt ends within reasoning (True), after it (False), or before it may begin (None)."""
        if not self.reasoning_end:
            return False
        end = prompt.rstrip()
        if self.reasoning_start and end.endswith(self.reasoning_start.rstrip()):
            return True
        return False if end.endswith(self.reasoning_end.strip()) else None


JSON_IN_MARKERS = AnswerFormat(
    reasoning_start="<think>",
    reasoning_end="</think>",
    trigger="<tool_call>",
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n",
    name_key="name",
    arguments_key="arguments",
)
"""The last resort, for models whose own format cannot be found."""
PYTHON_IN_MARKERS = AnswerFormat(
    trigger="<|tool_call_start|>",
    calls_start="<|tool_call_start|>[",
    after_name="(",
    after_arguments=")",
    separator=", ",
    calls_end="]<|tool_call_end|>",
    notation="python",
)
"""LFM2's, whose first templates describe it in words only."""
HARMONY = AnswerFormat(
    reasoning_start="<|channel|>analysis<|message|>",
    reasoning_end="<|end|>",
    content_start="<|channel|>final<|message|>",
    content_end="<|end|>",
    trigger="<|channel|>commentary to=functions.",
    before_name="<|channel|>commentary to=functions.",
    after_name=" <|constrain|>json<|message|>",
    parallel=False,
    also=(
        ("content_start", "<|channel|>final <|constrain|>json<|message|>"),
        ("content_start", "<|channel|>commentary<|message|>"),
        ("trigger", "<|start|>assistant to=functions."),
        ("trigger", "to=functions."),
        ("trigger", "<|channel|>analysis to=functions."),
    ),
    ignored=("<|start|>assistant", "<|call|>", "<|return|>"),
    has_headers=True,
)
"""gpt-oss's, whose templates write messages in another order of parts than the model does."""
