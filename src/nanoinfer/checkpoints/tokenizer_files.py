"""The tokenizer of a folder, and its chat templates, special tokens and default sampling parameters.

The tokenizer is in the first of these: tokenizer.json; vocab.json with merges.txt; tekken.json (Mistral);
tokenizer.model (SentencePiece's BPE and unigram; a table of tiktoken's in Llama 3's); tiktoken.model (Moonlight). Added
tokens are in added_tokens.json and tokenizer_config.json. Tables of merges and ranks do not say how text is split
before BPE: the class of the tokenizer and the family of the model do.

The chat template is in chat_template.jinja, else in tokenizer_config.json (a string, or a list of named templates, of
which "default" is taken), else in chat_template.json. The one for chats with tools, if there is another, is named
"tool_use". Special tokens are in tokenizer_config.json, else in special_tokens_map.json. The response template is in
tokenizer_config.json, sampling parameters are in generation_config.json.

Sources: sentencepiece_model.proto of github.com/google/sentencepiece, which is read without the package;
mistral_common/tokens/tokenizers/tekken.py; tiktoken/load.py.
Not covered: its words and characters, and white space as a suffix.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.tokenizers.chat_template import MAX_TEMPLATE
from nanoinfer.tokenizers.limits import MAX_TOKENS
from nanoinfer.tokenizers.tokenizer import (
    ByteLevelTokenizer,
    Tokenizer,
    byte_level,
    explained,
    from_core,
    from_file,
    in_order,
    ranked,
    read_table,
    surround,
)
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.files import decode_utf8, first_bytes, parse_json, read_limited, read_object

log = logging.getLogger("nanoinfer")

NAMES = ("tokenizer.json", "tekken.json", "vocab.json with merges.txt", "tokenizer.model", "tiktoken.model")
_SPLIT_OF_CLASS = {"Qwen2Tokenizer": "qwen2", "CohereTokenizer": "command-r", "GPTNeoXTokenizer": "olmo"}
_SPLIT_OF_FAMILY = {
    "gpt2": "gpt-2", "gptj": "gpt-2", "opt": "gpt-2", "phi": "gpt-2", "exaone4": "exaone4", "qwen2": "qwen2",
    "qwen2_moe": "qwen2", "qwen3": "qwen2", "qwen3_moe": "qwen2", "starcoder2": "starcoder", "granite": "refact",
    "granitemoe": "refact", "cohere": "command-r", "cohere2": "command-r", "gpt_neox": "olmo", "olmo": "olmo",
    "olmoe": "olmo", "gpt_neo": "gpt-2", "exaone": "exaone",
}  # fmt: skip
"""model_type -> the name of its way of splitting text (gguf/splits.py)."""
_MAX_CONFIG_BYTES = 1 << 20
_RANKED = {"llama": "llama-bpe", "deepseek_v3": "kimi-k2", "kimi_k2": "kimi-k2"}
"""model_type -> the same, of tables of tiktoken: of Llama 3 and Moonlight."""
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\n")
_TEKKEN = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of the files of 2024, which do not list them."""
_UNIGRAM, _BPE = 1, 2
_LEADING_SPACE, _COLLAPSED, _ESCAPED = 3, 4, 5  # fields of NormalizerSpec


def from_folder(folder: Path, num_tokens: int = MAX_TOKENS) -> Tokenizer | None:
    """Return the tokenizer of a folder in the Hugging Face layout, or None if it has none.

    Args:
        folder: of the model.
        num_tokens: of the model.

    Raises:
        NanoinferError: a file is malformed, too large, or of a kind that is not supported.
    """
    there = {name for name in (*NAMES, "vocab.json", "merges.txt") if (folder / name).is_file()}
    if not there & set(NAMES[:1]) and {"vocab.json", "merges.txt"} <= there:
        return _from_vocab_and_merges(folder, num_tokens)
    return next((open_file(folder / name, num_tokens) for name in NAMES if name in there), None)


