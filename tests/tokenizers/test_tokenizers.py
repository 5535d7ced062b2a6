"""Tokenizers: text survives the round trip, streams equal the whole decode, broken files and ids are errors.

The lower bound for the number of tokens of a text: never above the number, and 0 where there is no such bound.
Decoding streams that continue a prompt: prompt text and streamed text make the text of all tokens."""

from __future__ import annotations

import base64
import json
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import nanoinfer
import tokenizers as hf
from helpers.models import CHARS, make_folder, refuses
from helpers.trained_tokenizers import TEXTS, bpe, byte_fallback, unigram, word_piece
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.tokenizer_files import from_folder
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.tokenizers.limits import _NFC_SHRINKS
from nanoinfer.tokenizers.tokenizer import (
    ByteLevelTokenizer,
    CharTokenizer,
    GenericTokenizer,
    Tokenizer,
    byte_alphabet,
    char_to_json,
    decode,
    fingerprint,
    from_core,
    from_file,
    from_json,
    surround,
    to_json,
)
from nanoinfer.training.data import train_bpe
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

QUICK = settings(max_examples=60, deadline=None)


GENERIC = {"WordPiece": word_piece, "Unigram": unigram, "byte-fallback": byte_fallback}


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.flush()]


# Byte-level BPE --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t[:12])
def test_any_text_survives_byte_level_bpe(text: str) -> None:
    assert decode(bpe(), bpe().encode(text)) == text


@QUICK
@given(st.text(max_size=60))
def test_any_unicode_survives_byte_level_bpe(text: str) -> None:
    assert decode(bpe(), bpe().encode(text)) == text


@QUICK
@given(st.lists(st.integers(0, 319), max_size=40))
def test_a_stream_of_any_tokens_is_their_bytes_decoded(ids: list[int]) -> None:
    whole = b"".join(map(bpe().token_bytes, ids)).decode(errors="replace")
    assert "".join(pieces(bpe(), ids)) == whole
    assert whole == bpe().core.decode(ids, skip_special_tokens=False)  # the library's own bytes


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t[:12])
def test_no_piece_holds_half_a_character(text: str) -> None:
    tokens = train_bpe(["abc"], 256)  # no merges: every byte of every character is a token of its own
    for tokenizer in (bpe(), from_json(tokens, "bytes")):
        made = pieces(tokenizer, tokenizer.encode(text))
        assert "".join(made) == text
        assert "\ufffd" not in "".join(made)


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = from_json(train_bpe(["abc"], 256), "bytes")
    assert pieces(tokenizer, tokenizer.encode("é日🎉")) == ["", "é", "", "", "日", "", "", "", "🎉", ""]


def test_an_unfinished_character_is_flushed_as_one_replacement() -> None:
    tokenizer = from_json(train_bpe(["abc"], 256), "bytes")
    assert pieces(tokenizer, tokenizer.encode("a🎉")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_token_bytes() -> None:
    tokenizer = from_json(train_bpe(["the the the"], 259), "bpe")
    assert isinstance(tokenizer, ByteLevelTokenizer)
    assert tokenizer.token_bytes(258) == b" the"
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([b]) for b in range(256)}


def test_added_tokens_are_text_too() -> None:
    core = hf.Tokenizer.from_str(to_json(bpe()))
    core.add_special_tokens(["<|endoftext|>", "<|é 日|>"])
    core.add_tokens(["plain added"])
    tokenizer = from_json(core.to_str(), "with added")
    assert tokenizer.vocab_size == 323
    assert tokenizer.encode("a<|endoftext|>") == [*bpe().encode("a"), 320]
    assert decode(tokenizer, [320, 321, 322]) == "<|endoftext|><|é 日|>plain added"


# Characters ------------------------------------------------------------------------------------------


@QUICK
@given(st.text(CHARS, max_size=60))
def test_characters_survive_their_json(text: str) -> None:
    tokenizer = from_json(char_to_json(CHARS), "chars")
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.encode(text) == [CHARS.index(c) for c in text]
    assert pieces(tokenizer, tokenizer.encode(text)) == [*text, ""]


@pytest.mark.parametrize("chars", [CHARS, "a", "ba", "日🎉é\x00\n\"\\'", "Ġ▁#"], ids=repr)
def test_a_character_vocabulary_keeps_its_order(chars: str) -> None:
    tokenizer = from_json(to_json(CharTokenizer(chars)), "chars")
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.chars == list(chars)


