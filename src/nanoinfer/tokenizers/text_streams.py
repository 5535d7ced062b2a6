"""Incremental decoding: turn the output tokens of one sequence into text, token by token.

There is one stream class for tokens that are bytes or characters, and one for all others. Both emit whole characters
only.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    import tokenizers

MISSING = "\ufffd"
"""Text of an id in a gap of the vocabulary: it has no token string, but it can be sampled."""
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte token of a byte-fallback decoder


def no_text(token_id: int, vocab_size: int) -> NanoinferError:
    """Return the error about an id that a tokenizer does not have."""
    return NanoinferError(f"token id {token_id} has no text: the tokenizer has {vocab_size} tokens")


def spelled(core: tokenizers.Tokenizer, token_id: int, vocab_size: int) -> str | None:
    """Return the vocabulary's string for a token, None for an id in a gap: 262 -> 'Ġthe'."""
    if not 0 <= token_id < vocab_size:
        raise no_text(token_id, vocab_size)
    token: str | None = core.id_to_token(token_id)
    return token


class Utf8Stream:
    """Stream for tokens that are byte strings: an incremental UTF-8 decoder holds an incomplete character.

    Args:
        token_bytes: returns the bytes of a token.
        texts: of the tokens that `token_bytes` has returned, those that are whole characters; they need no decoder.
        vocab_size: number of tokens.
        prompt_token_ids: the tokens before.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        texts: Mapping[int, str],
        vocab_size: int,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._token_bytes, self._texts = token_bytes, texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= 3:  # an incomplete character has 3 bytes at most
                break
            known = 0 <= token_id < vocab_size
            tail = (token_bytes(token_id) if known else MISSING.encode()) + tail
        self._utf8.decode(tail)
        self._inside = bool(self._utf8.getstate()[0])  # a character
        self._shown = MISSING if self._inside else ""  # the prompt's text already shows U+FFFD for the tail

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that it completes, which later tokens cannot change.

        Raises:
            NanoinferError: the tokenizer has no token of this id.
        """
        if not self._inside and (text := self._texts.get(token_id)) is not None:
            return text
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence: an incomplete character as U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final=final)
        if text and self._shown:
            text, self._shown = text.removeprefix(self._shown), ""
        self._inside = bool(self._utf8.getstate()[0])
        return text


class SuffixStream:
    """Stream for any tokenizer: decode the last piece with and without the new tokens and emit the difference.

    text-generation-inference uses the same method. A piece begins and ends at a character boundary. A context of a
    fixed number of tokens could begin inside a character, and byte-fallback decoders would then decode the following
    bytes wrongly. Text that ends in U+FFFD may be an incomplete character and is held back for at most `_HOLD` tokens.
    """

    _HOLD = 8
    _MAX_BROKEN = 64  # tokens of a run of invalid bytes that are kept as context

    def __init__(self, core: tokenizers.Tokenizer, vocab_size: int, prompt_token_ids: Sequence[int]) -> None:
        self._core = core
        self._vocab_size = vocab_size
        self._ids = self._context(prompt_token_ids)  # tokens of the last piece, then those not emitted yet
        self._done = len(self._ids)  # tokens of the last piece
        self._max_context = self._done + self._MAX_BROKEN

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt, on which the decoding of the next tokens depends.

        Decoders omit the space before the first token, and they decode byte tokens in runs: one invalid byte makes its
        whole run invalid. So the context begins before the last run of bytes and has at least 4 tokens, the most
        that one character may have. A token without text ends the context, as in `push`.
        """
        start = len(prompt)
        while start > 0 and 0 <= prompt[start - 1] < self._vocab_size:
            token = self._core.id_to_token(prompt[start - 1])
            if token is None:
                break
            start -= 1
            if len(prompt) - start >= 4 and not BYTE_TOKEN.fullmatch(token):
                break
        return list(prompt[start:])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._core.decode(ids, skip_special_tokens=False)
        return text

    def _difference(self) -> tuple[str, bool]:
        """Return the text of the tokens after the last piece, and whether that piece may end inside a character."""
        before, after = self._decode(self._ids[: self._done]), self._decode(self._ids)
        kept = before
        while kept.endswith(MISSING) and not after.startswith(kept):
            kept = kept[:-1]  # U+FFFD of a character that the new tokens complete
        if not after.startswith(kept):  # an invalid byte invalidated the run of bytes before it
            return self._decode(self._ids[self._done :]), False
        return after[len(kept) :], before.endswith(MISSING)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that later tokens cannot change (whole characters). Raises as `Utf8Stream`."""
        if spelled(self._core, token_id, self._vocab_size) is None:
            return self.flush() + MISSING
        self._ids.append(token_id)
        text, inside = self._difference()
        if (not text or text.endswith(MISSING)) and len(self._ids) - self._done < self._HOLD:
            return ""
        if not inside or len(self._ids) > self._max_context:
            del self._ids[: self._done]
        self._done = len(self._ids)
        return text

    def flush(self) -> str:
        """Return the text that was held back; the next token is decoded without context."""
        text, _ = self._difference()
        self._ids, self._done = [], 0
        return text


DecodeStream = Utf8Stream | SuffixStream
"""Decodes the tokens of one sequence incrementally."""
