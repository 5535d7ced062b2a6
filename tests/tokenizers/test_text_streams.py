"""Decoding streams that continue a prompt: prompt text and streamed text make the text of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import tokenizers as hf
from helpers.models import CHARS, make_folder
from helpers.trained_tokenizers import bpe, byte_fallback, unigram, word_piece
from nanoinfer import LLM, SamplingParams
from nanoinfer.tokenizers.tokenizer import CharTokenizer, GenericTokenizer, Tokenizer, decode, from_json
from tokenizers import decoders, models

BYTES = {f"<0x{b:02X}>": b for b in (0x41, 0x80, 0x81, 0xA9, 0xC3, 0xE6, 0x97, 0xA5, 0xF0, 0x9F)}


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
            ["▁", "▁the", "é", "\ufffd", *BYTES],
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
ALL: dict[str, Callable[[], Tokenizer]] = {
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


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream(prompt)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prompt_and_stream_make_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    split = data.draw(st.integers(0, len(ids)))
    prompt, text = whole(tokenizer, ids[:split]), whole(tokenizer, ids)
    # Where a later byte spoils characters that were complete before it, no stream can take them back.
    assume(all(text.startswith(whole(tokenizer, ids[:k]).rstrip("\ufffd")) for k in range(split, len(ids))))
    if name == "byte-level-in-sequence":  # a tail that might become a character is held for 8 tokens, not for ever
        inside = [whole(tokenizer, ids[:k]).endswith("\ufffd") for k in range(1, len(ids) + 1)]
        assume(not any(all(inside[k : k + 8]) for k in range(len(ids) - 7)))
    made = pieces(tokenizer, ids[:split], ids[split:])
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
    ids_of = {t: i for i, t in enumerate(["▁", "▁the", "é", "\ufffd", *BYTES])}
    assert [ids_of["<0xA9>"], ids_of["<0xC3>"], ids_of["<0xE6>"], ids_of["<0x97>"]] == [7, 8, 9, 10]
    assert pieces(word_level(name), prompt, ids) == expected


def test_a_character_that_the_prompt_began() -> None:
    ids = bpe().encode("x")
    tail = [bpe().core.token_to_id(c) for c in "ðŁİī"]  # the four bytes of the emoji
    assert pieces(bpe(), tail[:1], tail[1:]) == ["", "", "🎉", ""]
    assert pieces(bpe(), tail[:3], [ids[0]]) == ["x", ""]  # the prompt's text ends with U+FFFD
    assert pieces(bpe(), tail[:3], []) == [""]
    assert pieces(bpe(), tail, [ids[0]]) == ["x", ""]


@pytest.mark.parametrize("name", ALL)
def test_the_prompt_may_hold_ids_without_text(name: str) -> None:
    """A model's vocabulary may be padded past its tokenizer's: such ids can be given, not drawn."""
    tokenizer = ALL[name]()
    assert pieces(tokenizer, [1, tokenizer.vocab_size + 7], [1]) == pieces(tokenizer, [], [1])
    assert pieces(tokenizer, [1, -1], [1]) == pieces(tokenizer, [], [1])


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
    made = pieces(GenericTokenizer(counted), [1] * 1000, [1] * 50)  # type: ignore[arg-type]
    assert whole(plain, [1] * 1000) + "".join(made) == whole(plain, [1] * 1050)
    assert max(counted.sizes) <= 4 + 64 + 8  # 4 + 8, save for a run of broken bytes


@settings(max_examples=30, deadline=None)
@example(start=1000, seed=0)
@given(start=st.integers(0, 300), seed=st.integers(0, 9))
def test_a_prompt_of_bytes_alone(start: int, seed: int) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("日本語é" * 100)
    start = min(start + seed, len(ids) - 20)
    prompt, text = whole(tokenizer, ids[:start]).rstrip("\ufffd"), "".join(pieces(tokenizer, ids[:start], ids[start:]))
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
