"""Tokenizers and chat templates that are written to GGUF files: read back, they give the same tokens."""

from __future__ import annotations

import ctypes
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.environment import ROOT
from helpers.models import TINY, make_weights, refuses
from helpers.trained_tokenizers import TEXTS, bpe, unigram, word_piece

hf = pytest.importorskip("tokenizers")

from nanoinfer.checkpoints import huggingface  # noqa: E402
from nanoinfer.checkpoints.gguf import export as gguf_export  # noqa: E402
from nanoinfer.checkpoints.gguf import splits as gguf_splits  # noqa: E402
from nanoinfer.checkpoints.gguf import tokenizer as gguf_tokenizer  # noqa: E402
from nanoinfer.checkpoints.gguf.splits import SPLITS, Split  # noqa: E402
from nanoinfer.checkpoints.gguf.tokenizer import write_tokenizer  # noqa: E402
from nanoinfer.checkpoints.load import LoadedModel, load_model  # noqa: E402
from nanoinfer.config import ModelConfig  # noqa: E402
from nanoinfer.tokenizers import tokenizer as tokenizers  # noqa: E402
from nanoinfer.tokenizers.tokenizer import CharTokenizer, Tokenizer, byte_level, decode  # noqa: E402
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def config_of(tokenizer: Tokenizer, **fields: Any) -> ModelConfig:
    return replace(TINY, **{"vocab_size": tokenizer.vocab_size, "bos_token_id": None, **fields})


