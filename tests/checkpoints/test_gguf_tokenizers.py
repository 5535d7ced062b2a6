"""Tokenizers in GGUF files, and start tokens, against transformers and the tokenizers library."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gguf_files import convert, write_gguf
from helpers.models import make_folder, refuses

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("tokenizers")

from helpers.families import make_folder as make_family  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.checkpoints.gguf import splits as gguf_splits  # noqa: E402
from nanoinfer.checkpoints.gguf import tokenizer as gguf_tokenizer  # noqa: E402
from nanoinfer.checkpoints.gguf.file import read_gguf  # noqa: E402
from nanoinfer.checkpoints.load import load_model, load_tokenizer  # noqa: E402
from nanoinfer.tokenizers import tokenizer as tokenizers  # noqa: E402
from nanoinfer.tokenizers.tokenizer import ByteLevelTokenizer, GenericTokenizer, decode  # noqa: E402
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

TEXT = (
    "The cat's 12345 hats, don't  they?\n\n\tIt's 3.14 (pi) -- naïve café 東京 🙂 e\u0301 a<|x|>b\r\n  x   y ½ ²\u3000z"
)
AWKWARD = [TEXT, "", " ", "  ", "\n", "a", " a", "a ", "<|x|>", "a<|x|> b", "<s>", "x<s>y</s>", "\u2581", "a\u2581b",
           "\x00\x7f", "1234567", "we'LL WE'll", "\u00a0x", "\u0130", "🙂🙃", "\ufffd", "日本 語"]  # fmt: skip
CORPUS = ["the cat sat on the mat and the hats were thin; it's 12 or 345 cafés, don't they say?"] * 5 + [TEXT]
SPECIAL = ["<unk>", "<s>", "</s>", "<|x|>"]


def train_byte_level(pre_tokenizer: Any, **options: Any) -> Any:
    core = hf.Tokenizer(models.BPE(**options))
    core.pre_tokenizer, core.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)  # 347 tokens
    return core


def metadata_of(core: Any, **extra: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE."""
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    merges = [" ".join(pair) for pair in model["merges"]]
    kinds = np.array([2 if t == "<unk>" else 3 if t in SPECIAL else 1 for t in tokens], np.int32)
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "token_type": kinds,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    return {f"tokenizer.ggml.{name}": item for name, item in (found | extra).items() if item is not None}


def read(metadata: dict[str, Any], folder: Path) -> tokenizers.Tokenizer:
    path = write_gguf(folder / "model.gguf", metadata, {})
    return gguf_tokenizer.read_tokenizer(read_gguf(path).metadata, str(path))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(hf.Regex(pattern), "isolated"), byte_level])


# The pre-tokenizers of the models' own tokenizer.json.
PRE: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "olmo": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": split(LLAMA3),
    "dbrx": split(LLAMA3),
    "smaug-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
}


