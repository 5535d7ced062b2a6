"""The text of one sequence as it grows: what may be shown already, and where a stop string ends it.

A stop string may span token borders, so text that could be the beginning of one is held back until the
next tokens decide:

    stop = ("\\n\\n",)   tokens "a" "\\n" "b" "\\n" "\\nc"
    shown                     "a" ""    "\\nb" ""   -> stopped, text "a\\nb"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """Turns tokens into text, whole characters only (`models.tokenizers.TextStream` is one)."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


class OutputText:
    """Collects the text of one sequence and watches for stop strings.

    Args:
        stream: turns tokens into text; None for a model without a tokenizer: the text stays empty.
        stop: strings that end the text.
    """

    def __init__(self, stream: TokenStream | None, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self.text = ""
        """The whole text so far, held-back end included."""
        self._shown = 0

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token; return the stop string that now ends the text, if any (the text is cut before it).

        Args:
            token_id: the token.
            may_stop: False while min_tokens is not reached: stop strings completed now do not count, ever.
        """
        if self._stream is None:
            return None
        return self._grow(self._stream.push(token_id), may_stop)

    def flush(self, *, may_stop: bool = True) -> str | None:
        """End the text with what the stream still held; return the stop string that this completed, if any."""
        if self._stream is None:
            return None
        return self._grow(self._stream.flush(), may_stop)

    def _grow(self, piece: str, may_stop: bool) -> str | None:
        """Add to the text; return the stop string that ends first in what is new, and cut the text before it."""
        old = len(self.text)
        self.text += piece
        if not may_stop:
            return None
        # A string that ends past `old` begins past `old - len(s)`; one that ended earlier was found or did not count.
        found = [(at + len(s), at, s) for s in self._stop if (at := self.text.find(s, max(0, old - len(s) + 1))) >= 0]
        if not found:
            return None
        _, at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def take(self, *, finished: bool) -> str:
        """Return the text that has become certain since the last call.

        Args:
            finished: whether the text has ended, so that nothing need be held back.
        """
        end = len(self.text) if finished else len(self.text) - self._held_back()
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that begins a stop string: "a\\n" -> 1."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(s.startswith(end) for s in self._stop if len(s) > length):
                return length
        return 0
