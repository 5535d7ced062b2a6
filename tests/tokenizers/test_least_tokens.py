"""The lower bound for the number of tokens of a text: never above the number, and 0 where there is no such bound."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanoinfer
import tokenizers as hf
from helpers.trained_tokenizers import byte_fallback, unigram, word_piece
from nanoinfer.checkpoints.tokenizer_files import from_folder
from nanoinfer.tokenizers.limits import _NFC_SHRINKS
from nanoinfer.tokenizers.tokenizer import CharTokenizer, Tokenizer, byte_alphabet, from_core, prepend
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

BUILT_IN = Path(nanoinfer.__file__).parent / "models" / "builtin" / "shakespeare"
NFC = normalizers.NFC()


@cache
def shakespeare() -> Tokenizer:
    found = from_folder(BUILT_IN)
    assert found is not None
    return found


def byte_level(
    *splits: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    merges: tuple[tuple[str, str], ...] = (("a", "a"), ("aa", "aa"), ("Ġ", "a"), ("Ã", "©")),
    added: tuple[AddedToken, ...] = (),
    without: str = "",
) -> Tokenizer:
    """Return a byte-level BPE, without the characters of `without`."""
    tokens = [c for c in byte_alphabet() if c not in without] + [left + right for left, right in merges]
    ids = {token: i for i, token in enumerate(tokens)}
    core = hf.Tokenizer(models.BPE(ids, list(merges)))
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=not splits)])
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    core.add_tokens(list(added))
    return from_core(core)


def characters(**changes: object) -> Tokenizer:
    """Return SentencePiece's BPE with changes of its model."""
    made: hf.Tokenizer = byte_fallback().core  # type: ignore[attr-defined]
    core = hf.Tokenizer.from_str(made.to_str())
    for name, value in changes.items():
        setattr(core.model if name != "normalizer" else core, name, value)
    return from_core(core)


SPLIT = pre_tokenizers.Split(hf.Regex(r" ?\p{L}+|\s+"), "isolated")
BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "built-in": shakespeare,
    "byte level": byte_level,
    "regex": lambda: byte_level(SPLIT),
    "nfc": lambda: byte_level(normalizer=NFC),
    "added": lambda: byte_level(added=(AddedToken("<long token>", normalized=False), AddedToken("é"))),
    "added nfc": lambda: byte_level(normalizer=NFC, added=(AddedToken("\u0958\u0958\u0958\u0958\u0958"),)),
    "start token": lambda: with_start(byte_level()),
    "characters": byte_fallback,
    "no prefix": lambda: characters(normalizer=normalizers.Replace(" ", "▁")),
    "chars": lambda: CharTokenizer("ab é日🎉\u0301\u0308\u1fbe\u0958"),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "WordPiece": word_piece,
    "Unigram": unigram,
    "white space": lambda: byte_level(pre_tokenizers.Whitespace(), SPLIT),
    "shorter": lambda: byte_level(normalizer=normalizers.Replace("aa", "b")),
    "strip": lambda: byte_level(normalizer=normalizers.Sequence([NFC, normalizers.Strip()])),
    "takes white space": lambda: byte_level(added=(AddedToken("<a>", rstrip=True),)),
    "a byte is unknown": lambda: byte_level(without="é"),
    "characters that compose": lambda: characters(normalizer=NFC),
    "no byte fallback": lambda: characters(byte_fallback=False),
}
PIECES = st.sampled_from(
    [*"ab é日🎉", "aaaaaaaa", "    ", "\u1fbe\u0308\u0301", "\u212a", "\u1100\u1161\u11a8", "<long token>", "\u0958",
     "\u0915\u093c", "<a>", "bbbb"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=40).map("".join)


def with_start(tokenizer: Tokenizer) -> Tokenizer:
    core: hf.Tokenizer = tokenizer.core  # type: ignore[attr-defined]
    core.add_special_tokens(["<s>"])
    prepend(core, "<s>", core.token_to_id("<s>"))
    return from_core(core)


@pytest.mark.parametrize("make", BOUNDED.values(), ids=BOUNDED)
def test_a_text_has_at_least_so_many_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()

    @settings(max_examples=60, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        if isinstance(tokenizer, CharTokenizer):
            text = "".join(c for c in text if c in tokenizer.chars)
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))

    check()
    assert tokenizer.least_tokens("a" * 10_000) >= 50


@pytest.mark.parametrize("make", UNBOUNDED.values(), ids=UNBOUNDED)
def test_without_a_bound_it_is_0(make: Callable[[], Tokenizer]) -> None:
    assert make().least_tokens("a" * 10_000) == 0


@pytest.mark.nightly
def test_nfc_shortens_utf8_by_less_than_its_bound() -> None:
    """Each character that NFC produces is worth the longest characters that decompose to its parts."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    parts = {c: unicodedata.normalize("NFD", c) for c in every}
    worth: defaultdict[str, int] = defaultdict(int)
    for c, part in parts.items():
        if len(part) == 1:
            worth[part] = max(worth[part], len(c.encode()))
    assert all(len(c.encode()) <= sum(worth[p] for p in part) for c, part in parts.items())
    produced = [c for c in every if unicodedata.normalize("NFC", c) == c]
    ratios = [sum(worth[p] for p in parts[c]) / len(c.encode()) for c in produced]
    assert 3 < max(ratios) <= _NFC_SHRINKS
