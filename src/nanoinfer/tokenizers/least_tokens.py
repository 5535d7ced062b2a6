"""A lower bound for the number of tokens of a text, without tokenizing it: its length over that of the longest token.

So a prompt that cannot fit is refused at once. Tokenizing it takes half a second and 200 MB for a megabyte.

The bound holds if each character, or each byte of UTF-8, becomes a part of a token, and no step shortens the text:

    normalizer      none; Prepend; Replace of a string by one that is not shorter; before byte-level tokens NFC, which
                    makes UTF-8 at most 3.5 times shorter (U+1FBE U+0308 U+0301 to U+0390)
    pre-tokenizer   those that keep the whole text
    model           BPE of bytes, or of characters with a token for each byte: no part of a text is unknown
    added tokens    those that do not take the white space around them

Otherwise there is none. WordPiece and Unigram make one token of any number of unknown characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoinfer.tokenizers.limits import described, steps

if TYPE_CHECKING:
    import tokenizers

_NFC_SHRINKS = 4
_KEEP_ALL = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split")
"""Pre-tokenizers that keep the whole text, unless their behavior is Removed."""


@dataclass(frozen=True)
class LongestToken:
    """The most of a text that one token stands for."""

    length: int
    """Bytes of UTF-8, or characters."""
    in_bytes: bool

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least."""
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
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    added = core.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    splits = list(steps(described(core.pre_tokenizer)))
    if any(step["type"] not in _KEEP_ALL or step.get("behavior") == "Removed" for step in splits):
        return None
    in_bytes = any(step["type"] == "ByteLevel" for step in splits)
    complete = alphabet if in_bytes else {f"<0x{byte:02X}>": byte for byte in range(256)}
    if not complete.keys() <= vocab.keys() or not (in_bytes or model.byte_fallback):
        return None
    shrinks = [_shrinks(step, in_bytes) for step in steps(described(core.normalizer))]
    if None in shrinks:
        return None
    texts = [core.normalizer.normalize_str(t.content) if t.normalized and core.normalizer else t.content for t in added]
    length = max([*map(len, vocab), *(len(text.encode()) if in_bytes else len(text) for text in texts)])
    return LongestToken(length * max([1, *filter(None, shrinks)]), in_bytes)


def _shrinks(step: Mapping[str, Any], in_bytes: bool) -> int | None:
    """Return how many times shorter a step of the normalizer can make a text; None: not known."""
    if step["type"] in ("Sequence", "Prepend"):
        return 1
    if step["type"] == "NFC" and in_bytes:
        return _NFC_SHRINKS
    pattern, content = step.get("pattern"), step.get("content")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if step["type"] == "Replace" and isinstance(literal, str) and isinstance(content, str):
        before, after = (literal.encode(), content.encode()) if in_bytes else (literal, content)
        return 1 if len(before) <= len(after) else None
    return None
