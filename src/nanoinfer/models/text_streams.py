"""Streams that decode the tokens of one sequence as they come, after the text of its prompt.

One for each kind of tokenizer (`models.tokenizers`). None of them emits half a character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    import tokenizers

MISSING = "\ufffd"
"""What an id in a gap of the vocabulary is shown as: it has no text, but it can be drawn."""
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # as byte-fallback decoders spell one


def _no_text(token_id: int, vocab_size: int) -> NanoinferError:
    return NanoinferError(f"token id {token_id} has no text: the tokenizer has {vocab_size} tokens")


def spelled(core: tokenizers.Tokenizer, token_id: int, vocab_size: int) -> str | None:
    """Return a token as the vocabulary spells it, None for an id in a gap of it: 262 -> 'Ġthe'."""
    if not 0 <= token_id < vocab_size:
        raise _no_text(token_id, vocab_size)
    token: str | None = core.id_to_token(token_id)
    return token


class DecodeStream(Protocol):
    """Turns the tokens of one sequence into text as they come."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain (maybe empty, never half a character).

        Raises:
            NanoinferError: the tokenizer has no token of this id.
        """
        ...

    def flush(self) -> str:
        """Return what is left at the end of the text; an unfinished character becomes U+FFFD."""
        ...


class Utf8Stream:
    """Stream for tokens that are byte strings: an incremental UTF-8 decoder holds the unfinished tail."""

    def __init__(self, token_bytes: Callable[[int], bytes], vocab_size: int, prompt_token_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= 3:  # an unfinished character has 3 bytes at most
                break
            known = 0 <= token_id < vocab_size
            tail = (token_bytes(token_id) if known else MISSING.encode()) + tail
        self._utf8.decode(tail)
        self._shown = MISSING if self._utf8.getstate()[0] else ""  # what the prompt's text ends with for these bytes

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that are complete now."""
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return the unfinished tail as U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final=final)
        if text and self._shown:
            text, self._shown = text.removeprefix(self._shown), ""
        return text


class CharStream:
    """Stream for tokens that are one character each."""

    def __init__(self, chars: Sequence[str]) -> None:
        self._chars = chars

    def push(self, token_id: int) -> str:
        """Return the token's character."""
        if not 0 <= token_id < len(self._chars):
            raise _no_text(token_id, len(self._chars))
        return self._chars[token_id]

    def flush(self) -> str:
        """Return nothing: no character is ever unfinished."""
        return ""


class SuffixStream:
    """Stream for any tokenizer: decode the last piece with and without the new tokens, emit the difference.

    The idea of a piece as context is text-generation-inference's. A piece begins and ends between characters;
    a context of so many tokens might begin inside one, and byte-fallback decoders then spoil the next ones
    too. A tail that ends in U+FFFD may be an unfinished character and is held back, for at most `_HOLD` tokens.
    """

    _HOLD = 8
    _MAX_BROKEN = 64  # tokens of a run of broken bytes that are kept as context

    def __init__(self, core: tokenizers.Tokenizer, vocab_size: int, prompt_token_ids: Sequence[int]) -> None:
        self._core = core
        self._vocab_size = vocab_size
        self._ids = self._context(prompt_token_ids)  # of the last piece, then those whose text is not out yet
        self._done = len(self._ids)  # how many are the last piece's
        self._max_context = self._done + self._MAX_BROKEN

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the end of the prompt that decides how the next tokens are decoded.

        Decoders treat the first token differently (no space before it) and byte tokens by runs: one broken byte
        spoils its whole run. So the context begins before the last run, and holds the 4 tokens that a character may
        be made of. A token without text ends a stream's context (see `push`), and does so here.
        """
        start = len(prompt)
        while start > 0 and 0 <= prompt[start - 1] < self._vocab_size:
            token = self._core.id_to_token(prompt[start - 1])
            if token is None:
                break
            start -= 1
            if len(prompt) - start >= 4 and not _BYTE_TOKEN.fullmatch(token):
                break
        return list(prompt[start:])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._core.decode(ids, skip_special_tokens=False)
        return text

    def _difference(self) -> tuple[str, bool]:
        """Return the text of the tokens since the last piece, and whether the piece may have ended in a character."""
        before, after = self._decode(self._ids[: self._done]), self._decode(self._ids)
        kept = before
        while kept.endswith(MISSING) and not after.startswith(kept):
            kept = kept[:-1]  # U+FFFD of a character that the prompt began and the new tokens complete
        if not after.startswith(kept):  # a broken byte spoils the whole bytes before it
            return self._decode(self._ids[self._done :]), False
        return after[len(kept) :], before.endswith(MISSING)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now."""
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
        """Return the text that was held back; the next token starts without context."""
        text, _ = self._difference()
        self._ids, self._done = [], 0
        return text
