"""Tokenizers of folders without a tokenizer.json: tables of merges, SentencePiece models, tables of ranks."""

from __future__ import annotations

import base64
import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from helpers.models import refuses
from helpers.trained_tokenizers import TEXTS, bpe
from nanoinfer.checkpoints import tokenizer_files
from nanoinfer.checkpoints.gguf.splits import SPLITS
from nanoinfer.checkpoints.load import load_tokenizer
from nanoinfer.checkpoints.tokenizer_files import from_folder
from nanoinfer.tokenizers.tokenizer import byte_level, decode, to_json

END, THINK = "<|im_end|>", "<think>"
AS_DECODER = {
    "tokenizer_config.json": {
        "tokenizer_class": "Qwen2TokenizerFast",
        "added_tokens_decoder": {"400": {"content": END, "special": True}, "401": {"content": THINK, "special": False}},
    }
}
AS_TABLE = {
    "added_tokens.json": {END: 400, THINK: 401},
    "special_tokens_map.json": {"additional_special_tokens": [{"content": END}]},
    "config.json": {"model_type": "qwen3"},
}


def write_tables(folder: Path, files: dict[str, Any]) -> None:
    model = json.loads(to_json(bpe()))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("files", [AS_DECODER, AS_TABLE])
def test_vocab_and_merges_have_added_tokens_and_the_splitting_of_the_family(
    files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tables(tmp_path, files)
    tokenizer = from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode(f"a{END}{THINK}") == [*bpe().encode("a"), 400, 401]
    assert tokenizer.special_tokens == {400: END}
    assert decode(tokenizer, [400, 401]) == END + THINK
    core = byte_level(bpe().core.model, SPLITS["qwen2"].patterns)  # type: ignore[attr-defined]
    for text in ("it's 1234", *TEXTS):
        assert tokenizer.encode(text) == core.encode(text).ids
    assert tokenizer.encode("e\u0301") == bpe().encode("\u00e9")  # NFC
    assert not caplog.records


def test_text_of_an_unknown_family_is_split_as_gpt2s_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tables(tmp_path, {"config.json": {"model_type": "llama"}})
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(str(tmp_path)).encode("it's 1234") == bpe().encode("it's 1234")
    assert "text is split as GPT-2's" in caplog.text


@pytest.mark.parametrize("added", [{"a": 400}, {END: 5}, {END: -1}, {END: "x"}, {"": 400}, {END: 10**7}])
def test_added_tokens_that_contradict_the_vocabulary_are_refused(added: dict[str, Any], tmp_path: Path) -> None:
    write_tables(tmp_path, {"added_tokens.json": added})
    refuses(lambda: from_folder(tmp_path), "added token")


# SentencePiece ---------------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    """Return a varint of protobuf."""
    head = bytes([value & 127])
    return bytes([head[0] | 128]) + number(value >> 7) if value > 127 else head


def field(index: int, value: int | float | bytes) -> bytes:
    """Return a field of protobuf."""
    if isinstance(value, int):
        return number(index << 3) + number(value)
    if isinstance(value, float):
        return number(index << 3 | 5) + struct.pack("<f", value)
    return number(index << 3 | 2) + number(len(value)) + value


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0xC3>", 0.0, 6), ("<0xA9>", 0.0, 6),
          ("▁", -1.0, 1), ("a", -1.0, 1), ("b", -1.0, 1), ("ab", -0.6, 1), ("▁ab", -0.7, 1),
          ("▁a", -0.8, 1)]  # fmt: skip
UNIGRAM = [("ab", -2.5), ("▁ab", -2.5), ("▁a", -0.2)]


def sentencepiece(pieces: list[tuple[str, float, int]], kind: int = 2, **normalizer: int) -> bytes:
    """Return a model; the normalizer's fields as n3=0."""
    messages = [field(1, field(1, text.encode()) + field(2, score) + field(3, of)) for text, score, of in pieces]
    rules = b"".join(field(int(name[1:]), value) for name, value in ({"n4": 0} | normalizer).items())
    return b"".join(messages) + field(2, field(3, kind) + field(35, 1)) + field(3, rules)


@pytest.mark.parametrize("text,bpe_ids,unigram_ids", [
    ("abba", [9, 7, 6], [10, 7, 7, 6]), ("é", [5, 3, 4], [5, 3, 4]), ("a  b", [10, 5, 5, 7], [10, 5, 5, 7]),
    ("", [], []), ("a<|x|>b", [10, 12, 5, 7], [10, 12, 5, 7]),
])  # fmt: skip
def test_a_sentencepiece_model_alone_is_read(
    text: str, bpe_ids: list[int], unigram_ids: list[int], tmp_path: Path
) -> None:
    """The ids follow from the scores: the pair of the best score is merged first; the best sum of scores is taken."""
    path = tmp_path / "tokenizer.model"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|x|>": 12}))  # 11 is a gap
    scores = dict(UNIGRAM)
    unigram = [(text, scores.get(text, score), kind) for text, score, kind in PIECES]
    for content, ids in ((sentencepiece(PIECES), bpe_ids), (sentencepiece(unigram, 1), unigram_ids)):
        path.write_bytes(content)
        for tokenizer in (load_tokenizer(str(tmp_path)), load_tokenizer(str(path))):
            assert tokenizer.encode(text) == ids
            assert tokenizer.bos_token_id == 1
        assert decode(tokenizer, ids) == text.replace("<|x|>b", "<|x|> b")


