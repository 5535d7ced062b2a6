"""The text of one sequence as it grows: what may be shown already, and where a stop string ends it.

A stop string may span token borders, so text that could be the beginning of one is held back until the
next tokens decide:

    stop = ("\\n\\n",)   tokens "a" "\\n" "b" "\\n" "\\nc"
    shown                     "a" ""    "\\nb" ""   -> stopped, text "a\\nb"
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol


class TokenStream(Protocol):
    """Turns tokens into text, whole characters only (`models.text_streams.DecodeStream` is one)."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


@lru_cache(maxsize=64)
def _borders(s: str) -> list[int]:
    """Return for every k the length of the longest proper prefix of s[:k] that s[:k] also ends with.

    The failure function of Knuth, Morris and Pratt (1977): "aab" -> [0, 0, 1, 0].
    """
    borders = [0, 0]
    k = 0
    for c in s[1:]:
        while k and s[k] != c:
            k = borders[k]
        k += s[k] == c
        borders.append(k)
    return borders


class _Match:
    """How much of one stop string the end of a growing text matches. Amortised O(1) for each character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Length of the longest end of the text that begins the stop string and is not all of it."""
        self._borders = _borders(stop)

    def push(self, piece: str) -> int | None:
        """Add characters; return how many of them there are up to the end of the first match, if there is one."""
        stop, borders, k, found = self.stop, self._borders, self.length, None
        if not k and stop[0] not in piece:
            return None
        for i, c in enumerate(piece, 1):
            while k and stop[k] != c:
                k = borders[k]
            k += stop[k] == c
            if k == len(stop):
                found = found or i
                k = borders[k]
        self.length = k
        return found


class OutputText:
    """Collects the text of one sequence and watches for stop strings.

    Args:
        stream: turns tokens into text; None for a model without a tokenizer: the text stays empty.
        stop: strings that end the text.
    """

    def __init__(self, stream: TokenStream | None, stop: Sequence[str]) -> None:
        self._stream = stream
        self._matches = [_Match(s) for s in stop]
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
        # Pushed whether or not a match counts: one that ends later may have begun already.
        ends = [(end, -len(m.stop), m.stop) for m in self._matches if (end := m.push(piece)) is not None]
        if not ends or not may_stop:
            return None
        end, _, stop = min(ends)  # of those that end together, the one that begins first
        self.text = self.text[: old + end - len(stop)]
        return stop

    def take(self, *, finished: bool) -> str:
        """Return the text that has become certain since the last call.

        Args:
            finished: whether the text has ended, so that nothing need be held back.
        """
        held_back = 0 if finished else max((m.length for m in self._matches), default=0)
        end = len(self.text) - held_back
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