@pytest.mark.parametrize("name", PRE)
def test_byte_level_tokenizers_equal_the_models_own(name: str, tmp_path: Path) -> None:
    core = train_byte_level(PRE[name], ignore_merges=name == "llama-bpe")
    if name in ("qwen2", "olmo"):
        core.normalizer = normalizers.NFC()
    ours = read(metadata_of(core, pre=name, add_bos_token=False), tmp_path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    assert isinstance(ours, ByteLevelTokenizer)
    for text in AWKWARD:
        expected = fast(text).input_ids
        assert ours.encode(text) == expected, text
        assert decode(ours, expected) == fast.decode(expected, clean_up_tokenization_spaces=False)
    assert ours.bos_token_id is None


# The first name of each way of splitting, and its pieces of a text, by the patterns in llama.cpp's source.
PIECES = {
    "gpt-2 olmo": "fooBar| 67|'|Ta| I|'|LL| 12345| | 7|q|\u0301|x|   | a|+//|\n|/|\n|\u4e2dz|,|\u3042",
    "smollm command-r": "fooBar| |6|7|'|Ta| I|'|LL| |1|2|3|4|5|  |7|q|\u0301|x|   | a|+//|\n|/|\n|\u4e2dz|,|\u3042",
    "llama-bpe smaug-bpe glm4": "fooBar| |67|'T|a| I|'LL| |123|45| | |7|q|\u0301x|   | a|+//\n|/\n|\u4e2dz|,\u3042",
    "minicpm5": "fooBar| |67|'T|a| I|'LL| |123|45|  |7|q|\u0301x|   | a|+//\n|/\n|\u4e2dz|,\u3042",
    "jais-2": "fooBar| |67|'T|a| I|'LL| |123|45| | |7|q|\u0301x|  | | a|+//\n|/\n|\u4e2dz|,\u3042",
    "qwen2 grok-2": "fooBar| |6|7|'T|a| I|'LL| |1|2|3|4|5| | |7|q|\u0301x|   | a|+//\n|/\n|\u4e2dz|,\u3042",
    "qwen35": "fooBar| |6|7|'T|a| I|'LL| |1|2|3|4|5| | |7|q\u0301x|   | a|+//\n|/\n|\u4e2dz|,\u3042",
    "ufakzeka": "fooBar| |6|7|'Ta| I|'LL| |1|2|3|4|5| | |7|q|\u0301x|   | a|+//\n|/\n|\u4e2dz|,\u3042",
    "laguna seed-coder": "fooBar| |6|7|'T|a| I|'LL| |1|2|3|4|5| | |7|q|\u0301x|   | a|+//|\n|/|\n|\u4e2dz|,\u3042",
    "exaone-moe": "fooBar| |6|7|'T|a I|'LL| |1|2|3|4|5| | |7|q\u0301x|   | a|+//\n|/\n|\u4e2dz|,\u3042",
    "deepseek-v3": "fooBar| |67|'Ta| I|'LL| |123|45|  |7|q\u0301x|   | a|+//\n|/\n|\u4e2d|z|,|\u3042",
    "spark2_5": "fooBar| |6|7|'Ta| I|'LL| |1|2|3|4|5|  |7|q\u0301x|   | a|+//|\n|/|\n|\u4e2d|z|,|\u3042",
    "afmoe": "fooBar| |67|'Ta| I|'LL| |12|345|  |7|q\u0301x|   | a|+//\n|/\n|\u4e2d|z|,|\u3042",
    "deepseek-llm": "fooBar| |6|7|'|Ta| I|'|LL| |1|2|3|4|5|  |7|q|\u0301|x|   | a|+//|\n|/|\n|\u4e2d|z|,|\u3042",
    "deepseek-coder": "fooBar| |6|7|'|Ta| I|'|LL| |1|2|3|4|5|  |7|q|\u0301|x|   | a|+|//|\n|/|\n|\u4e2d|z|,|\u3042",
    "gpt-4o llama4": "foo|Bar| |67|'Ta| I'LL| |123|45| | |7|q\u0301x|   | a|+//\n/\n|\u4e2dz|,\u3042",
    "tekken": "foo|Bar| |6|7|'Ta| I|'LL| |1|2|3|4|5| | |7|q\u0301x|   | a|+//\n/\n|\u4e2dz|,\u3042",
    "tiny_aya": "foo|Bar| |67|'Ta| I'LL| |12|345| | |7|q\u0301x|   | a|+//\n/\n|\u4e2dz|,\u3042",
    "kimi-k2": "foo|Bar| |67|'Ta| I'LL| |123|45| | |7|q\u0301x|   | a|+//\n|/\n|\u4e2d|z|,\u3042",
    "youtu": "foo|Bar| |6|7|'Ta| I'LL| |1|2|3|4|5| | |7|q\u0301x|   | a|+//\n/\n|\u4e2d|z|,|\u3042",
    "superbpe": "fooBar |67|'Ta I'LL |12|345|  |7|q\u0301x    a+//\n/\n\u4e2dz,\u3042",
    "falcon": "fooBar| 67|'|Ta| I|'|LL| |123|45| | 7|q|\u0301|x|   | a|+//|\n|/|\n|\u4e2dz|,|\u3042",
    "chameleon": "fooBar| |6|7|'|Ta| I|'|LL| |1|2|3|4|5|  |7|q|\u0301|x|    |a|+|/|/|\n|/|\n|\u4e2dz|,|\u3042",
    "bloom": "fooBar| 67'Ta| I'LL| 12345| | 7q\u0301x|   | a+//|\n|/|\n|\u4e2dz|,|\u3042",
    "viking": "fooBar| |6|7|'Ta| I'LL| |1|2|3|4|5| | |7|q\u0301x|   | a+//|\n|/|\n|\u4e2dz|,|\u3042",
    "default": "fooBar| |67|'|Ta| I|'|LL| |123|45| | |7|q|\u0301|x|   | a|+//|\n|/|\n|\u4e2dz|,|\u3042",
}


@pytest.mark.parametrize("names", PIECES)
def test_each_way_of_splitting_has_its_pieces(names: str, tmp_path: Path) -> None:
    text = PIECES[names].replace("|", "")
    core = train_byte_level(PRE["gpt-2"])
    for name in names.split():
        ours = read(metadata_of(core, pre=None if name == "default" else name), tmp_path)
        assert isinstance(ours, ByteLevelTokenizer)
        spans = [span for _, span in ours.core.pre_tokenizer.pre_tokenize_str(text)]
        assert "|".join(text[a:b] for a, b in spans) == PIECES[names], name


def test_each_name_of_a_decoder_has_a_way_of_splitting() -> None:
    assert {name for names in PIECES for name in names.split()} == {names.split()[0] for names, _ in gguf_splits._ROWS}
    flags = {n: (s.add_bos, s.whole_words, s.compose) for n, s in gguf_splits.SPLITS.items()}
    start = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken chameleon"
    whole = "glm4 glm5 minicpm5 llama4 kimi-k2 youtu"
    composed = (
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2 qwen35 command-r tiny_aya cohere2moe olmo mpt"
    )
    assert {name for name, flag in flags.items() if flag[0]} == set(start.split())
    assert {name for name, flag in flags.items() if flag[1]} == {*start.split(), *whole.split()} - {"chameleon"}
    assert {name for name, flag in flags.items() if flag[2]} == set(composed.split())
    others = "starcoder refact exaone4 phi-2 trillion a.x-4.0 joyai-llm hunyuan-dense kanana2 minimax-m2 bailingmoe2"
    assert flags.keys() >= set(others.split())


def sentencepiece(tmp_path: Path, **extra: Any) -> tuple[Any, dict[str, Any]]:
    """Return Llama's kind of tokenizer with merges, and the metadata of the same with scores."""
    core = hf.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    corpus = [" " + text.replace("\n", " ") for text in CORPUS[:5]]
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *byte_tokens, "<|x|>"]
    core.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    core.pre_tokenizer = None
    spec = json.loads(core.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in byte_tokens]
    tokens = sorted(spec["model"]["vocab"], key=lambda token: spec["model"]["vocab"][token])
    kinds = [2 if t == "<unk>" else 6 if t in byte_tokens else 3 if t in SPECIAL else 1 for t in tokens]
    made = {a + b: i for i, (a, b) in reversed(list(enumerate(spec["model"]["merges"])))}
    scores = [-float(made.get(t, 10_000 + i)) for i, t in enumerate(tokens)]
    found = {"model": "llama", "tokens": tokens, "scores": np.array(scores, np.float32),
             "token_type": np.array(kinds, np.int32), "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    vocab = spec["model"]["vocab"]
    generate_merges = importlib.import_module("transformers.convert_slow_tokenizer").generate_merges
    spec["model"]["merges"] = generate_merges(
        vocab, dict(zip(tokens, scores, strict=True)), [t for t, kind in zip(tokens, kinds, strict=True) if kind != 1]
    )
    metadata = {f"tokenizer.ggml.{name}": item for name, item in (found | extra).items() if item is not None}
    return hf.Tokenizer.from_str(json.dumps(spec)), metadata


def test_sentencepiece_tokenizers_equal_the_conversion_of_transformers(tmp_path: Path) -> None:
    core, metadata = sentencepiece(tmp_path)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    ours = read(metadata, tmp_path)
    assert isinstance(ours, GenericTokenizer)
    assert ours.bos_token_id == 1  # the default of this kind
    assert json.loads(ours.core.to_str())["model"]["merges"] == json.loads(core.to_str())["model"]["merges"]
    for text in AWKWARD:
        expected = fast(text).input_ids
        assert [1, *ours.encode(text)] == expected, text
        assert decode(ours, expected[1:]) == fast.decode(expected[1:], clean_up_tokenization_spaces=False)
    assert ours.encode("東") == [
        *ours.encode(""),
        *[fast.convert_tokens_to_ids(t) for t in ("▁", "<0xE6>", "<0x9D>", "<0xB1>")],
    ]
    plain = read(metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, tmp_path)
    assert plain.bos_token_id is None
    assert decode(plain, plain.encode(" a b")) == " a b"
    assert decode(plain, plain.encode("a b")) == "a b"


def test_a_character_that_longer_tokens_alone_contain_is_its_byte_token(tmp_path: Path) -> None:
    """Gemma 1 and 2 have tokens of two tabs and more, and the tab as a byte."""
    _, metadata = sentencepiece(tmp_path, add_bos_token=False, add_space_prefix=False)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    count, byte = len(tokens), tokens.index("<0x09>")
    changed = {"tokens": [*tokens, "\t\t", "\t\t\t"], "scores": np.append(scores, np.float32([-1, -2])),
               "token_type": np.append(kinds, np.int32([1, 1]))}  # fmt: skip
    ours = read(metadata | {f"tokenizer.ggml.{name}": item for name, item in changed.items()}, tmp_path)
    for text, ids in (("\t", [byte]), ("\t\t", [count]), ("\t\t\t", [count + 1]), ("\t" * 4, [count, count])):
        assert ours.encode(text) == ids
        assert decode(ours, ids) == text
    assert ours.encode("\x0b") == [tokens.index("<0x0B>")]


def test_the_tokenizer_of_gemma4_is_sentencepiece_with_merges(tmp_path: Path) -> None:
    core, metadata = sentencepiece(tmp_path, model="gemma4", scores=None, add_space_prefix=False)
    merges = [" ".join(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    core.normalizer = normalizers.Replace(" ", "▁")
    ours = read(metadata | {"tokenizer.ggml.merges": merges}, tmp_path)
    for text in AWKWARD:
        assert ours.encode(text) == core.encode(text, add_special_tokens=False).ids, text
    assert ours.bos_token_id == 1
    for kind, pre, asked, start in (
        ("gemma4", None, False, 1),
        ("gpt2", "gemma4", None, 1),
        ("gpt2", "sarvam-moe", None, None),
    ):
        changed = {"model": kind, "pre": pre, "merges": merges, "add_bos_token": asked, "add_space_prefix": None}
        other = read(sentencepiece(tmp_path, **changed)[1], tmp_path)
        assert (other.encode(TEXT), other.bos_token_id) == (ours.encode(TEXT), start)


def test_streamed_text_has_whole_characters(tmp_path: Path) -> None:
    for ours in (
        read(sentencepiece(tmp_path)[1], tmp_path),
        read(metadata_of(train_byte_level(PRE["gpt-2"])), tmp_path),
    ):
        for text in AWKWARD:
            ids = ours.encode(text)
            stream = ours.stream()
            pieces = [stream.push(i) for i in ids]
            pieces.append(stream.flush())
            assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
            assert "".join(pieces) == decode(ours, ids)


def test_tokens_of_users_and_padding(tmp_path: Path) -> None:
    core = train_byte_level(PRE["gpt-2"])
    metadata = metadata_of(core)
    tokens = [*metadata["tokenizer.ggml.tokens"], "two words", "[PAD348]", "[PAD349]"]
    kinds = np.array([*metadata["tokenizer.ggml.token_type"], 4, 5, 5], np.int32)
    ours = read(metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}, tmp_path)
    added = len(tokens) - 3
    assert ours.vocab_size == added + 1
    assert added in ours.encode("a two words b")
    assert decode(ours, [added]) == "two words"


# Tokens of a vocabulary, types and keys -> those that end a sequence, by llama.cpp's list.
ENDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "names": (
        "a </s> <eos_> <|im_end|> <end_of_turn> <|file_sep|> [EOS] b",
        {},
        "</s> <|im_end|> <end_of_turn> <|file_sep|> [EOS]",
    ),
    "keys": ("a b <|eot_id|> c d", {"eos_token_id": 3, "eot_token_id": 0, "fim_rep_token_id": 4}, "c a d <|eot_id|>"),
    "gpt-oss": ("<|return|> <|end|> <|call|> <|endoftext|>", {"eos_token_id": 0}, "<|return|> <|call|> <|endoftext|>"),
    "a key of gpt-oss": ("<|return|> <|end|> <|call|>", {"eot_token_id": 1}, "<|return|> <|call|>"),
    "Solar Open": ("<|flush|> <|end|> <|calls|>", {}, "<|flush|> <|calls|>"),
    "Phi-3": ("<|end|> <|call|>", {}, "<|end|> <|call|>"),
    "Gemma": ("<eos> </s> <|tool_response> <turn|>", {}, "<eos> <|tool_response> <turn|>"),
    "Qwen": ("</ s> </s> <|endoftext|>", {"merges": ["</ s>"]}, "<|endoftext|>"),
    "its own </s>": ("</ s> </s> <eos>", {"merges": ["</ s>"], "eos_token_id": 2}, "</s> <eos>"),
}


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("name", ENDS)
def test_sequences_end_where_llama_cpp_ends_them(name: str, kind: int) -> None:
    """Whatever type the converter gave an end token, and it is one token in a prompt."""
    (text, keys, expected), letters = ENDS[name], sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*text.split(), *(letter for letter in letters if letter not in text.split())]
    kinds = np.ones(len(tokens), np.int32)
    kinds[[i for i, token in enumerate(tokens) if token in gguf_tokenizer.TURN_ENDS]] = kind
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": []} | keys
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    _, ends = gguf_tokenizer.end_tokens(metadata, len(tokens))
    assert sorted(ends) == sorted(tokens.index(token) for token in expected.split())
    if name != "keys" and "merges" not in keys and kind == 1:
        ours, named = gguf_tokenizer.read_tokenizer(metadata, "a.gguf"), expected.split()
        assert ours.encode("".join(named)) == [tokens.index(token) for token in named]


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no tokenizer": ({"model": None}, ["no tokenizer", "tokenizer.ggml.model"]),
    "a kind": ({"model": "bert"}, ["tokenizer.ggml.model='bert'", "gpt2, llama, t5 and gemma4"]),
    "a split": ({"pre": "jina-v2-es"}, ["tokenizer.ggml.pre='jina-v2-es'", "give tokenizer= a folder"]),
    "no tokens": ({"tokens": []}, ["tokenizer.ggml.tokens"]),
    "types of some tokens": ({"token_type": np.ones(3, np.int32)}, ["tokenizer.ggml.token_type", "347"]),
    "no merges": ({"merges": None}, ["tokenizer.ggml.merges"]),
    "a merge of one token": ({"merges": [" ab"]}, ["tokenizer.ggml.merges has ' ab'"]),
    "no start token": ({"add_bos_token": True, "bos_token_id": None}, ["add_bos_token", "bos_token_id"]),
    "a start token outside": ({"add_bos_token": True, "bos_token_id": 347}, ["tokenizer.ggml.bos_token_id=347", "346"]),
    "a flag that is a number": ({"add_bos_token": 1}, ["tokenizer.ggml.add_bos_token=1"]),
    "no scores": ({"model": "llama", "merges": None}, ["tokenizer.ggml.scores", "347"]),
    "scores that are not finite": (
        {"model": "llama", "merges": None, "scores": np.full(347, np.nan, np.float32)},
        ["tokenizer.ggml.scores", "not finite"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tokenizer_that_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    extra, words = BAD[name]
    metadata = metadata_of(train_byte_level(PRE["gpt-2"]), **extra)
    refuses(lambda: read(metadata, tmp_path), "model.gguf", *words)


def test_a_token_twice_and_tokens_that_are_too_long(tmp_path: Path) -> None:
    metadata = metadata_of(train_byte_level(PRE["gpt-2"]))
    tokens = list(metadata["tokenizer.ggml.tokens"])
    refuses(lambda: read(metadata | {"tokenizer.ggml.tokens": [*tokens[:-1], "the"]}, tmp_path), "'the' twice")
    scores = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a" * 40_000], "scores": np.zeros(4, np.float32)}
    refuses(lambda: read({f"tokenizer.ggml.{k}": v for k, v in scores.items()}, tmp_path), "too long")


# A whole model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer of its 61 tokens, which prepends <s>; <|im_end|> ends a turn."""
    folder = tmp_path_factory.mktemp("model")
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyzĠABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?"]
    kinds = np.array([2, 3, 3, 3, *[1] * (len(tokens) - 4)], np.int32)
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": [],
             "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}  # fmt: skip
    metadata = {f"tokenizer.ggml.{name}": item for name, item in found.items()}
    return convert(
        make_family("llama", folder), folder / "model.gguf", **metadata, **{"tokenizer.chat_template": "{{ x }}"}
    )


def test_prompts_begin_with_the_start_token_once(model: Path) -> None:
    llm = LLM(str(model), engine="static", max_num_seqs=2)
    assert (llm.config.bos_token_id, llm.config.eos_token_ids) == (1, (2, 3))
    assert llm.tokenize("ab") == [1, 4, 5]
    assert llm.tokenize("") == [1]
    assert llm.tokenize([4, 5]) == [4, 5]
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode("ab") == [4, 5]
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0)
    (text,), (ids,) = llm.generate("ab", params), llm.generate([1, 4, 5], params)
    assert text.prompt_token_ids == [1, 4, 5]
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    assert llm.perplexity("ab")[0].num_tokens == 2
    assert llm.perplexity("ab")[0].log_likelihood == llm.perplexity([1, 4, 5])[0].log_likelihood
    for context, ids_before in (("ab", [1, 4, 5]), ("", [1]), ("ab ", [1, 4, 5])):
        (found,) = llm.loglikelihood(context, "cd" if context != "ab " else "c")
        expected = [6, 7] if context != "ab " else [30, 6]
        assert found.token_ids == expected
        (same,) = llm.loglikelihood([ids_before], [expected])
        assert found.log_likelihood == pytest.approx(same.log_likelihood, abs=1e-5)  # other tokens are cached


def test_the_chat_template_and_the_tokenizer_are_those_of_the_file(model: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model))
    assert loaded.chat_template == "{{ x }}"
    assert load_tokenizer(str(model)).encode("abc") == [4, 5, 6]
    assert load_model(str(make_folder(tmp_path / "hf"))).chat_template is None
    saved = tokenizers.from_json(tokenizers.to_json(load_tokenizer(str(model))), "saved")
    assert (saved.bos_token_id, saved.encode("ab c")) == (1, [4, 5, 30, 6])