def test_what_a_sentencepiece_model_says_of_spaces_and_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece(PIECES, n4=1))  # spaces are collapsed
    assert load_tokenizer(str(path)).encode("  a   b ") == [10, 5, 7]
    path.write_bytes(sentencepiece(PIECES, n3=0))  # no space is put before a text
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.encode("a b"), tokenizer.bos_token_id) == ([6, 5, 7], None)


@pytest.mark.parametrize("content,message", [
    (b"", "not a list of one or more tokens"),
    (b"\x0a\x7f", "longer than the file"),
    (b"\xff" * 20, "a number does not end"),
    (b"\x0b", "wire type 3"),
    (sentencepiece(PIECES, kind=3), "model_type=3 is not supported"),
    (sentencepiece(PIECES, n5=0), "white space"),
    (sentencepiece([*PIECES, ("a", 0.0, 1)]), "twice"),
    (sentencepiece([*PIECES, ("c", float("nan"), 1)]), "not finite"),
    (field(1, field(1, b"\xff")), "utf-8"),
    (sentencepiece(PIECES) + field(3, field(2, b"\x01\x02\x03\x04x")), "cannot be read"),
    (sentencepiece(PIECES, n3=2**63), None),
], ids=lambda v: repr(v)[:20])  # fmt: skip
def test_a_malformed_sentencepiece_model_is_one_line(content: bytes, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    if message is None:
        assert load_tokenizer(str(tmp_path)).encode("a") == [10]
    else:
        refuses(lambda: load_tokenizer(str(tmp_path)), "tokenizer.model", message)


def test_the_number_of_pieces_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENS", 10)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES))
    refuses(lambda: from_folder(tmp_path), "more than 10 pieces")


# Tables of ranks -------------------------------------------------------------------------------------------

RANKS = [*(bytes([i]) for i in range(256)), b"th", b"in", b"the", b" t", b" the", b"ing", b"12", "é".encode()]
TEXT = "thing in the ingTHE 123 é\n\n the"


def tekken(**changes: Any) -> bytes:
    """Return a tekken.json with 30 special tokens, and one token more than its size."""
    listed = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate([*RANKS, b"xx"])]
    config = {"pattern": SPLITS["tekken"].patterns[0], "default_vocab_size": 30 + len(RANKS)}
    whole = {"config": config | {"default_num_special_tokens": 30}, "vocab": listed}
    return json.dumps(whole | changes).encode()


def test_a_tekken_file_alone_is_read(tmp_path: Path) -> None:
    encoding = tiktoken.Encoding(
        "a",
        pat_str=SPLITS["tekken"].patterns[0],
        mergeable_ranks={t: i for i, t in enumerate(RANKS)},
        special_tokens={},
    )
    expected = [30 + i for i in encoding.encode_ordinary(TEXT)]
    (tmp_path / "tekken.json").write_bytes(tekken())
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.encode(TEXT), decode(tokenizer, expected)) == (expected, TEXT)
    assert tokenizer.encode("[INST]<SPECIAL_29>xx") == [3, 29, 150, 150]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (30 + len(RANKS), 1)
    (tmp_path / "tekken.json").write_bytes(tekken(special_tokens=[{"rank": 7, "token_str": "<s>"}]))
    assert load_tokenizer(str(tmp_path)).bos_token_id == 7


@pytest.mark.parametrize("name,model,pre,start", [("tiktoken.model", "deepseek_v3", "kimi-k2", None),
                                                  ("tokenizer.model", "llama", "llama-bpe", 270)])  # fmt: skip
def test_a_table_of_ranks_alone_is_read(name: str, model: str, pre: str, start: int | None, tmp_path: Path) -> None:
    ranks = {t: i for i, t in enumerate(RANKS)}
    (pattern,) = SPLITS[pre].patterns
    (tmp_path / name).write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for t, i in ranks.items()))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    named = {"bos_token": "<|begin|>", "added_tokens_decoder": {"270": {"content": "<|begin|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(str(tmp_path))
    if "&&" not in pattern:  # of Oniguruma, which tiktoken does not know
        encoding = tiktoken.Encoding("a", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        assert tokenizer.encode(TEXT) == encoding.encode_ordinary(TEXT)
    assert tokenizer.encode("the <|begin|>12") == [258, 32, 270, 262]
    assert tokenizer.bos_token_id == start
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    refuses(lambda: load_tokenizer(str(tmp_path)), name, "model_type='qwen2'", "give a tokenizer.json")


@pytest.mark.parametrize("name,content,message", [
    ("tekken.json", b"{}", "config"),
    ("tekken.json", tekken(vocab=[]), "no token for the byte 0"),
    ("tekken.json", tekken(vocab=[{"rank": 1, "token_bytes": "AA=="}]), "without gaps"),
    ("tekken.json", tekken(special_tokens=[{"rank": 30, "token_str": "x"}]), "rank=30 is not an integer in [0, 29]"),
    ("tekken.json", tekken(special_tokens=[{"rank": 3, "token_str": "a"}]), "'a' is also a token of text"),
    ("tekken.json", tekken(config={"default_num_special_tokens": 10**9}), "default_num_special_tokens=1000000000"),
    ("tiktoken.model", b"AA== 0\n", "no token for the byte 1"),
    ("tiktoken.model", b"AA==\n", "not a table"),
    ("tiktoken.model", b"AA== 5\n", "without gaps"),
])  # fmt: skip
def test_a_malformed_table_of_ranks_is_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    refuses(lambda: load_tokenizer(str(tmp_path)), name, message)