def open_file(path: Path, num_tokens: int = MAX_TOKENS) -> Tokenizer:
    """Return the tokenizer in a file, by its name: a tokenizer.json if it is none of the others. As `from_folder`."""
    if path.name == "tekken.json":
        return _from_tekken(path, num_tokens)
    if path.name == "tiktoken.model" or (path.name == "tokenizer.model" and _LINE.match(first_bytes(path, 200))):
        return _from_tiktoken(path, num_tokens)
    if path.name == "tokenizer.model":
        return _from_sentencepiece(path, num_tokens)
    return from_file(path, num_tokens)


def _from_vocab_and_merges(folder: Path, num_tokens: int) -> Tokenizer:
    from nanoinfer.checkpoints.gguf.splits import SPLITS
    from tokenizers import models, normalizers

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    complaint = f"{escaped(vocab)} and {escaped(merges)} are not BPE tables"
    raw = read_table(merges, "a table of merges", num_tokens)
    ids = parse_json(read_table(vocab, "a vocabulary", num_tokens), complaint)
    added, special = added_tokens(folder)
    with explained(complaint):
        lines = [line for line in raw.decode().split("\n") if line and not line.startswith("#version")]
        pairs = [(first, right) for first, right in (line.rstrip("\r").split(" ") for line in lines)]
        tokens = {i: token for token, i in ids.items()}
        for i, token in added.items():
            if tokens.setdefault(i, token["content"]) != token["content"] or ids.setdefault(token["content"], i) != i:
                raise ValueError(f"the added token {show(token['content'])} has the id {i} or name of another token")
        name = _split_of(folder)
        split = SPLITS[name]
        model = models.BPE(ids, pairs, ignore_merges=split.whole_words)
        core = byte_level(model, () if name == "gpt-2" else split.patterns)
        if split.compose:
            core.normalizer = normalizers.NFC()
        _add(
            core, [*added.values(), *({"content": t, "special": True} for t in ("<|endoftext|>", *special) if t in ids)]
        )
        _prepend_bos(core, folder, ids, False)
        return ByteLevelTokenizer(core)


def _from_tekken(path: Path, num_tokens: int) -> Tokenizer:
    """Return the tokenizer in a tekken.json: special tokens first, then the first tokens of the table."""
    complaint = f"{escaped(path)} is not a tekken.json"
    raw = parse_json(read_table(path, "a tekken.json", num_tokens), complaint)
    with explained(complaint):
        config = raw["config"]
        count = require_int("default_num_special_tokens", config["default_num_special_tokens"], 0, MAX_TOKENS)
        size = require_int("default_vocab_size", config["default_vocab_size"], count, MAX_TOKENS) - count
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in raw["vocab"][:size]}
        listed = raw.get("special_tokens") or [{"rank": i, "token_str": name} for i, name in enumerate(_TEKKEN)]
        names = {i: f"<SPECIAL_{i}>" for i in range(count)}
        names |= {require_int("rank", token["rank"], 0, count - 1): token["token_str"] for token in listed}
        special = {name: i for i, name in names.items()}
        core = ranked(in_order(ranks, 0, bytes), special, (config["pattern"],), count)
        core.add_special_tokens(list(special))
        if "<s>" in special:
            surround(core, ("<s>", special["<s>"]))
        return from_core(core)


def _from_tiktoken(path: Path, num_tokens: int) -> Tokenizer:
    """Return the tokenizer in a table of tiktoken's: lines of a token in base64 and its rank."""
    from nanoinfer.checkpoints.gguf.splits import SPLITS

    where = escaped(path)
    kind = _model_type(path.parent)
    if (name := _RANKED.get(kind)) is None:
        raise NanoinferError(f"{where} does not say how model_type={show(kind)} splits text: give a tokenizer.json")
    raw, (added, _) = read_table(path, "a table of ranks", num_tokens), added_tokens(path.parent)
    with explained(f"{where} is not a table of tiktoken's"):
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, raw.splitlines())}
        special = {token["content"]: i for i, token in added.items()}
        core = ranked(in_order(ranks, 0, bytes), special, SPLITS[name].patterns)
        _add(core, list(added.values()))
        _prepend_bos(core, path.parent, special, SPLITS[name].add_bos)
        return from_core(core)