@pytest.mark.parametrize("char", ["é", "\n", "🎉", "\ud800"])
def test_an_unknown_character_is_named(char: str) -> None:
    refuses(lambda: CharTokenizer("abc").encode(f"ab{char}"), repr(char), "3")


@pytest.mark.parametrize("chars", [[], ["a", "\ud800"]], ids=repr)
def test_a_character_vocabulary_that_no_text_can_hold(chars: list[str]) -> None:
    refuses(lambda: CharTokenizer(chars), "vocabulary")


# Any other kind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", GENERIC.values(), ids=GENERIC)
@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t[:12])
def test_a_generic_stream_equals_the_whole_decode(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    assert isinstance(tokenizer, GenericTokenizer)
    ids = tokenizer.encode(text)
    assert decode(tokenizer, ids) == tokenizer.core.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("make", GENERIC.values(), ids=GENERIC)
@QUICK
@given(text=st.text(max_size=40) | st.text("ab é日🎉", max_size=40))
def test_a_generic_stream_of_any_text_equals_the_whole_decode(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    assert isinstance(tokenizer, GenericTokenizer)
    ids = tokenizer.encode(text)
    assert decode(tokenizer, ids) == tokenizer.core.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("make", [word_piece, unigram])
@QUICK
@given(data=st.data())
def test_a_generic_stream_of_any_tokens_equals_the_whole_decode(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = make()
    assert isinstance(tokenizer, GenericTokenizer)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert decode(tokenizer, ids) == tokenizer.core.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["🎉🎊🎉😀🎉 a", "a b éöü日本語日本 a", "日" * 30])
def test_byte_fallback_makes_whole_characters(text: str) -> None:
    made = pieces(byte_fallback(), byte_fallback().encode(text))
    assert "".join(made) == text
    assert "\ufffd" not in "".join(made)


def test_an_unfinished_character_leaves_the_one_before_whole() -> None:
    ids = byte_fallback().encode("🎉é")
    assert decode(byte_fallback(), ids[:-1]) == "🎉\ufffd"
    assert decode(byte_fallback(), [*ids[:-1], 259]) == "🎉\ufffdb"


def test_a_broken_byte_is_not_held_for_ever() -> None:
    made = pieces(byte_fallback(), [1 + 0x80] * 12)
    assert "".join(made) == "\ufffd" * 12
    assert made[7] == "\ufffd" * 8


# Ids and texts that have no meaning ------------------------------------------------------------------

ALL: dict[str, Callable[[], Tokenizer]] = {**GENERIC, "bpe": bpe, "chars": lambda: CharTokenizer("abc")}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@pytest.mark.parametrize("token_id", [-1, 320, 2**31, 2**40])
def test_an_id_without_text_is_an_error(make: Callable[[], Tokenizer], token_id: int) -> None:
    refuses(lambda: decode(make(), [0, token_id]), f"token id {token_id} ")


@pytest.mark.parametrize("decoder", [None, decoders.ByteLevel()], ids=["generic", "byte-level"])
def test_an_id_in_a_gap_is_shown_not_raised(decoder: decoders.Decoder | None) -> None:
    """It can be drawn, and must not end everybody's request."""
    core = hf.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    core.decoder = decoder
    tokenizer = from_json(core.to_str(), "gap")
    assert tokenizer.vocab_size == 6
    assert decode(tokenizer, [5, 3, 0]) == "b\ufffda"
    refuses(lambda: decode(tokenizer, [6]), "token id 6 ")


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
@pytest.mark.parametrize("text", ["\ud800", "a\udcff", "\udc80\ud800"], ids=repr)
def test_lone_surrogates_are_an_error(make: Callable[[], Tokenizer], text: str) -> None:
    refuses(lambda: make().encode(text))


@pytest.mark.parametrize("make", [bpe, word_piece, unigram])
def test_a_long_text_has_the_tokens_of_the_library(make: Callable[[], Tokenizer]) -> None:
    """It is encoded by another function of the library, which releases Python's global lock."""
    text = " ".join(TEXTS) * (1 + tokenizers.LONG_TEXT // len(" ".join(TEXTS)))
    assert len(text) >= tokenizers.LONG_TEXT
    core = make().core  # type: ignore[attr-defined]
    assert make().encode(text) == core.encode(text, add_special_tokens=False).ids


def test_text_that_the_tokenizer_cannot_encode_is_an_error() -> None:
    core = hf.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))  # whose unknown token is unknown
    tokenizer = from_json(core.to_str(), "no unk")
    refuses(lambda: tokenizer.encode("b"), "[UNK]")


# Files -----------------------------------------------------------------------------------------------


def test_vocab_and_merges_make_the_same_tokenizer(tmp_path: Path) -> None:
    spec = json.loads(to_json(bpe()))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"] | {"<|endoftext|>": 320}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in spec["merges"]))
    tokenizer = from_folder(tmp_path)
    assert isinstance(tokenizer, ByteLevelTokenizer)
    assert tokenizer.vocab_size == 321
    for text in TEXTS:
        assert tokenizer.encode(text) == bpe().encode(text)
        assert decode(tokenizer, tokenizer.encode(text)) == text
    assert tokenizer.encode("<|endoftext|>") == [320]


def test_tokenizer_json_comes_before_vocab_and_merges(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(char_to_json("abc"))
    (tmp_path / "vocab.json").write_text("broken")
    (tmp_path / "merges.txt").write_text("broken")
    assert isinstance(from_folder(tmp_path), CharTokenizer)


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")  # alone it says nothing
    assert from_folder(tmp_path) is None


@pytest.mark.parametrize(
    "vocab,merges",
    [
        (b"{}", b""),
        (b'{"a": -1}', b""),
        (b'{"a": "x"}', b""),
        (b'{"a": 0, "b": 1}', b"a b\n"),  # the merged token is not in the vocabulary
        (b'{"a": 0}', b"a\n"),
        (b'{"a": 0}', b"\xff\xfe"),
    ],
    ids=lambda v: repr(v[:20]),
)
def test_broken_vocab_and_merges(tmp_path: Path, vocab: bytes, merges: bytes) -> None:
    (tmp_path / "vocab.json").write_bytes(vocab)
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\n" + merges)
    refuses(lambda: from_folder(tmp_path), "vocab.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b'{"model": []}', b'{"model": {}}'],
    ids=lambda v: repr(v[:20]),
)
def test_a_tokenizer_json_of_garbage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    refuses(lambda: from_file(tmp_path / "tokenizer.json"), "tokenizer.json")


@pytest.mark.parametrize(
    "where,value",
    [
        (["version"], "9.9"),
        (["model", "type"], "Unknown"),
        (["model", "type"], "Unigram"),
        (["model", "vocab"], {}),
        (["model", "vocab"], {"a": -1}),
        (["model", "vocab"], {"a": 2**40}),
        (["model", "merges"], [["a"]]),
        (["model", "merges"], [["no", "such"]]),
        (["model", "continuing_subword_prefix"], "a b"),  # makes the library's Rust code panic
        (["decoder"], "ByteLevel"),
        (["pre_tokenizer"], {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        (["added_tokens"], [{"id": "x"}]),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_a_tokenizer_json_with_one_thing_wrong(where: list[str], value: object) -> None:
    spec: dict[str, Any] = json.loads(to_json(bpe()))
    part = spec
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    refuses(lambda: from_json(json.dumps(spec), "some/tokenizer.json"), "some/tokenizer.json")


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 2}, {"a": 0, "b": 0}, {"a": "0"}, {"\ud800": 0}, {}], ids=str)
def test_a_character_json_with_bad_ids(vocab: dict[str, object]) -> None:
    spec = json.loads(char_to_json("ab"))
    spec["model"]["vocab"] = vocab
    refuses(lambda: from_json(json.dumps(spec), "some/tokenizer.json"), "some/tokenizer.json")


def test_a_tokenizer_json_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "MAX_TOKENIZER_BYTES", 100)
    (tmp_path / "tokenizer.json").write_text(char_to_json(CHARS))
    refuses(lambda: from_file(tmp_path / "tokenizer.json"), "100", str(len(char_to_json(CHARS))))


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_tables_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tokenizers, "MAX_TOKENIZER_BYTES", 100)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / name).write_text(" " * 101)
    refuses(lambda: from_folder(tmp_path), "101", "100", name)


