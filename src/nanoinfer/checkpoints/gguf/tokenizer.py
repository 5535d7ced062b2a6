"""The tokenizer in a GGUF file's metadata: read and written.

Covered: `gpt2` (byte-level BPE with merges; `tokenizer.ggml.pre` names how text is split, splits.py), `llama`
(SentencePiece's BPE: scores instead of merges, and byte tokens for what the vocabulary lacks), and `gemma4`, the same
with merges, and `t5` (SentencePiece's unigram). Not covered: bert, rwkv and others. Written are byte-level BPE and
vocabularies of ASCII characters, which are bytes.

A SentencePiece vocabulary becomes a BPE with merges in the order of the scores, as in transformers'
convert_slow_tokenizer.py (`generate_merges`, `LlamaConverter`).
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.splits import SPLITS
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, show
from nanoinfer.models.families.fields import Fields
from nanoinfer.tokenizers import limits
from nanoinfer.tokenizers.tokenizer import (
    ByteLevelTokenizer,
    CharTokenizer,
    Tokenizer,
    byte_alphabet,
    byte_level,
    explained,
    from_core,
    surround,
)
from nanoinfer.utils.checks import as_int, require_int

if TYPE_CHECKING:
    import tokenizers
    from nanoinfer.checkpoints.gguf.file import Value

log = logging.getLogger("nanoinfer")

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

WITHOUT_BYTES = ("gemma4", "sarvam-moe")
"""Values of tokenizer.ggml.pre for which tokens are spelled in characters, as SentencePiece's."""

TURN_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    # padding, and the next file or repository, of code that is filled in
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
))  # fmt: skip
"""Tokens that end a sequence, whatever their type, also in files that do not list them: llama.cpp, llama-vocab.cpp."""
_KEYS_OF_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Special token -> its name in the keys of a file."""


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file."""

    metadata: Mapping[str, Value]
    tokens: list[str]
    kinds: NDArray[np.generic]
    ids: dict[str, int]

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool of the metadata."""
        return Fields(self.metadata).flag(PREFIX + name, default)

    def special(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a special token."""
        key = f"{PREFIX}{name}_token_id"
        if key not in self.metadata:
            return default if default is not None and default < len(self.tokens) else None
        return require_int(key, self.metadata[key], 0, len(self.tokens) - 1)


def read_tokenizer(metadata: Mapping[str, Value], where: str) -> Tokenizer:
    """Return the tokenizer of a GGUF file whose arrays have passed `check_counts`.

    Args:
        metadata: of the file.
        where: the file's name, for error messages.

    Raises:
        NanoinferError: there is none, it is malformed, or of a kind that is not supported.
    """
    kind = metadata.get(f"{PREFIX}model")
    if kind is None or (isinstance(kind, str) and kind == "no_vocab"):  # not an array, which is compared by value
        raise NanoinferError(f"{where} has no tokenizer ({PREFIX}model): give token ids, or tokenizer= a file")
    with explained(f"{where}: the tokenizer cannot be read"):
        if not isinstance(kind, str) or kind not in ("gpt2", "llama", "t5", "gemma4"):
            raise NanoinferError(
                f"{PREFIX}model={show(kind)} is not supported: only gpt2, llama, t5 and gemma4 are:"
                " give tokenizer= (--tokenizer) the model's folder or tokenizer.json"
            )
        vocabulary = _read_vocabulary(metadata)
        pre = metadata.get(f"{PREFIX}pre", "default")
        if not isinstance(pre, str):
            raise NanoinferError(f"{PREFIX}pre={show(pre)} is not a string")
        if kind == "gpt2" and pre not in WITHOUT_BYTES:
            core, add_bos = _byte_level(vocabulary, pre)
        else:
            vocabulary = _with_characters(vocabulary) if kind == "llama" else vocabulary
            core, add_bos = _sentencepiece(vocabulary, kind), kind == "llama"
        _add_special(core, vocabulary)
        bos = vocabulary.special("bos", 1 if kind == "llama" else None)
        first = last = None
        # The key is false in files of Gemma 4, by mistake.
        if vocabulary.flag("add_bos_token", add_bos) or "gemma4" in (kind, pre):
            if bos is None:
                raise NanoinferError(f"{PREFIX}add_bos_token is true, but there is no {PREFIX}bos_token_id")
            first = vocabulary.tokens[bos], bos
        if vocabulary.flag("add_eos_token", False) and (eos := vocabulary.special("eos")) is not None:
            last = vocabulary.tokens[eos], eos  # of embeddings
        if first or last:
            surround(core, first, last)
        return from_core(core, vocabulary.ids)