def _prepend_bos(core: Any, folder: Path, ids: dict[str, int], default: bool) -> None:
    """Let prompts begin with the start token, if the folder or `default` says so."""
    bos = special_tokens(folder).get("bos_token")
    if bos is not None and bos in ids and tokenizer_field(folder, "add_bos_token", default):
        surround(core, (bos, ids[bos]))


def _add(core: Any, tokens: list[dict[str, Any]]) -> None:
    """Make tokens of the vocabulary stand for themselves in a text; the first of the same name counts."""
    from tokenizers import AddedToken

    once = {token["content"]: token for token in reversed(tokens)}
    added = [AddedToken(**{"normalized": False} | token) for token in once.values()]
    core.add_special_tokens([token for token in added if token.special])
    core.add_tokens([token for token in added if not token.special])


def _split_of(folder: Path) -> str:
    """Return the name of the way in which the tokenizer of a folder splits text, one of SPLITS."""
    kind = tokenizer_field(folder, "tokenizer_class", "").removesuffix("Fast")
    name = _SPLIT_OF_CLASS.get(kind) or _SPLIT_OF_FAMILY.get(_model_type(folder) or "gpt2")
    if name is None:
        log.warning("%s: text is split as GPT-2's: give a tokenizer.json if it is not", escaped(folder))
    return name or "gpt-2"