# Limits ----------------------------------------------------------------------------------------------


def with_parts(tokenizer: Tokenizer, **parts: object) -> str:
    return json.dumps(json.loads(to_json(tokenizer)) | parts)


TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 400}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0,
    "pad_token": "x",
}  # fmt: skip


def test_truncation_and_padding_are_off() -> None:
    text = "the " * 320
    ids = bpe().encode(text)
    assert len(ids) >= 320
    for parts in ({"truncation": TRUNCATION}, {"padding": PADDING}, {"truncation": TRUNCATION, "padding": PADDING}):
        assert from_json(with_parts(bpe(), **parts), "cut").encode(text) == ids
        assert from_json(with_parts(bpe(), **parts), "cut").encode("a") == bpe().encode("a")


def test_a_padding_that_would_end_the_process_is_left_out() -> None:
    huge = PADDING | {"strategy": {"Fixed": 2**33}}
    assert from_json(with_parts(bpe(), padding=huge), "padded").encode("a") == bpe().encode("a")


def replace_by(content: str, **pattern: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def chain(kind: str, step: dict[str, object], times: int) -> dict[str, object]:
    return {"type": "Sequence", kind: [step] * times}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING: dict[str, dict[str, object]] = {
    "replace": {"normalizer": chain("normalizers", replace_by("aa"), 40)},
    "nested": {"normalizer": chain("normalizers", chain("normalizers", replace_by("aa"), 20), 2)},
    "empty pattern": {"normalizer": chain("normalizers", replace_by("a", Regex=""), 40)},
    "bytes": {"pre_tokenizer": chain("pretokenizers", BYTES, 40)},
    "normalizer and pre-tokenizer": {
        "normalizer": chain("normalizers", replace_by("aa"), 6),
        "pre_tokenizer": chain("pretokenizers", BYTES, 6),
    },
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "a" * 2000}},
    "decoder": {"decoder": chain("decoders", replace_by("aa"), 40)},
    "steps": {"normalizer": chain("normalizers", {"type": "Lowercase"}, 200)},
    "precompiled": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(bytes(4) + b"a\0" + b"b" * 2000).decode(),
        }
    },
}


