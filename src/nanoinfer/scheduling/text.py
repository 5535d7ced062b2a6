"""The output text of one sequence: which part of it can be streamed already, and where a stop string ends it.

A stop string may span several tokens, so text that may be the beginning of a stop string is held back until later
tokens decide:

    stop = ("\\n\\n",)   tokens   "a" "\\n" "b"   "\\n" "\\nc"
                       streamed "a" ""   "\\nb" ""   -> stopped, text "a\\nb"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from nanoinfer.tokenizers.tokenizer import DecodeStream


@lru_cache(maxsize=64)
def _borders(s: str) -> list[int]:
    """Return for each k the length of the longest proper prefix of s[:k] that is also its suffix.

    This is the failure function of Knuth, Morris and Pratt (1977): "aab" -> [0, 0, 1, 0].
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
    """Matches one stop string against a growing text, in amortised O(1) for each character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Length of the longest suffix of the text that is a proper prefix of the stop string."""
        self._borders = _borders(stop)

    def push(self, piece: str) -> int | None:
        """Add characters; return the number of them up to the end of the first match, or None without a match."""
        stop, borders, k, end = self.stop, self._borders, self.length, None
        if not k and stop[0] not in piece:
            return None
        for i, c in enumerate(piece, 1):
            while k and stop[k] != c:
                k = borders[k]
            k += stop[k] == c
            if k == len(stop):
                end = end or i
                k = borders[k]
        self.length = k
        return end


class OutputText:
    """Collects the output text of one sequence and checks it for stop strings.

    Args:
        stream: decodes tokens; None for a model without a tokenizer, whose text stays empty.
        stop: strings that end the sequence.
        skipped: tokens that are left out of the text, with their own text. One that is a stop string ends the sequence.
        include_stop: whether the text contains the stop string.
    """

    def __init__(
        self,
        stream: DecodeStream | None,
        stop: Sequence[str],
        skipped: Mapping[int, str] | None = None,
        *,
        include_stop: bool = False,
    ) -> None:
        self._stream = stream
        self._stop, self._skipped, self._include_stop = stop, skipped or {}, include_stop
        self._matches = [_Match(s) for s in stop]
        self.text = ""
        """The whole text so far, including the part that is held back."""
        self._shown = 0
        self._num_held_back = 0  # characters at the end that may be the beginning of a stop string

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token; return the stop string that it completes, if any. The text is truncated there.

        Args:
            token_id: the token.
            may_stop: False before min_tokens is reached; a stop string that the token completes is then ignored.
        """
        if self._stream is None:
            return None
        if (content := self._skipped.get(token_id)) is not None:
            return content if may_stop and content in self._stop else None
        return self._grow(self._stream.push(token_id), may_stop)

    def flush(self, *, may_stop: bool = True) -> str | None:
        """Add the stream's remaining text; return the stop string that it completes, if any."""
        if self._stream is None:
            return None
        return self._grow(self._stream.flush(), may_stop)

    def _grow(self, piece: str, may_stop: bool) -> str | None:
        """Append to the text; return the stop string that ends first in the new part, truncating the text there."""
        old = len(self.text)
        self.text += piece
        if not self._matches:
            return None
        ends, self._num_held_back = [], 0
        for m in self._matches:
            # Push even if stop strings are ignored now: the beginning of a later match may be in this piece.
            if (end := m.push(piece)) is not None:
                ends.append((end, -len(m.stop), m.stop))
            if m.length > self._num_held_back:
                self._num_held_back = m.length
        if not ends or not may_stop:
            return None
        end, _, stop = min(ends)  # if several end at the same place, the longest
        self.text = self.text[: old + end - (0 if self._include_stop else len(stop))]
        return stop

    def take(self, *, finished: bool) -> str:
        """Return the text that can be streamed since the last call.

        Args:
            finished: whether the sequence is finished, so that no text is held back.
        """
        end = len(self.text) - (0 if finished else self._num_held_back)
        if end <= self._shown:
            return ""
        piece, self._shown = self.text[self._shown : end], end
        return piece
