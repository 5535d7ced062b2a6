"""What a tokenizer.json may ask for: a chain of steps that each lengthen the text could exhaust the memory.

The steps before and after the model (normalizer, pre-tokenizer; decoder) are given the factor by which they can
lengthen a text, in bytes of UTF-8; the product over a chain is limited to MAX_GROWTH, and the number of steps to
MAX_STEPS. Known tokenizers stay far below: Llama's Prepend and Replace make 12, XLM-RoBERTa's about 264.

Not covered, since the library has a limit of its own: patterns that backtrack without end. It gives up after
10 million steps, half a second, and the text is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 1024
MAX_STEPS = 100
MAX_VOCAB_SIZE = 2**31 - 1  # also the largest of a model


def check_growth(spec: dict[str, Any]) -> None:
    """Check the steps of a tokenizer.json.

    Raises:
        ValueError: there are too many, or they can lengthen a text too much.
    """
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        steps = [step for part in parts for step in _steps(spec.get(part))]
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{' and '.join(parts)} have {len(steps)} steps; the limit is {MAX_STEPS}")
        growth = 1
        for step in steps:
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{' and '.join(parts)} can make a text more than {MAX_GROWTH} times as long: shorten what is inserted"
            )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part; a step that is a sequence of steps yields those. JSON bounds the nesting."""
    if not isinstance(part, dict):
        return
    yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        if isinstance(steps := part.get(name), list):
            for step in steps:
                yield from _steps(step)


def _growth(step: dict[str, Any]) -> int:
    """Return the factor by which a step can lengthen a text: Replace " " by "▁" -> 3.

    Unicode's normal forms and lower case are not counted: they lengthen a text once, however often they are chained.
    """
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), _num_bytes(step.get("content"))
        literal = pattern.get("String") if isinstance(pattern, dict) else pattern
        if isinstance(literal, str) and literal:
            return max(1, -(-content // _num_bytes(literal)))
        return 1 + content  # a pattern may match the empty string, before each character
    if kind == "Prepend":
        return 1 + _num_bytes(step.get("prepend"))
    if kind == "Metaspace":
        return 4  # a mark of up to 4 bytes before each piece
    if kind == "ByteLevel":
        return 2  # each byte becomes a character of up to 2 bytes
    if kind == "Precompiled":
        return max(1, _longest_replacement(step.get("precompiled_charsmap")))
    return 1


def _longest_replacement(charsmap: Any) -> int:
    """Return the bytes of the longest string in SentencePiece's table: a trie's size, the trie, and strings."""
    raw = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")), default=0)


def _num_bytes(text: Any) -> int:
    return len(text.encode(errors="replace")) if isinstance(text, str) else 0