@pytest.mark.parametrize("parts", GROWING.values(), ids=GROWING)
def test_a_chain_that_explodes_is_refused(parts: dict[str, object]) -> None:
    refuses(
        lambda: from_json(with_parts(bpe(), **parts), "some/tokenizer.json"),
        "some/tokenizer.json",
        "steps" if "Lower" in str(parts) else "1024 times",
    )


def test_a_pattern_that_backtracks_without_end_is_an_error() -> None:
    """The library's own limit: half a second, then the text is refused."""
    step = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    tokenizer = from_json(with_parts(bpe(), pre_tokenizer=step), "slow")
    refuses(lambda: tokenizer.encode("a" * 100), "cannot be encoded")


def test_a_tokenizer_file_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    refuses(lambda: from_file(tmp_path / "tokenizer.json"), "pipe")


def test_fingerprints() -> None:
    prints = [fingerprint(CharTokenizer(c)) for c in (CHARS, CHARS[::-1], CHARS[:-1])]
    assert len(set(prints)) == 3
    assert fingerprint(from_json(char_to_json(CHARS), "there")) == prints[0]


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
DRAWN = st.lists(PIECES, max_size=40).map("".join)


def with_start(tokenizer: Tokenizer) -> Tokenizer:
    core: hf.Tokenizer = tokenizer.core  # type: ignore[attr-defined]
    core.add_special_tokens(["<s>"])
    surround(core, ("<s>", core.token_to_id("<s>")))
    return from_core(core)


@pytest.mark.parametrize("make", BOUNDED.values(), ids=BOUNDED)
def test_a_text_has_at_least_so_many_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()

    @settings(max_examples=60, deadline=None)
    @given(DRAWN)
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


BYTE_TOKENS = {f"<0x{b:02X}>": b for b in (0x41, 0x80, 0x81, 0xA9, 0xC3, 0xE6, 0x97, 0xA5, 0xF0, 0x9F)}


