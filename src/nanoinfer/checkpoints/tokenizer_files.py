"""The tokenizer of a folder, and its chat templates, special tokens and default sampling parameters.

The tokenizer is in the first of these: tokenizer.json; vocab.json with merges.txt; tekken.json (source:
mistral_common/tokens/tokenizers/tekken.py). The chat template is in chat_template.jinja, else in tokenizer_config.json
(a string, or a list of named templates), else in chat_template.json; special tokens are in tokenizer_config.json, else
in special_tokens_map.json. transformers makes a tokenizer.json of a tokenizer.model.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from nanoinfer.checkpoints.gguf.splits import SPLITS
from nanoinfer.errors import NanoinferError
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
    prepend,
    ranked,
    read_table,
)
from nanoinfer.utils.checks import require_int, show
from nanoinfer.utils.files import decode_utf8, escaped, parse_json, read_limited, read_object

log = logging.getLogger("nanoinfer")

NAMES = ("tokenizer.json", "tekken.json", "vocab.json with merges.txt")
_SPLIT_OF_CLASS = {"Qwen2Tokenizer": "qwen2", "CohereTokenizer": "command-r", "GPTNeoXTokenizer": "olmo"}
_SPLIT_OF_FAMILY = {
    "gpt2": "gpt-2", "gptj": "gpt-2", "opt": "gpt-2", "phi": "gpt-2", "exaone4": "exaone4", "qwen2": "qwen2",
    "qwen2_moe": "qwen2", "qwen3": "qwen2", "qwen3_moe": "qwen2", "starcoder2": "starcoder", "granite": "refact",
    "granitemoe": "refact", "cohere": "command-r", "cohere2": "command-r", "gpt_neox": "olmo", "olmo": "olmo",
    "olmoe": "olmo",
}  # fmt: skip
"""model_type -> the name of its way of splitting text (gguf/splits.py)."""
_MAX_CONFIG_BYTES = 1 << 20


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
    return from_file(path, num_tokens)


def _from_vocab_and_merges(folder: Path, num_tokens: int) -> Tokenizer:
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
        _prepend_bos(core, folder, ids)
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
        names = {i: f"<SPECIAL_{i}>" for i in range(count)}
        names |= {require_int("rank", t["rank"], 0, count - 1): t["token_str"] for t in raw["special_tokens"]}
        special = {name: i for i, name in names.items()}
        core = ranked(in_order(ranks, 0, bytes), special, (config["pattern"],), count)
        core.add_special_tokens(list(special))
        if "<s>" in special:
            prepend(core, "<s>", special["<s>"])
        return from_core(core)


def _prepend_bos(core: Any, folder: Path, ids: dict[str, int]) -> None:
    """Let prompts begin with the start token, if the folder's `add_bos_token` is true."""
    bos = special_tokens(folder).get("bos_token")
    if bos is not None and bos in ids and tokenizer_field(folder, "add_bos_token", False):
        prepend(core, bos, ids[bos])


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