def write(tokenizer: Tokenizer, special_tokens: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the metadata without its prefix."""
    found = write_tokenizer(tokenizer, config_of(tokenizer, **fields), special_tokens or {})
    return {name.removeprefix("tokenizer.ggml."): value for name, value in found.items()}


def read(metadata: dict[str, Any]) -> Tokenizer:
    return gguf_tokenizer.read_tokenizer({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, "a.gguf")


def check_same(ours: Tokenizer, expected: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = expected.encode(text)
        assert ours.encode(text) == ids, text
        assert decode(ours, ids) == decode(expected, ids)


def with_special(split: Split = SPLITS["gpt-2"]) -> Tokenizer:
    """Return a byte-level BPE with control tokens and a defined one, which splits text in a way."""
    model = json.loads(tokenizers.to_json(bpe()))["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    core = byte_level(models.BPE(model["vocab"], merges, ignore_merges=split.whole_words), split.patterns)
    core.normalizer = normalizers.NFC() if split.compose else None
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizers.from_json(core.to_str(), "a tokenizer")


@pytest.mark.parametrize("name", [names.split()[0] for names, _ in gguf_splits._ROWS])
def test_ways_of_splitting_are_recognised(name: str) -> None:
    split = SPLITS[name]
    tokenizer = with_special(split)
    metadata = write(tokenizer)
    assert replace(SPLITS[metadata["pre"]], add_bos=split.add_bos) == split
    assert metadata["add_bos_token"] is False
    check_same(read(metadata), tokenizer, [*TEXTS, "a<|im_start|> b<tool>c<|im_end|>"])


def test_forms_of_other_files_are_recognised() -> None:
    digits = tokenizers.from_json(tokenizers.to_json(bpe()), "digits")
    assert isinstance(digits, tokenizers.ByteLevelTokenizer)
    digits.core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert write(digits)["pre"] == "smollm"
    assert write(bpe())["pre"] == "gpt-2"


def test_ways_of_splitting_that_no_reader_knows_are_refused() -> None:
    tokenizer = tokenizers.from_json(tokenizers.to_json(bpe()), "a tokenizer")
    assert isinstance(tokenizer, tokenizers.ByteLevelTokenizer)
    for change in (
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.NFD()},
    ):
        core = hf.Tokenizer.from_str(tokenizers.to_json(tokenizer))
        for part, value in change.items():
            setattr(core, part, value)
        changed = tokenizers.from_core(core)
        refuses(lambda changed=changed: write(changed), "splits text in another way", "tokenizer.ggml.pre")  # type: ignore[misc]


def test_types_of_tokens_and_padded_rows() -> None:
    tokenizer = with_special()
    metadata = write(tokenizer, vocab_size=tokenizer.vocab_size + 3)
    tokens, kinds = metadata["tokens"], metadata["token_type"]
    assert tokens[-4:] == ["<tool>", *(f"[PAD{len(tokens) - i}]" for i in (3, 2, 1))]
    assert kinds.tolist()[-7:] == [3, 3, 3, 4, 5, 5, 5]
    assert set(kinds.tolist()[:-7]) == {1}
    assert read(metadata).vocab_size == tokenizer.vocab_size


def test_special_tokens_and_end_tokens() -> None:
    tokenizer = with_special()
    first = tokenizer.vocab_size - 4
    metadata = write(
        tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "no such token"},
        bos_token_id=first, eos_token_ids=(first, first + 2, 5, 7, 9),
    )  # fmt: skip
    named = {key.removesuffix("_token_id"): value for key, value in metadata.items() if key.endswith("_id")}
    # <|endoftext|> needs no key: readers know it by its name
    assert named == {"bos": first, "eos": first + 2, "padding": first, "eot": 5, "eom": 7}
    full = {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}
    bos, ends = gguf_tokenizer.end_tokens(full, tokenizer.vocab_size)
    assert bos == first
    assert set(ends) == {first, first + 2, 5, 7}
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert gguf_tokenizer.special_tokens(full) == special


def test_a_start_token_is_added_by_the_reader_too() -> None:
    tokenizer = with_special()
    assert isinstance(tokenizer, tokenizers.ByteLevelTokenizer)
    tokenizers.surround(tokenizer.core, ("<|im_start|>", tokenizer.vocab_size - 3))
    starting = tokenizers.from_json(tokenizers.to_json(tokenizer), "a tokenizer")
    metadata = write(starting, bos_token_id=3)
    assert metadata["add_bos_token"] is True
    assert read(metadata).bos_token_id == starting.bos_token_id == tokenizer.vocab_size - 3


def test_a_model_without_an_end_token_names_a_byte_that_text_has_not(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp takes token 11 as the end token otherwise."""
    metadata = write(bpe())
    assert metadata["tokens"][metadata["eos_token_id"]] == "ÿ"
    assert not caplog.text
    assert "eos_token_id" not in write(CharTokenizer("ab "))
    assert "no end token" in caplog.text


def test_characters() -> None:
    tokenizer = CharTokenizer("\n !,.:?abcdefXYZ0\x00~")
    metadata = write(tokenizer, vocab_size=40)
    assert metadata["tokens"][:3] == ["Ċ", "Ġ", "!"]
    check_same(read(metadata), tokenizer, ["a bad cab,\n\nfed  ", "XYZ: 000!?", ""])
    refuses(lambda: write(CharTokenizer("abé")), "character-level", "'é'", "ASCII")
    refuses(lambda: write(CharTokenizer(["a", "bc"])), "'bc'")


def test_other_kinds_are_refused() -> None:
    refuses(lambda: write(word_piece()), "WordPiece", "only byte-level BPE")
    refuses(lambda: write(unigram()), "Unigram", "only byte-level BPE")
    words = hf.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    refuses(lambda: write(tokenizers.from_json(words.to_str(), "words")), "only byte-level BPE")
    core = hf.Tokenizer.from_str(tokenizers.to_json(bpe()))
    model = json.loads(core.to_str())["model"]
    core.model = models.BPE(model["vocab"], [tuple(m) for m in model["merges"]], dropout=0.999)
    refuses(lambda: write(tokenizers.from_json(core.to_str(), "dropout")), "other tokens")


def whole_model(tmp_path: Path) -> LoadedModel:
    """Return the model of a folder with a byte-level tokenizer of fewer tokens than rows, and a chat template."""
    tokenizer = with_special()
    end = tokenizer.vocab_size - 2
    config = config_of(tokenizer, vocab_size=tokenizer.vocab_size + 5, eos_token_ids=(end,))
    huggingface.save(make_weights(config), tmp_path / "hf", tokenizers.to_json(tokenizer))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>\n")
    named = [{"name": "tool_use", "template": "{{ tools }}"}]
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "hf" / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    return load_model(str(tmp_path / "hf"))


def test_a_whole_model(tmp_path: Path) -> None:
    model = whole_model(tmp_path)
    text = gguf_export.describe_text(model)
    gguf_export.write_file(model.weights, tmp_path / "a.gguf", "Q8_0", text, "hf")
    found = load_model(str(tmp_path / "a.gguf"))
    assert (found.chat_template, found.special_tokens) == (model.chat_template, model.special_tokens)
    assert found.tool_template == model.tool_template == "{{ tools }}"
    assert found.config.eos_token_ids[0] == model.config.eos_token_ids[0]
    assert found.tokenizer is not None
    assert model.tokenizer is not None
    assert found.tokenizer.vocab_size == model.tokenizer.vocab_size == found.config.vocab_size - 5
    check_same(found.tokenizer, model.tokenizer, TEXTS)


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    model = whole_model(tmp_path)
    text = gguf_export.describe_text(model, with_tokenizer=False)
    gguf_export.write_file(model.weights, tmp_path / "a.gguf", "F16", text, "hf")
    found = load_model(str(tmp_path / "a.gguf"))
    assert found.tokenizer is None
    assert "a.gguf has no tokenizer" in found.no_tokenizer_reason
    assert found.config.eos_token_ids == model.config.eos_token_ids
    assert found.chat_template == model.chat_template


@pytest.mark.parametrize("kind", ["bytes", "deepseek-v3", "characters", "nothing"])
def test_llama_cpp_splits_texts_into_the_same_tokens(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib: Any = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python: the peer of this test")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    vs_llamacpp = importlib.import_module("vs_llamacpp")
    made: dict[str, Tokenizer] = {
        "bytes": with_special(gguf_tokenizer.SPLITS["smollm"]),
        "deepseek-v3": with_special(gguf_tokenizer.SPLITS["deepseek-v3"]),
        "characters": CharTokenizer("\n !,.:?abcdefXYZ0"), "nothing": bpe(),
    }  # fmt: skip
    tokenizer, path = made[kind], tmp_path / "a.gguf"
    weights = make_weights(config_of(tokenizer))
    model = LoadedModel("m", weights.config, tokenizer, weights=weights, chat_template="{{ messages }}")
    text = gguf_export.describe_text(model, with_tokenizer=kind != "nothing")
    gguf_export.write_file(weights, path, "F32", text, "m")
    peer = vs_llamacpp.LlamaCpp(str(path), 1, 32, threads=1)
    assert np.isfinite(peer.run([(0, [1, 2, 3], True)])).all()
    if kind == "nothing":
        return
    vocab = lib.llama_model_get_vocab(lib.llama_get_model(peer.context))
    for sample in (
        ["a bad cab, fed", "XYZ:\n\n"] if kind == "characters" else [t for t in TEXTS if t and "\x00" not in t]
    ):
        raw, ids = sample.encode(), (ctypes.c_int32 * 1000)()
        count = lib.llama_tokenize(vocab, raw, len(raw), ids, 1000, False, True)
        assert ids[:count] == tokenizer.encode(sample), sample
