"""Tokenizers of folders without a tokenizer.json: tables of merges, SentencePiece models, tables of ranks."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from helpers.errors import refuses
from helpers.trained_tokenizers import TEXTS, bpe
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


# Tables of ranks -------------------------------------------------------------------------------------------

RANKS = [*(bytes([i]) for i in range(256)), b"th", b"in", b"the", b" t", b" the", b"ing", b"12", "é".encode()]
TEXT = "thing in the ingTHE 123 é\n\n the"


def tekken(**changes: Any) -> bytes:
    """Return a tekken.json with 30 special tokens, and one token more than its size."""
    listed = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate([*RANKS, b"xx"])]
    config = {"pattern": SPLITS["tekken"].patterns[0], "default_vocab_size": 30 + len(RANKS)}
    special = [{"rank": 1, "token_str": "<s>"}, {"rank": 3, "token_str": "[INST]"}]
    whole = {"config": config | {"default_num_special_tokens": 30}, "vocab": listed, "special_tokens": special}
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


@pytest.mark.parametrize("content,message", [
    (b"{}", "config"),
    (tekken(vocab=[]), "no token for the byte 0"),
    (tekken(vocab=[{"rank": 1, "token_bytes": "AA=="}]), "without gaps"),
    (tekken(special_tokens=[{"rank": 30, "token_str": "x"}]), "rank=30 is not an integer in [0, 29]"),
    (tekken(special_tokens=[{"rank": 3, "token_str": "a"}]), "'a' is also a token of text"),
    (tekken(config={"default_num_special_tokens": 10**9}), "default_num_special_tokens=1000000000"),
])  # fmt: skip
def test_a_malformed_tekken_file_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(content)
    refuses(lambda: load_tokenizer(str(tmp_path)), "tekken.json", message)