def check_counts(metadata: Mapping[str, Value], vocab_size: int | None) -> None:
    """Compare the lengths of the tokenizer's arrays with the rows of the embedding, before anything is built of them.

    Args:
        metadata: of a GGUF file.
        vocab_size: rows of the embedding; None: the file has none.

    Raises:
        NanoinferError: an array is too long.
    """
    sizes = {}
    for name in ("tokens", "scores", "token_type", "merges"):
        value = metadata.get(PREFIX + name)
        sizes[name] = len(value) if isinstance(value, (list, np.ndarray)) else 0
    for name in ("tokens", "scores", "token_type"):
        has = f"{PREFIX}{name} has {sizes[name]} values"
        if sizes[name] > limits.MAX_TOKENS:
            raise NanoinferError(f"{has}; the limit is {limits.MAX_TOKENS}")
        if vocab_size is not None and sizes[name] > vocab_size + limits.MAX_TOKENS_WITHOUT_ROW:
            raise NanoinferError(f"{has}, but token_embd.weight has {vocab_size} rows: convert the model again")
    if sizes["merges"] > (limit := limits.MERGES_PER_TOKEN * (vocab_size or sizes["tokens"])):
        many = f"{PREFIX}merges has {sizes['merges']} values"
        raise NanoinferError(f"{many}, the limit for {limit // limits.MERGES_PER_TOKEN} tokens is {limit}")


def end_tokens(metadata: Mapping[str, Value], vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the start token and the tokens that end a sequence: of a document, of a turn, of a message.

    Args:
        metadata: of the file.
        vocab_size: rows of the embedding; tokens without a row are left out.

    Raises:
        NanoinferError: an id is not in the vocabulary.
    """
    tokens = metadata.get(f"{PREFIX}tokens")
    tokens = tokens if isinstance(tokens, list) else []
    ids = {}
    for name in ("bos", *_KEYS_OF_ENDS):
        if (value := metadata.get(key := f"{PREFIX}{name}_token_id")) is not None:
            ids[name] = require_int(key, value, 0, max(vocab_size, len(tokens)) - 1)
    bos = ids.pop("bos", None)
    names = _ends_by_name(metadata)
    ends = dict.fromkeys([*ids.values(), *(i for i, token in enumerate(tokens) if token in names)])
    message = None if "<|end|>" in names or "<|end|>" not in tokens else tokens.index("<|end|>")
    bos = None if bos is None or bos >= vocab_size else bos
    return bos, tuple(i for i in ends if i < vocab_size and i != message)


def _ends_by_name(metadata: Mapping[str, Value]) -> set[str]:
    """Return the tokens of `TURN_ENDS` that end a sequence beside the other tokens of a file.

    As in llama.cpp, but that it ends at `</s>` of Qwen, which merges lead to, and of Gemma 1 to 3: there it is HTML.
    """
    tokens, merges = metadata.get(f"{PREFIX}tokens"), metadata.get(f"{PREFIX}merges")
    names = set(TURN_ENDS.intersection(tokens)) if isinstance(tokens, list) else set()
    if names & {"<|call|>", "<|calls|>"} and names & {"<|return|>", "<|flush|>"}:
        names.discard("<|end|>")  # gpt-oss, Solar Open: another message follows
    if "<eos>" in names or not {"< /s>", "</ s>", "</s >"}.isdisjoint(merges if isinstance(merges, list) else []):
        names.discard("</s>")
    return names


TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"
"""Key of the template for chats with tools."""


def chat_template(metadata: Mapping[str, Value], key: str = "tokenizer.chat_template") -> str | None:
    """Return a chat template of a GGUF file, in Jinja, or None. Args: key: its own, or that of TOOL_TEMPLATE."""
    template = metadata.get(key)
    return template if isinstance(template, str) else None


def special_tokens(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Return the special tokens of a GGUF file that chat templates may use: {"bos_token": "<s>", ...}."""
    tokens = metadata.get(f"{PREFIX}tokens")
    special: dict[str, str] = {}
    for name, key in SPECIAL_KEYS.items():
        token_id = as_int(metadata.get(f"{PREFIX}{key}_token_id"))
        if isinstance(tokens, list) and token_id is not None and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return special


def _read_vocabulary(metadata: Mapping[str, Value]) -> _Vocabulary:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise NanoinferError(f"{PREFIX}tokens is not a list of one or more tokens")
    kinds = metadata.get(f"{PREFIX}token_type", np.full(len(tokens), NORMAL, np.int32))
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(tokens):
        raise NanoinferError(f"{PREFIX}token_type is not a list of {len(tokens)} integers, one for each token")
    count = len(tokens)  # converters fill the vocabulary up to the rows of the embedding; these are never sampled
    while count > 1 and kinds[count - 1] == UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens[:count])]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < count:
        (twice, _), *_ = (Counter(tokens) - Counter(set(tokens))).items()
        raise NanoinferError(f"{PREFIX}tokens has the token {show(twice)} twice")
    return _Vocabulary(metadata, tokens, kinds[:count], ids)


