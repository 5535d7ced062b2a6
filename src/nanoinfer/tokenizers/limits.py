"""Limits on the steps of a tokenizer.json: a chain of steps that each lengthen the text could exhaust the memory.

Each step before and after the model (normalizer, pre-tokenizer; decoder) has a growth factor: how many times longer it
can make a text, in bytes of UTF-8. The product over a chain is limited to MAX_GROWTH and the number of steps to
MAX_STEPS. Known tokenizers stay far below: Prepend and Replace of Llama give 12, XLM-RoBERTa about 264.

Not covered: patterns that backtrack without end. The tokenizers library stops them after 10 million steps, about half
a second, and the text is refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 1024
MAX_STEPS = 100
MAX_MERGE_WORK = 1 << 30
"""Sum of the squares of the tokens' lengths, where merges are not stored; Gemma's is 30 million."""
MAX_TOKENS = 1 << 19
"""Tokens of a vocabulary that a file may have: twice Gemma's, the largest known of a language model."""
MAX_TOKENS_WITHOUT_ROW = 1024
"""Tokens of a GGUF file that the embedding has no row for. Gemma has 1, and fine-tunes add some."""
MERGES_PER_TOKEN = 4
"""Merges for each token of the vocabulary. Known tokenizers have 1 to 2.3: Llama 3 280,147 for 128,256 tokens."""
VALUES_PER_TOKEN = 24
"""Commas and colons of a tokenizer.json for each token: 2 in the vocabulary, 2 for a merge, 14 for an added token."""
MIN_COMPARED_TOKENS = 1 << 16
"""A model with fewer tokens may have a tokenizer of so many: an exact error follows when it is loaded."""
MAX_VOCAB_SIZE = 1 << 22
"""Largest id + 1: tables, and the tokenizers library's description of a vocabulary, have an entry for each id."""


def check_size(raw: bytes, marks: tuple[bytes, ...], per_token: int, num_tokens: int) -> None:
    """Compare the number of values in a tokenizer's file with the model's tokens, before the file is parsed.

    Args:
        raw: content of the file.
        marks: what separates values; each value has one at least.
        per_token: values for each token, at most.
        num_tokens: of the model.

    Raises:
        ValueError: the file has more values.
    """
    limit = per_token * max(MIN_COMPARED_TOKENS, min(num_tokens, MAX_TOKENS))
    if (count := sum(map(raw.count, marks))) > limit:
        raise ValueError(
            f"has {count} values; the limit for a model of {num_tokens} tokens is {limit}: use the tokenizer that the"
            " model was trained with"
        )


def check_growth(spec: dict[str, Any]) -> None:
    """Check the steps of a tokenizer.json.

    Raises:
        ValueError: there are more than MAX_STEPS steps, or their growth exceeds MAX_GROWTH.
    """
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        chain = [step for part in parts for step in steps(spec.get(part))]
        if len(chain) > MAX_STEPS:
            raise ValueError(f"{' and '.join(parts)} have {len(chain)} steps; the limit is {MAX_STEPS}")
        growth = 1
        for step in chain:
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{' and '.join(parts)} can make a text more than {MAX_GROWTH} times as long: shorten the inserted text"
            )


def described(part: Any) -> Any:
    """Return a part of a tokenizer (a normalizer, a model, ...) as its tokenizer.json describes it; None for none."""
    return None if part is None else json.loads(part.__getstate__())


def steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part and, recursively, the steps that it contains. The JSON parser limits the nesting."""
    if not isinstance(part, dict):
        return
    yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        if isinstance(inner := part.get(name), list):
            for step in inner:
                yield from steps(step)


def _growth(step: dict[str, Any]) -> int:
    """Return the growth factor of a step: Replace " " by "▁" -> 3.

    Unicode normalization and lowercasing count as 1: repeating them does not lengthen a text further.
    """
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), _num_bytes(step.get("content"))
        literal = pattern.get("String") if isinstance(pattern, dict) else pattern
        if isinstance(literal, str) and literal:
            return max(1, -(-content // _num_bytes(literal)))
        return 1 + content  # a pattern that matches the empty string inserts before each character
    if kind == "Prepend":
        return 1 + _num_bytes(step.get("prepend"))
    if kind == "Metaspace":
        return 4  # a marker of up to 4 bytes before each piece
    if kind == "ByteLevel":
        return 2  # each byte becomes a character of up to 2 bytes
    if kind == "Precompiled":
        return max(1, _longest_replacement(step.get("precompiled_charsmap")))
    return 1


def _longest_replacement(charsmap: Any) -> int:
    """Return the bytes of the longest replacement in SentencePiece's table: size of a trie, the trie, the strings."""
    raw = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")), default=0)


def _num_bytes(text: Any) -> int:
    return len(text.encode(errors="replace")) if isinstance(text, str) else 0
