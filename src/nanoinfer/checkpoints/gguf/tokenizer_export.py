"""Write a tokenizer as metadata of a GGUF file: the inverse of gguf_tokenizer.py.

Covered: byte-level BPE; SentencePiece's BPE with byte fallback; vocabularies of ASCII characters, which are bytes.
Not covered: WordPiece, Unigram, vocabularies of other characters.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.splits import SPLITS
from nanoinfer.checkpoints.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    SPECIAL_KEYS,
    TURN_ENDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_tokenizer,
)
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.tokenizers.tokenizer import ByteLevelTokenizer, CharTokenizer, Tokenizer, byte_alphabet, byte_level
from nanoinfer.utils.checks import show

if TYPE_CHECKING:
    import tokenizers
    from nanoinfer.checkpoints.gguf.file import Value

log = logging.getLogger("nanoinfer")

_TEXT = (
    "The cat's 12345 hats, DON'T they?\n\n\tI'LL pay  $3.14 (\u03c0) -- na\u00efve caf\u00e9 \u6771\u4eac \U0001f642"
    " e\u0301 a_b<x>|y\r\n  x   y \u00bd \u00b2\u3000z  42'Twas q\u0301a    b \u4e2d\u6587c//\n/"
)
"""The known ways of splitting split it differently. llama.cpp's converter recognises tokenizers by such a text, too."""


def write_tokenizer(tokenizer: Tokenizer, config: ModelConfig, special_tokens: Mapping[str, str]) -> dict[str, Value]:
    """Return the metadata of a tokenizer: what `read_tokenizer`, `end_tokens` and `special_tokens` read.

    Args:
        tokenizer: of the model.
        config: of the model; rows of its embedding that have no token get the tokens [PAD...].
        special_tokens: variables of the chat template.

    Raises:
        NanoinferError: the tokenizer is of a kind that GGUF files do not support.
    """
    core: Any = _of_ascii(tokenizer.chars) if isinstance(tokenizer, CharTokenizer) else getattr(tokenizer, "core", None)
    model = json.loads(core.to_str())["model"] if core is not None else {"type": type(tokenizer).__name__}
    if model["type"] != "BPE":
        raise NanoinferError(f"the tokenizer is of the type {model['type']}: only BPE can be written")
    tokens, kinds = [f"[PAD{i}]" for i in range(config.vocab_size)], np.full(config.vocab_size, UNUSED, np.int32)
    ids: dict[str, int] = {t: i for t, i in core.get_vocab(with_added_tokens=True).items() if i < config.vocab_size}
    for token, i in ids.items():
        tokens[i], kinds[i] = token, NORMAL
    for i, added in core.get_added_tokens_decoder().items():
        if i < config.vocab_size:
            kinds[i] = CONTROL if added.special else USER_DEFINED
    found: dict[str, Value] = {"tokens": tokens, "token_type": kinds}
    found |= _special_ids(tokenizer, config, special_tokens, ids)
    prefixes = [{"add_space_prefix": False}]
    if isinstance(tokenizer, (ByteLevelTokenizer, CharTokenizer)):
        merges = [" ".join(merge) for merge in model["merges"]]
        found |= {"model": "gpt2", "pre": _split_name(core, model), "merges": merges}
    else:
        found |= _sentencepiece(model, tokens, kinds)
        prefixes.append({"add_space_prefix": True})
    text = "".join(tokenizer.chars) if isinstance(tokenizer, CharTokenizer) else _TEXT
    for prefix in prefixes:
        metadata = {f"{PREFIX}{name}": value for name, value in (found | prefix).items()}
        if read_tokenizer(metadata, "the new file").encode(text) == tokenizer.encode(text):
            return metadata
    raise NanoinferError(f"the tokenizer splits text into other tokens than tokenizers of the kind {found['model']}")


def write_no_tokenizer(config: ModelConfig) -> dict[str, Value]:
    """Return the metadata of a file without a tokenizer: the ids of start and end tokens."""
    found = dict(zip(("eos", "eot", "eom"), config.eos_token_ids, strict=False))
    if config.bos_token_id is not None:
        found["bos"] = config.bos_token_id
    return {f"{PREFIX}model": "no_vocab", **{f"{PREFIX}{key}_token_id": i for key, i in found.items()}}