@cache
def word_level(decoder: str) -> Tokenizer:
    """A vocabulary without merges, whose decoder is what is tested."""
    made: dict[str, tuple[list[str], decoders.Decoder | None]] = {
        "metaspace-first": (["▁", "▁the", "engine", "▁▁", "</s>", "é"], decoders.Metaspace(prepend_scheme="first")),
        "metaspace-always": (["▁", "▁the", "engine", "▁▁", "</s>", "é"], decoders.Metaspace(prepend_scheme="always")),
        "metaspace-never": (["▁", "▁the", "engine", "▁▁", "</s>", "é"], decoders.Metaspace(prepend_scheme="never")),
        "wordpiece": (["the", "##s", "n't", ",", "[SEP]", "do", "'"], decoders.WordPiece(cleanup=False)),
        "wordpiece-cleanup": (["the", "##s", "n't", ",", ".", "do", "'", "not"], decoders.WordPiece(cleanup=True)),
        "suffix": (["the</w>", "en", "gine</w>", "</w>", ",</w>"], decoders.BPEDecoder()),
        "joined": (["the", "engine", ""], None),
        "bytes": (
            ["▁", "▁the", "é", "\ufffd", *BYTE_TOKENS],
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
        ),
        "byte-level-in-sequence": (["Ġthe", "Ã", "©", "æ", "Ĺ", "¥", "a"], decoders.Sequence([decoders.ByteLevel()])),
    }
    vocab, use = made[decoder]
    core = hf.Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocab)}, unk_token=vocab[0]))
    core.decoder = use
    tokenizer = from_json(core.to_str(), decoder)
    assert isinstance(tokenizer, GenericTokenizer)
    return tokenizer


WORD_LEVEL = (
    "metaspace-first metaspace-always metaspace-never wordpiece wordpiece-cleanup suffix joined bytes"
    " byte-level-in-sequence"
).split()
STREAMED: dict[str, Callable[[], Tokenizer]] = {
    **{name: partial(word_level, name) for name in WORD_LEVEL},
    "trained-wordpiece": word_piece,
    "unigram": unigram,
    "byte-fallback": byte_fallback,
    "byte-level": bpe,
    "chars": lambda: CharTokenizer("ab é🎉"),
}