def _model_type(folder: Path) -> str:
    """Return the model_type in a folder's config.json; "" if there is none."""
    path = folder / "config.json"
    kind = read_object(path, _MAX_CONFIG_BYTES, "a config").get("model_type") if path.is_file() else None
    return kind if isinstance(kind, str) else ""


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number of protobuf's, and where it ends."""
    value = 0
    for i in range(10):
        if at + i >= len(raw):
            break
        value |= (raw[at + i] & 127) << 7 * i
        if raw[at + i] < 128:
            return value, at + i + 1
    raise ValueError("a number does not end")


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protobuf: numbers, and bytes for everything else."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        if key & 7 == 0:
            value, at = _varint(raw, at)
            yield key >> 3, value
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError(f"it has a field of the wire type {key & 7}")
        size, at = _varint(raw, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
        if size > len(raw) - at:
            raise ValueError("a field is longer than the file")
        yield key >> 3, raw[at : at + size]
        at += size


def _from_sentencepiece(path: Path, num_tokens: int) -> Tokenizer:
    """Return the tokenizer in a SentencePiece model: its pieces are those of a GGUF file, and are read as those."""
    from nanoinfer.checkpoints.gguf import tokenizer as gguf_tokenizer

    raw = read_table(path, "a SentencePiece model", num_tokens)
    added, _ = added_tokens(path.parent)
    with explained(f"{escaped(path)} is not a SentencePiece model that can be read"):
        tokens: list[str] = []
        scores: list[float] = []
        kinds: list[int] = []
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(raw):
            if number == 1 and len(tokens) >= MAX_TOKENS:
                raise ValueError(f"it has more than {MAX_TOKENS} pieces")
            if number == 1:
                piece = dict(_fields(value))
                tokens.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                kinds.append(piece.get(3, gguf_tokenizer.NORMAL))
            elif number in (2, 3):
                (trainer if number == 2 else normalizer).update(_fields(value))
        if (kind := trainer.get(3, _UNIGRAM)) not in (_UNIGRAM, _BPE):
            raise ValueError(f"model_type={kind} is not supported: only unigram and bpe are")
        if trainer.get(24) or not normalizer.get(_ESCAPED, 1):
            raise ValueError("white space as a suffix, or not escaped, is not supported")
        for i, token in sorted(added.items()):
            if i >= MAX_TOKENS:
                raise ValueError(f"the added token {show(token['content'])} has the id {i}: the limit is {MAX_TOKENS}")
            missing = i + 1 - len(tokens)
            tokens += [""] * missing
            scores += [0.0] * missing
            kinds += [gguf_tokenizer.UNUSED] * missing
            if tokens[i] not in ("", token["content"]):
                raise ValueError(f"the added token {show(token['content'])} has the id of {show(tokens[i])}")
            tokens[i] = token["content"]
            kinds[i] = gguf_tokenizer.CONTROL if token["special"] else gguf_tokenizer.USER_DEFINED
        ids = {"unknown": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
        named = special_tokens(path.parent)
        for name, text in (("bos", named.get("bos_token")), ("eos", named.get("eos_token"))):
            ids[name] = tokens.index(text) if text in tokens else ids[name]
        ids = {name: i for name, i in ids.items() if i < len(tokens)}  # -1, which is 2**64 - 1: there is none
        metadata: dict[str, Any] = {
            "model": "llama" if kind == _BPE else "t5",
            "tokens": tokens,
            "scores": np.array(scores, np.float32),
            "token_type": np.array(kinds, np.int32),
            "add_bos_token": tokenizer_field(path.parent, "add_bos_token", True) and "bos" in ids,
            "add_space_prefix": bool(normalizer.get(_LEADING_SPACE, 1)),
            "remove_extra_whitespaces": bool(normalizer.get(_COLLAPSED, 1)),
            "precompiled_charsmap": np.frombuffer(normalizer.get(2, b""), np.uint8),
            **{f"{name}_token_id": i for name, i in ids.items()},
        }
        prefix = gguf_tokenizer.PREFIX
        return gguf_tokenizer.read_tokenizer({prefix + name: value for name, value in metadata.items()}, escaped(path))


CHAT_FILES = (
    "chat_template.jinja", "tokenizer_config.json", "chat_template.json", "special_tokens_map.json",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
_ADDED = "added_tokens.json"
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
GENERATION_CONFIG = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of generation_config.json that are sampling parameters, as in vLLM."""
MAX_BYTES = 16 << 20  # of tokenizer_config.json, which may list thousands of added tokens
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read_chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Return the template of a folder, None if it has none, and its special tokens: {"bos_token": "<s>", ...}.

    Raises:
        NanoinferError: a file is too large or malformed.
    """
    tokenizer, tokens = _read_object(folder / CHAT_FILES[1]), special_tokens(folder)
    if (template := _read_template(folder / CHAT_FILES[0])) is not None:
        return template, tokens
    for path, fields in (
        (folder / CHAT_FILES[1], tokenizer),
        (folder / CHAT_FILES[2], _read_object(folder / CHAT_FILES[2])),
    ):
        if (template := fields.get("chat_template")) is not None:
            return _default(template, path), tokens
    return None, tokens


def tool_template(folder: Path) -> str | None:
    """Return the template of a folder for chats with tools; None if they have the same one as others.

    Raises:
        NanoinferError: a file is too large or malformed.
    """
    if (template := _read_template(folder / CHAT_FILES[4])) is not None:
        return template
    return _text(_named(_read_object(folder / CHAT_FILES[1]).get("chat_template")).get("tool_use"))


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens of a folder: {"bos_token": "<s>", ...}."""
    tokenizer, special = _read_object(folder / CHAT_FILES[1]), _read_object(folder / CHAT_FILES[3])
    return {name: text for name in SPECIAL_TOKENS if (text := _text(tokenizer.get(name, special.get(name))))}


def added_tokens(folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the tokens that are added to a vocabulary, by id, and the names of special tokens.

    They are in added_tokens.json and in `added_tokens_decoder` of tokenizer_config.json, which counts first:
    {151645: {"content": "<|im_end|>", "special": True, "lstrip": False}}.

    Raises:
        NanoinferError: a file is too large or malformed.
    """
    tokenizer, special = _read_object(folder / CHAT_FILES[1]), _read_object(folder / CHAT_FILES[3])
    further = [t for fields in (special, tokenizer) if isinstance(t := fields.get("additional_special_tokens"), list)]
    names = [*special_tokens(folder).values(), *(text for token in chain(*further) if (text := _text(token)))]
    listed = {str(i): {"content": text} for text, i in _read_object(folder / _ADDED).items()}
    decoder = tokenizer.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise NanoinferError(
            f"{escaped(folder / CHAT_FILES[1])}: added_tokens_decoder={show(decoder)} is not an object"
        )
    tokens: dict[int, dict[str, Any]] = {}
    for i, token in (listed | decoder).items():
        if not re.fullmatch("[0-9]{1,7}", i) or not isinstance(token, dict) or not _text(token):
            raise NanoinferError(f"{escaped(folder)} has the added token {show(token)} of the id {show(i)}: remove it")
        flags = {name: token[name] for name in _FLAGS if isinstance(token.get(name), bool)}
        tokens[int(i)] = {"content": token["content"], "special": token["content"] in names, **flags}
    return tokens, names


def tokenizer_field(folder: Path, name: str, default: Any) -> Any:
    """Return a field of tokenizer_config.json; the default if it is of another type."""
    value = _read_object(folder / CHAT_FILES[1]).get(name)
    return value if isinstance(value, type(default)) else default


def response_template(folder: Path) -> Any:
    """Return the response template of a folder, which is not checked; None if it has none.

    Raises:
        NanoinferError: the file is too large or malformed.
    """
    return _read_object(folder / CHAT_FILES[1]).get("response_template")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters of a folder, as generation_config.json has them: {"temperature": 0.7, ...}.

    Raises:
        NanoinferError: the file is too large or malformed.
    """
    fields = _read_object(folder / GENERATION_CONFIG)
    return {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}


def to_files(
    template: str | None,
    special_tokens: Mapping[str, str],
    sampling_defaults: Mapping[str, Any],
    response_template: Any = None,
    tool_template: str | None = None,
) -> dict[str, bytes]:
    """Return the files that these are read from; none for what there is not."""
    files: dict[str, Any] = {GENERATION_CONFIG: sampling_defaults} if sampling_defaults else {}
    if response_template is not None:
        files[CHAT_FILES[1]] = {"response_template": response_template}
    if tool_template is not None:
        named = {"default": template, "tool_use": tool_template}
        listed = [{"name": name, "template": source} for name, source in named.items()]
        files[CHAT_FILES[1]] = {**files.get(CHAT_FILES[1], {}), "chat_template": listed}
    if template is not None:
        files[CHAT_FILES[3]] = special_tokens
    contents = {name: json.dumps(dict(content), indent=2).encode() + b"\n" for name, content in files.items()}
    return contents if template is None else {CHAT_FILES[0]: template.encode(), **contents}


def _read_object(path: Path) -> dict[str, Any]:
    return read_object(path, MAX_BYTES, "a JSON file") if path.is_file() else {}


def _text(token: Any) -> str | None:
    """Return the text of a special token: "<s>", or {"content": "<s>", ...}; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_template(path: Path) -> str | None:
    if not path.is_file():
        return None
    return decode_utf8(read_limited(path, 4 * MAX_TEMPLATE, "a chat template"), escaped(path))


def _named(templates: Any) -> dict[Any, Any]:
    """Return the templates of a list of {"name": ..., "template": ...} by their names; none for anything else."""
    listed = templates if isinstance(templates, list) else []
    return {t.get("name"): t.get("template") for t in listed if isinstance(t, dict) and _text(t.get("name"))}


def _default(template: Any, path: Path) -> str | None:
    """Return a template, or the one named "default" of a list of {"name": ..., "template": ...}."""
    if isinstance(template, list):
        if "default" not in (named := _named(template)):
            names = ", ".join(str(name) for name in named) or "none"
            raise NanoinferError(
                f"{escaped(path)} has no chat template named default (it has: {escaped(names)}): give chat_template="
            )
        template = named["default"]
    if not isinstance(template, str):
        raise NanoinferError(f"{escaped(path)}: chat_template is not a string")
    return template