def _of_ascii(chars: list[str]) -> tokenizers.Tokenizer:
    """Return a vocabulary of characters as byte-level BPE without merges."""
    from tokenizers import models

    if wide := [c for c in chars if len(c) != 1 or not c.isascii()]:
        raise NanoinferError(f"the tokenizer is character-level and has {show(wide[0])}: only ASCII can be written")
    letters = {chr(byte): letter for letter, byte in byte_alphabet().items()}
    return byte_level(models.BPE({letters[c]: i for i, c in enumerate(chars)}, []))


def _special_ids(
    tokenizer: Tokenizer, config: ModelConfig, special_tokens: Mapping[str, str], ids: Mapping[str, int]
) -> dict[str, Value]:
    """Return the ids of special tokens, and whether prompts begin with the start token.

    llama.cpp takes token 11 as the end token of a byte-level vocabulary that names none. If the model has no end token,
    a byte is named that no UTF-8 text contains.
    """
    named = {key: ids.get(special_tokens.get(f"{name}_token", "")) for name, key in SPECIAL_KEYS.items()}
    found = {key: i for key, i in named.items() if i is not None}
    for start in (config.bos_token_id, found.get("bos"), tokenizer.bos_token_id):  # the last one decides
        if start is not None:
            found["bos"] = start
    ends = sorted(config.eos_token_ids, key=lambda i: i != found.get("eos"))
    if not ends and "eos" not in found:
        ends = [ids[token] for token in ("\u00ff", "<0xFF>") if token in ids]
        if not ends:
            log.warning("the model has no end token: llama.cpp takes one of its tokens as one, so text may end there")
    tokens = {i: token for token, i in ids.items()}
    ends = ends[:1] + [i for i in ends[1:] if tokens.get(i) not in TURN_ENDS]  # readers know these by their names
    if len(ends) > 3:
        log.warning("%d of the model's end tokens are left out: a GGUF file names three", len(ends) - 3)
    found |= zip(("eos", "eot", "eom"), ends, strict=False)
    return {"add_bos_token": tokenizer.bos_token_id is not None, **{f"{key}_token_id": i for key, i in found.items()}}


def _split_name(core: tokenizers.Tokenizer, model: Mapping[str, Any]) -> str:
    """Return the name of the way in which a byte-level tokenizer splits text."""
    from tokenizers import models

    if not model["merges"]:  # each byte is a token, however text is split
        return "gpt-2"
    text = _TEXT if core.normalizer is None else core.normalizer.normalize_str(_TEXT)
    pieces = None if core.pre_tokenizer is None else core.pre_tokenizer.pre_tokenize_str(text)
    first_names = {split: name for name, split in reversed(SPLITS.items())}
    for split, name in reversed(first_names.items()):
        same = byte_level(models.BPE({}, []), split.patterns).pre_tokenizer.pre_tokenize_str(text) == pieces
        composed = unicodedata.normalize("NFC", _TEXT) if split.compose else _TEXT
        if same and text == composed and split.whole_words == model["ignore_merges"]:
            return name
    raise NanoinferError("the tokenizer splits text in another way than those that tokenizer.ggml.pre names")


def _sentencepiece(model: Mapping[str, Any], tokens: list[str], kinds: NDArray[np.int32]) -> dict[str, Value]:
    """Return what a BPE with byte fallback has beside tokens: scores, from which readers make the merges again."""
    if not model["byte_fallback"]:
        raise NanoinferError(
            "the tokenizer is a BPE without bytes: only byte-level and with byte fallback can be written"
        )
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    scores = np.array([-ranks.get(token, len(model["merges"])) for token in tokens], np.float32)
    kinds[[re.fullmatch("<0x[0-9A-F]{2}>", token) is not None for token in tokens]] = BYTE
    found: dict[str, Value] = {"model": "llama", "scores": scores}
    if model["unk_token"] is not None:
        found["unknown_token_id"] = unknown = tokens.index(model["unk_token"])
        kinds[unknown] = UNKNOWN
    return found
