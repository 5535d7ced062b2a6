"""Limits on the steps of a tokenizer.json, and a lower bound for the number of tokens of a text.

A chain of steps that each lengthen the text could exhaust the memory. Each step before and after the model (normalizer,
pre-tokenizer; decoder) has a growth factor: how many times longer it can make a text, in bytes of UTF-8. The product
over a chain is limited to MAX_GROWTH and the number of steps to MAX_STEPS. Known tokenizers stay far below: Prepend and
Replace of Llama give 12, XLM-RoBERTa about 264.

Not covered: patterns that backtrack without end. The tokenizers library stops them after 10 million steps, about half
a second, and the text is refused.

The lower bound is the length of a text over that of the longest token, so that a prompt that cannot fit is refused at
once: tokenizing it takes half a second and 200 MB for a megabyte. There is none where a token may stand for any length:
of unknown characters, or of what a step removes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

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


_NFC_SHRINKS = 4  # makes UTF-8 at most 3.5 times shorter: U+1FBE U+0308 U+0301 to U+0390
_NFC = {"type": "NFC"}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_KEEP_ALL = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split")
"""Pre-tokenizers that keep the whole text, unless their behavior is Removed."""


@dataclass(frozen=True)
class LongestToken:
    """The most of a text that one token stands for."""

    length: int
    """Bytes of UTF-8, or characters."""
    in_bytes: bool

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, without tokenizing it."""
        return -(-(len(text.encode(errors="replace")) if self.in_bytes else len(text)) // self.length)


def longest_token(
    core: tokenizers.Tokenizer, alphabet: Mapping[str, int], vocab: Mapping[str, int]
) -> LongestToken | None:
    """Return the longest token of a tokenizer; None if the number of tokens has no bound by it.

    Args:
        core: the tokenizer.
        alphabet: the characters that stand for bytes in byte-level tokens.
        vocab: its tokens, with the added ones.
    """
    model: Any = core.model
    splits, normal = (list(steps(described(part))) for part in (core.pre_tokenizer, core.normalizer))
    added = core.get_added_tokens_decoder().values()
    in_bytes = any(step["type"] == "ByteLevel" for step in splits)
    bytes_ = alphabet if in_bytes else {f"<0x{byte:02X}>": byte for byte in range(256)}
    known = type(model).__name__ == "BPE" and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    known = known and (in_bytes or model.byte_fallback) and bytes_.keys() <= vocab.keys()
    keep = all(step["type"] in _KEEP_ALL and step.get("behavior") != "Removed" for step in splits)
    keep = keep and not any(token.lstrip or token.rstrip for token in added)
    plain = (
        step == _NFC if in_bytes else step["type"] in ("Sequence", "Prepend") or step == _SPACES for step in normal
    )
    if not known or not keep or not all(plain):
        return None
    length = max([*map(len, vocab), *(len(token.content.encode()) for token in added)])
    return LongestToken(length * (_NFC_SHRINKS if in_bytes and normal else 1), in_bytes)