def whole(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The definition: everything decoded at once, by the library itself."""
    if isinstance(tokenizer, CharTokenizer):
        return "".join(tokenizer.chars[i] for i in ids)
    text: str = tokenizer.core.decode(list(ids), skip_special_tokens=False)  # type: ignore[attr-defined]
    return text


def continued(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream(prompt)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("name", STREAMED)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prompt_and_stream_make_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = STREAMED[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    split = data.draw(st.integers(0, len(ids)))
    prompt, text = whole(tokenizer, ids[:split]), whole(tokenizer, ids)
    # Where a later byte spoils characters that were complete before it, no stream can take them back.
    assume(all(text.startswith(whole(tokenizer, ids[:k]).rstrip("\ufffd")) for k in range(split, len(ids))))
    if name == "byte-level-in-sequence":  # a tail that might become a character is held for 8 tokens, not for ever
        inside = [whole(tokenizer, ids[:k]).endswith("\ufffd") for k in range(1, len(ids) + 1)]
        assume(not any(all(inside[k : k + 8]) for k in range(len(ids) - 7)))
    made = continued(tokenizer, ids[:split], ids[split:])
    if text.startswith(prompt):
        assert prompt + "".join(made) == text
    else:  # the prompt ends inside a character: the stream begins with all of it
        assert prompt.endswith("\ufffd")
        common = next(i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b)
        assert "".join(made) == text[common:]
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(made)


@pytest.mark.parametrize(
    "name,prompt,ids,expected",
    [
        ("metaspace-first", [1], [2, 1], ["engine", " the", ""]),
        ("metaspace-always", [2], [1, 0], [" the", " ", ""]),
        ("metaspace-first", [], [1, 1], ["the", " the", ""]),
        ("wordpiece", [0], [0, 1, 3], [" the", "s", " ,", ""]),
        ("wordpiece", [], [0, 1], ["the", "s", ""]),
        ("wordpiece-cleanup", [5], [2, 3, 0], ["n't", ",", " the", ""]),
        ("suffix", [0], [1, 2, 0], [" en", "gine", " the", ""]),
        ("joined", [0], [1], [" engine", ""]),
        ("bytes", [1], [1, 8, 7, 1], [" the", "", "é", " the", ""]),
        ("bytes", [1, 8], [7, 1], ["é", " the", ""]),  # half of it is the prompt's
        ("bytes", [1, 9], [10, 11], ["", "日", ""]),
        ("bytes", [1, 9], [0], [" ", ""]),  # the prompt's text ends with the U+FFFD already
    ],
)
def test_pieces_by_hand(name: str, prompt: list[int], ids: list[int], expected: list[str]) -> None:
    ids_of = {t: i for i, t in enumerate(["▁", "▁the", "é", "\ufffd", *BYTE_TOKENS])}
    assert [ids_of["<0xA9>"], ids_of["<0xC3>"], ids_of["<0xE6>"], ids_of["<0x97>"]] == [7, 8, 9, 10]
    assert continued(word_level(name), prompt, ids) == expected


def test_a_character_that_the_prompt_began() -> None:
    ids = bpe().encode("x")
    tail = [bpe().core.token_to_id(c) for c in "ðŁİī"]  # the four bytes of the emoji
    assert continued(bpe(), tail[:1], tail[1:]) == ["", "", "🎉", ""]
    assert continued(bpe(), tail[:3], [ids[0]]) == ["x", ""]  # the prompt's text ends with U+FFFD
    assert continued(bpe(), tail[:3], []) == [""]
    assert continued(bpe(), tail, [ids[0]]) == ["x", ""]


@pytest.mark.parametrize("name", STREAMED)
def test_the_prompt_may_hold_ids_without_text(name: str) -> None:
    """A model's vocabulary may be padded past its tokenizer's: such ids can be given, not drawn."""
    tokenizer = STREAMED[name]()
    assert continued(tokenizer, [1, tokenizer.vocab_size + 7], [1]) == continued(tokenizer, [], [1])
    assert continued(tokenizer, [1, -1], [1]) == continued(tokenizer, [], [1])


class Counted:
    """A tokenizer's core that notes how many tokens each call decodes."""

    def __init__(self, core: hf.Tokenizer) -> None:
        self._core, self.sizes = core, list[int]()

    def decode(self, ids: list[int], **options: Any) -> str:
        self.sizes.append(len(ids))
        text: str = self._core.decode(ids, **options)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


@pytest.mark.parametrize("name", WORD_LEVEL)
def test_a_long_prompt_is_not_decoded_for_every_token(name: str) -> None:
    plain = word_level(name)
    assert isinstance(plain, GenericTokenizer)
    counted = Counted(plain.core)
    made = continued(GenericTokenizer(counted), [1] * 1000, [1] * 50)  # type: ignore[arg-type]
    assert whole(plain, [1] * 1000) + "".join(made) == whole(plain, [1] * 1050)
    assert max(counted.sizes) <= 4 + 64 + 8  # 4 + 8, save for a run of broken bytes


@settings(max_examples=30, deadline=None)
@example(start=1000, seed=0)
@given(start=st.integers(0, 300), seed=st.integers(0, 9))
def test_a_prompt_of_bytes_alone(start: int, seed: int) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("日本語é" * 100)
    start = min(start + seed, len(ids) - 20)
    prompt, text = (
        whole(tokenizer, ids[:start]).rstrip("\ufffd"),
        "".join(continued(tokenizer, ids[:start], ids[start:])),
    )
    assert text.endswith("日本語é")
    assert "\ufffd" not in text
    if whole(tokenizer, ids[:start]) == prompt:
        assert prompt + text == whole(tokenizer, ids)


@pytest.mark.parametrize("params", [{"n": 3}, {"overflow": "slide", "max_tokens": 60}], ids=str)
@pytest.mark.parametrize("name", ["wordpiece", "metaspace-first"])
def test_generate_keeps_the_joining_space(tmp_path: Path, name: str, params: dict[str, Any]) -> None:
    tokens = [f"{'▁' if name == 'metaspace-first' else ''}w{i}" for i in range(len(CHARS))]
    core = hf.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0]))
    core.decoder = decoders.WordPiece() if name == "wordpiece" else decoders.Metaspace()
    folder = make_folder(tmp_path / "m", chars=None)
    (folder / "tokenizer.json").write_text(core.to_str(), encoding="utf-8")
    llm = LLM(str(folder), engine="static")
    prompt = [3, 4, 5]
    (output,) = llm.generate([prompt], SamplingParams(**{"max_tokens": 12, "seed": 0} | params))
    assert core.decode(prompt) == "w3 w4 w5"
    for one in output.outputs:
        assert "w3 w4 w5" + one.text == core.decode([*prompt, *one.token_ids])
        assert llm.decode(one.token_ids) == decode(from_json(core.to_str(), ""), one.token_ids) == one.text[1:]