# Start tokens in folders of the Hugging Face layout ----------------------------------------------------------------

TEMPLATES: dict[str, Any] = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "start": processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    "in a sequence": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])]
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("field", [None, True, False])
def test_start_tokens_are_those_of_transformers(name: str, field: bool | None, tmp_path: Path) -> None:
    core = train_byte_level(PRE["gpt-2"])
    if TEMPLATES[name] is not None:
        core.post_processor = TEMPLATES[name]
    (tmp_path / "tokenizer.json").write_text(core.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    config |= {} if field is None else {"add_bos_token": field}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, fast = load_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.bos_token_id == (1 if name in ("start", "in a sequence") else None)
    for text in AWKWARD:
        start = [] if ours.bos_token_id is None else [ours.bos_token_id]
        assert start + ours.encode(text) == fast(text).input_ids, text


@pytest.mark.parametrize("field", [None, True, False])
@pytest.mark.parametrize("as_object", [True, False])
def test_start_tokens_of_folders_without_a_tokenizer_json(field: bool | None, as_object: bool, tmp_path: Path) -> None:
    model = json.loads(train_byte_level(PRE["gpt-2"]).to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    bos = {"content": "<s>", "__type": "AddedToken"} if as_object else "<s>"
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": bos} | (
        {} if field is None else {"add_bos_token": field}
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, fast = load_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.bos_token_id == (1 if field else None)
    start = [] if ours.bos_token_id is None else [ours.bos_token_id]
    for text in ("", "the cat", "it's 12  hats\n"):
        assert start + ours.encode(text) == fast(text).input_ids, text


def test_other_special_tokens_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = train_byte_level(PRE["gpt-2"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    ours = tokenizers.from_json(core.to_str(), "a")
    assert ours.bos_token_id == 1
    assert "other than one start token" in caplog.text
