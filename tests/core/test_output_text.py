"""Where a stop string ends a text, and that nothing is shown that is taken back afterwards."""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoinfer.scheduling.text import OutputText


class Pieces:
    """A token stream on a table: token i is the i-th piece of UTF-8; half characters wait for their rest."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def run(pieces: Sequence[bytes], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, list[str], str | None]:
    """Push all pieces; return the final text, what was shown after each token and at the end, the stop string."""
    text = OutputText(Pieces(pieces), stop)
    shown: list[str] = []
    found = None
    for i in range(len(pieces)):
        found = text.push(i, may_stop=i + 1 >= min_tokens)
        if found is not None:
            break
        shown.append(text.take(finished=False))
    else:
        found = text.flush(may_stop=len(pieces) >= min_tokens)
    shown.append(text.take(finished=True))
    return text.text, shown, found


def cut(text: str, stop: Sequence[str], after: int) -> tuple[str, str | None]:
    """The definition: cut before the stop string whose end comes first, of those that end later than `after`."""
    for end in range(after + 1, len(text) + 1):
        for start in range(end):  # the earliest start of those with this end
            if text[start:end] in stop:
                return text[:start], text[start:end]
    return text, None


@settings(max_examples=100, deadline=None)
@given(
    st.text("aab", max_size=20) | st.text("ab\né😀", max_size=20),
    st.lists(st.text("aab", min_size=1, max_size=4) | st.text("ab\né😀\ufffd", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 40), max_size=12),
    st.integers(0, 5),
    st.booleans(),
)
@example("xabc", ["ab", "bc"], [1, 2, 3], 4, False)  # "bc" begins inside an "ab" that did not count
@example("aaa", ["aa"], [2], 2, False)
@example("abé", ["\ufffd"], [1], 0, True)
def test_any_text_in_any_tokens(text: str, stop: list[str], cuts: list[int], min_tokens: int, damaged: bool) -> None:
    raw = text.encode()[: -1 if damaged else None]
    borders = [0, *sorted(c % (len(raw) + 1) for c in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(borders)]
    if len(pieces) < min_tokens:
        uncounted = raw.decode(errors="replace")
    else:
        uncounted = codecs.getincrementaldecoder("utf-8")().decode(b"".join(pieces[: max(0, min_tokens - 1)]))
    expected, expected_stop = cut(raw.decode(errors="replace"), stop, len(uncounted))

    final, shown, found = run(pieces, stop, min_tokens)
    assert (final, found) == (expected, expected_stop)
    assert "".join(shown) == final


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(0, 12),
)
@example(["aabaab", "aac"], ["aabaac"], 0)
@example(["aa", "a", "a"], ["aaa"], 3)
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop_string(
    pieces: list[str], stop: list[str], min_tokens: int
) -> None:
    final, shown, found = run([p.encode() for p in pieces], stop, min_tokens)
    text, seen = "", ""
    for piece, new in zip(pieces[: len(shown) - 1], shown[:-1], strict=False):
        text, seen = text + piece, seen + new
        held = max(
            n for n in range(len(text) + 1) if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stop)
        )
        assert seen == text[: max(len(text) - held, len(seen) - len(new))]
    assert (final, found) == cut("".join(pieces), stop, len("".join(pieces[: max(0, min_tokens - 1)])))


def test_long_stop_strings_cost_time_linear_in_the_text() -> None:
    """One of 4,000 characters took 2.4 ms for a token, in a text that keeps looking like the beginning of it."""
    n = 16_000
    text = OutputText(Pieces([b"aaaa", b"abab"]), ["a" * n + "c", "ab" * (n // 2) + "c", "x" * n])
    start = time.process_time()
    shown = []
    for i in range(n):
        assert text.push(i // (n // 2)) is None
        shown.append(text.take(finished=False))
    assert time.process_time() - start < 2.0  # 0.1 s; it was more than 20 s
    assert "".join(shown) == "a" * (2 * n) + "ab" * (n // 2)
    assert text.text == "a" * (2 * n) + "ab" * n


@pytest.mark.parametrize(
    "pieces, stop, shown, stopped",
    [
        (["a", "\n", "b", "\n", "\nc"], ["\n\n"], ["a", "", "\nb", "", ""], "\n\n"),
        (["x END", " y"], ["END"], ["x "], "END"),
        (["x E", "N", "D"], ["END"], ["x ", "", ""], "END"),
        (["x E", "N", "O"], ["END"], ["x ", "", "ENO", ""], None),
        (["x E", "N"], ["END"], ["x ", "", "EN"], None),  # the text ends: nothing is held back any more
        (["ab", "c"], ["abc", "b"], ["a"], "b"),  # ends first, though it begins later
        (["a", "abc"], ["bc", "abc"], ["", "a"], "abc"),  # same end: the one that begins first
        (["a", "a", "b"], ["aab", "ab"], ["", "", ""], "aab"),
        (["stop"], ["stop"], [""], "stop"),
        (["a", "", "b"], [], ["a", "", "b", ""], None),
    ],
)
def test_pieces_shown_by_hand(pieces: list[str], stop: list[str], shown: list[str], stopped: str | None) -> None:
    _, got, found = run([p.encode() for p in pieces], stop)
    assert (got, found) == (shown, stopped)


def test_half_a_character_is_never_shown() -> None:
    assert run([b"\xf0\x9f", b"\x98", b"\x80!"], []) == ("😀!", ["", "", "😀!", ""], None)
    assert run([b"a\xf0\x9f", b"b"], []) == ("a\ufffdb", ["a", "\ufffdb", ""], None)


def test_a_stop_string_may_end_in_the_flushed_tail() -> None:
    assert run([b"ab", b"\xf0\x9f"], ["b\ufffd"]) == ("a", ["a", "", ""], "b\ufffd")
    assert run([b"ab", b"\xf0\x9f"], ["b\ufffd"], min_tokens=3) == ("ab\ufffd", ["a", "", "b\ufffd"], None)


def test_a_stop_string_completed_before_min_tokens_never_counts() -> None:
    assert run([b"ab", b"c", b"ab"], ["ab"], min_tokens=2) == ("abc", ["ab", "c", ""], "ab")
    assert run([b"ab", b"cd"], ["ab"], min_tokens=2) == ("abcd", ["ab", "cd", ""], None)


def test_a_stop_string_completed_at_min_tokens_counts_wherever_it_began() -> None:
    assert run([b"xa", b"b", b"c"], ["ab", "bc"], min_tokens=3)[::2] == ("xa", "bc")
    assert run([b"aa", b"a"], ["aa"], min_tokens=2)[::2] == ("a", "aa")


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    text = OutputText(None, ())
    assert (text.push(3), text.flush(), text.take(finished=True), text.text) == (None, None, "", "")