def _byte_level(vocabulary: _Vocabulary, pre: str) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE, and whether its kind begins prompts with the start token."""
    from tokenizers import models, normalizers

    if (split := SPLITS.get(pre)) is None:
        remedy = "tokenizer= a folder that has the model's tokenizer.json"
        raise NanoinferError(f"{PREFIX}pre={show(pre)}, a way of splitting text, is not known: give {remedy}")
    merges = models.BPE(vocabulary.ids, _merges(vocabulary), ignore_merges=split.whole_words, fuse_unk=False)
    core = byte_level(merges, split.patterns)
    if split.compose:
        core.normalizer = normalizers.NFC()
    return core, split.add_bos


def _with_characters(vocabulary: _Vocabulary) -> _Vocabulary:
    """Name byte tokens by their ASCII characters where longer tokens alone contain these, so that merges begin there.

    Gemma 1 and 2 have tokens of several tabs, and the tab as <0x09> only (transformers: `GemmaConverter.vocab`).
    """
    parts = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    characters = set("".join(token for token, kind in parts if kind in (NORMAL, USER_DEFINED, UNUSED)))
    names = {f"<0x{ord(c):02X}>": c for c in sorted(characters) if c.isascii() and c not in vocabulary.ids}
    ids = {i: character for name, character in names.items() if (i := vocabulary.ids.get(name)) is not None}
    if not ids:
        return vocabulary
    kinds, tokens = vocabulary.kinds.copy(), list(vocabulary.tokens)
    for i, character in ids.items():
        kinds[i], tokens[i] = NORMAL, character
    return replace(vocabulary, tokens=tokens, kinds=kinds, ids={token: i for i, token in enumerate(tokens)})


def _sentencepiece(vocabulary: _Vocabulary, kind: str) -> tokenizers.Tokenizer:
    """Return a BPE or, of the kind "t5", a unigram model, with byte fallback."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    unknown = vocabulary.special("unknown", 0)
    model: models.Model
    if kind == "t5":
        model = models.Unigram(_scored(vocabulary), unknown, byte_fallback=BYTE in vocabulary.kinds)
    else:
        model = models.BPE(
            vocabulary.ids,
            _merges(vocabulary) if f"{PREFIX}merges" in vocabulary.metadata else _merges_of_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    core = tokenizers.Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", kind in ("llama", "t5"))
    before: list[normalizers.Normalizer] = []
    charsmap = vocabulary.metadata.get(f"{PREFIX}precompiled_charsmap")
    if isinstance(charsmap, np.ndarray) and charsmap.dtype.kind in "iu" and len(charsmap):
        before.append(normalizers.Precompiled(charsmap.astype(np.uint8).tobytes()))
    if vocabulary.flag("remove_extra_whitespaces", False):
        before.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z| +(?= )"), ""))
    before += [normalizers.Prepend("▁")] if prefix else []
    core.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    limits.check_growth({"normalizer": limits.described(core.normalizer)})
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return core


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of the file, in order: ["Ġ t", ...] -> [("Ġ", "t"), ...]."""
    lines = vocabulary.metadata.get(f"{PREFIX}merges")
    if not isinstance(lines, list):
        raise NanoinferError(f"{PREFIX}merges is not a list of merges")
    merges = []
    for line in lines:
        first, _, right = line.partition(" ")
        if not first:  # a token may begin with a space
            first, _, right = line[1:].partition(" ")
            first = f" {first}"
        if not right:
            raise NanoinferError(f"{PREFIX}merges has {show(line)}, which is not two tokens")
        merges.append((first, right))
    return merges


def _scores(vocabulary: _Vocabulary) -> NDArray[np.generic]:
    """Return the scores of the tokens, or of more."""
    scores, count = vocabulary.metadata.get(f"{PREFIX}scores"), len(vocabulary.tokens)
    if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "fiu" or len(scores) < count:
        raise NanoinferError(f"{PREFIX}scores is not a list of {count} numbers, one for each token")
    if not np.isfinite(scores).all():
        raise NanoinferError(f"{PREFIX}scores has values that are not finite")
    return scores


def _scored(vocabulary: _Vocabulary) -> list[tuple[str, float]]:
    """Return the tokens of a unigram model with their scores; those that are no text are never the best."""
    parts = np.isin(vocabulary.kinds, (NORMAL, USER_DEFINED))
    scores = np.where(parts, _scores(vocabulary)[: len(parts)].astype(np.float64), -1e6)
    return list(zip(vocabulary.tokens, scores.tolist(), strict=True))


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the largest score first."""
    scores, count = _scores(vocabulary), len(vocabulary.tokens)
    ids = np.flatnonzero(np.isin(vocabulary.kinds, (NORMAL, USER_DEFINED, UNUSED)))  # the others are no parts of text
    tokens = [vocabulary.tokens[i] for i in ids.tolist()]
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    if (lengths**2).sum() > limits.MAX_MERGE_WORK:
        raise NanoinferError(f"{PREFIX}tokens has tokens that are too long to find their merges")
    chars = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
    first = _beginnings(chars, lengths)[:-1]
    right = len(tokens) - 1 - _beginnings(chars[::-1], lengths[::-1])[::-1][1:]
    owner = np.repeat(np.arange(len(tokens)), lengths)
    at = np.flatnonzero((first >= 0) & (right < len(tokens)) & (owner[:-1] == owner[1:]))
    if len(at) > (limit := limits.MERGES_PER_TOKEN * count):
        raise NanoinferError(f"the tokens can be made by more than {limit} merges, the limit for {count} tokens")
    first, right, merged = first[at], right[at], ids[owner[at]]
    order = np.lexsort((merged, -lengths[right], -lengths[first], -scores.astype(np.float64)[merged]))
    names = np.array(tokens, object)
    return list(zip(names[first[order]].tolist(), names[right[order]].tolist(), strict=True))


def _beginnings(chars: NDArray[np.uint32], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each character of tokens, which token equals its own token's characters up to this one; -1: none.

    The tokens a, b, ab, abc are the characters abababc, and give 0, 1, 0, 2, 0, 2, -1: where no other token begins in
    the same way, the characters are not followed to the end. All tokens are followed at once, a character at a time.

    Args:
        chars: code points of all tokens, one token after the other.
        lengths: characters of each token. All tokens are different.
    """
    starts = np.cumsum(lengths) - lengths
    beginnings = np.full(len(chars), -1)
    tokens, groups = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)  # that begin in the same way
    size = 0
    while len(tokens):
        keys = groups << 21 | chars[starts[tokens] + size]  # code points have 21 bits
        size += 1
        _, groups, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        whole = lengths[tokens] == size
        equal = np.full(len(sizes), -1)
        equal[groups[whole]] = tokens[whole]
        beginnings[starts[tokens] + size - 1] = equal[groups]
        longer = (sizes[groups] > 1) & ~whole
        tokens, groups = tokens[longer], groups[longer]
    return beginnings


def _add_special(core: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make the tokens that stand for themselves in a text: control tokens, and those that a user defined."""
    from tokenizers import AddedToken

    kinds = vocabulary.kinds.copy()
    kinds[[vocabulary.ids[token] for token in _ends_by_name(vocabulary.metadata)]] = CONTROL
    for name in ("bos", "eos"):
        if (token_id := vocabulary.special(name)) is not None and f"{PREFIX}token_type" not in vocabulary.metadata:
            kinds[token_id] = CONTROL  # files of 2023 have no types
    for special, members in ((True, (CONTROL, UNKNOWN)), (False, (USER_DEFINED,))):
        ids = np.flatnonzero(np.isin(kinds, members)).tolist()
        core.add_tokens([AddedToken(vocabulary.tokens[i], normalized=False, special=special) for i in ids])


_TEXT = (
    "The cat's 12345 hats, DON'T they?\n\n\tI'LL pay  $3.14 (\u03c0) -- na\u00efve caf\u00e9 \u6771\u4eac \U0001f642"
    " e\u0301 a_b<x>|y\r\n  x   y \u00bd \u00b2\u3000z  42'Twas q\u0301a    b \u4e2d\u6587c//\n/"
)
"""The known ways of splitting split it differently. llama.cpp's converter recognises tokenizers by such a text, too."""


def write_tokenizer(tokenizer: Tokenizer, config: ModelConfig, special_tokens: Mapping[str, str]) -> dict[str, Value]:
    """Return the metadata of a tokenizer: what `read_tokenizer`, `end_tokens` and `special_tokens` read.

    Args:
        tokenizer: of the model, byte-level BPE or ASCII characters.
        config: of the model; rows of its embedding that have no token get the tokens [PAD...].
        special_tokens: variables of the chat template.

    Raises:
        NanoinferError: the tokenizer is of a kind that GGUF files do not support.
    """
    core: Any = _of_ascii(tokenizer.chars) if isinstance(tokenizer, CharTokenizer) else getattr(tokenizer, "core", None)
    model = json.loads(core.to_str())["model"] if core is not None else {"type": type(tokenizer).__name__}
    if not isinstance(tokenizer, (ByteLevelTokenizer, CharTokenizer)) or model["type"] != "BPE":
        raise NanoinferError(f"the tokenizer is of the type {model['type']}: only byte-level BPE can be written")
    tokens, kinds = [f"[PAD{i}]" for i in range(config.vocab_size)], np.full(config.vocab_size, UNUSED, np.int32)
    ids: dict[str, int] = {t: i for t, i in core.get_vocab(with_added_tokens=True).items() if i < config.vocab_size}
    for token, i in ids.items():
        tokens[i], kinds[i] = token, NORMAL
    for i, added in core.get_added_tokens_decoder().items():
        if i < config.vocab_size:
            kinds[i] = CONTROL if added.special else USER_DEFINED
    values: dict[str, Value] = {"tokens": tokens, "token_type": kinds, "model": "gpt2", "add_space_prefix": False}
    values |= {"pre": _split_name(core, model), "merges": [" ".join(merge) for merge in model["merges"]]}
    values |= _special_ids(tokenizer, config, special_tokens, ids)
    metadata = {f"{PREFIX}{name}": value for name, value in values.items()}
    text = "".join(tokenizer.chars) if isinstance(tokenizer, CharTokenizer) else _TEXT
    if read_tokenizer(metadata, "the new file").encode(text) != tokenizer.encode(text):
        raise NanoinferError("the tokenizer splits text into other tokens than tokenizers of GGUF files")
    return metadata


def write_no_tokenizer(config: ModelConfig) -> dict[str, Value]:
    """Return the metadata of a file without a tokenizer: the ids of start and end tokens."""
    named = dict(zip(("eos", "eot", "eom"), config.eos_token_ids, strict=False))
    if config.bos_token_id is not None:
        named["bos"] = config.bos_token_id
    return {f"{PREFIX}model": "no_vocab", **{f"{PREFIX}{key}_token_id": i for key, i in named.items()}}


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
    special = {key: i for key, i in named.items() if i is not None}
    for start in (config.bos_token_id, special.get("bos"), tokenizer.bos_token_id):  # the last one decides
        if start is not None:
            special["bos"] = start
    ends = sorted(config.eos_token_ids, key=lambda i: i != special.get("eos"))
    if not ends and "eos" not in special:
        ends = [ids[token] for token in ("\u00ff", "<0xFF>") if token in ids]
        if not ends:
            log.warning("the model has no end token: llama.cpp takes one of its tokens as one, so text may end there")
    tokens = {i: token for token, i in ids.items()}
    ends = ends[:1] + [i for i in ends[1:] if tokens.get(i) not in TURN_ENDS]  # readers find these by their names
    if len(ends) > 3:
        log.warning("%d of the model's end tokens are left out: a GGUF file names three", len(ends) - 3)
    special |= zip(("eos", "eot", "eom"), ends, strict=False)
    return {"add_bos_token": tokenizer.bos_token_id is not None, **{f"{key}_token_id": i for key, i in special.items()}}


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
