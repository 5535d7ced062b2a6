"""The tokenizer in a GGUF file's metadata.

Covered: `gpt2` (byte-level BPE with merges; `tokenizer.ggml.pre` names how text is split), `llama` (SentencePiece's
BPE: scores instead of merges, and byte tokens for what the vocabulary lacks), and `gemma4`, the same with merges. Not
covered: bert, t5, rwkv and others.

A SentencePiece vocabulary becomes a BPE with merges in the order of the scores, as in transformers'
convert_slow_tokenizer.py (`generate_merges`, `LlamaConverter`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nanoinfer.errors import NanoinferError
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.special_tokens import surround
from nanoinfer.models.tokenizer_limits import MAX_MERGE_WORK, MAX_TOKENS, MERGES_PER_TOKEN
from nanoinfer.models.tokenizers import Tokenizer, byte_level, explained, from_core
from nanoinfer.utils.checks import as_int, require_int, show

log = logging.getLogger("nanoinfer")

if TYPE_CHECKING:
    import tokenizers

    from nanoinfer.models.checkpoints.gguf_file import Value

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Split:
    """How text is split before BPE: each pattern splits the pieces of the one before."""

    patterns: tuple[str, ...]
    add_bos: bool = False
    """Whether prompts begin with the start token if the file does not say it."""
    whole_words: bool = False
    """Whether a piece that is a token stays whole, even if merges do not lead to it."""
    compose: bool = False
    """Whether text is normalized to NFC."""


SPLITS = {
    "gpt-2": _Split((_GPT2,)),
    "olmo": _Split((_GPT2,)),
    "smollm": _Split((r"\p{N}", _GPT2)),
    "llama-bpe": _Split((_LLAMA3,), add_bos=True, whole_words=True),
    "smaug-bpe": _Split((_LLAMA3,)),
    "dbrx": _Split((_LLAMA3,)),
    "qwen2": _Split((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), compose=True),
    "deepseek-v3": _Split((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    # What llama.cpp uses for files of before May 2024, which do not say how text is split.
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""By tokenizer.ggml.pre. Source: llama.cpp, src/llama-vocab.cpp, where each has the original pattern in a comment."""
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}

TURN_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<turn|>",
))  # fmt: skip
"""Control tokens that end a sequence also in files that do not list them, as in llama.cpp."""

SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
"""Special token -> its name in the keys of a file."""


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file."""

    metadata: Mapping[str, Value]
    tokens: list[str]
    kinds: list[int]

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
        if not isinstance(kind, str) or kind not in ("gpt2", "llama", "gemma4"):
            raise NanoinferError(f"{PREFIX}model={show(kind)} is not supported: only gpt2, llama and gemma4 are")
        vocabulary = _read_vocabulary(metadata)
        core, add_bos = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
        _add_special(core, vocabulary)
        bos = vocabulary.special("bos", 1 if kind == "llama" else None)
        first = last = None
        if vocabulary.flag("add_bos_token", add_bos):
            if bos is None:
                raise NanoinferError(f"{PREFIX}add_bos_token is true, but there is no {PREFIX}bos_token_id")
            first = vocabulary.tokens[bos], bos
        if vocabulary.flag("add_eos_token", False) and (eos := vocabulary.special("eos")) is not None:
            last = vocabulary.tokens[eos], eos  # of embeddings
        if first or last:
            surround(core, first, last)
        return from_core(core)


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
        if sizes[name] > MAX_TOKENS:
            raise NanoinferError(f"{has}; the limit is {MAX_TOKENS}")
        if vocab_size is not None and sizes[name] > vocab_size:
            raise NanoinferError(f"{has}, but token_embd.weight has {vocab_size} rows: convert the model again")
    if sizes["merges"] > (limit := MERGES_PER_TOKEN * (vocab_size or sizes["tokens"])):
        many = f"{PREFIX}merges has {sizes['merges']} values"
        raise NanoinferError(f"{many}, the limit for {limit // MERGES_PER_TOKEN} tokens is {limit}")


def end_tokens(metadata: Mapping[str, Value], vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the start token and the tokens that end a sequence: of a document, of a turn, of a message.

    Raises:
        NanoinferError: an id is not in the vocabulary.
    """
    found = []
    for name in ("bos", "eos", "eot", "eom"):
        if (value := metadata.get(f"{PREFIX}{name}_token_id")) is not None:
            found.append((name, require_int(f"{PREFIX}{name}_token_id", value, 0, vocab_size - 1)))
    tokens, kinds = metadata.get(f"{PREFIX}tokens"), metadata.get(f"{PREFIX}token_type")
    ends = [token_id for name, token_id in found if name != "bos"]
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(tokens) == len(kinds) <= vocab_size:
        ends += [int(i) for i in np.flatnonzero(kinds == CONTROL) if tokens[i] in TURN_ENDS]
    return dict(found).get("bos"), tuple(dict.fromkeys(ends))


def chat_template(metadata: Mapping[str, Value]) -> str | None:
    """Return the chat template of a GGUF file, a Jinja template, or None."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def special_tokens(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Return the special tokens of a GGUF file that chat templates may use: {"bos_token": "<s>", ...}."""
    tokens = metadata.get(f"{PREFIX}tokens")
    found: dict[str, str] = {}
    for name, key in SPECIAL_KEYS.items():
        token_id = as_int(metadata.get(f"{PREFIX}{key}_token_id"))
        if isinstance(tokens, list) and token_id is not None and 0 <= token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found


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
    if len(set(tokens)) < count:
        (twice, _), *_ = (Counter(tokens) - Counter(set(tokens))).items()
        raise NanoinferError(f"{PREFIX}tokens has the token {show(twice)} twice")
    return _Vocabulary(metadata, tokens, kinds[:count].tolist())


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE, and whether its kind begins prompts with the start token."""
    from tokenizers import models, normalizers

    name = vocabulary.metadata.get(f"{PREFIX}pre", "default")
    if not isinstance(name, str) or (split := SPLITS.get(_SAME.get(name, name))) is None:
        known = ", ".join(SPLITS)
        raise NanoinferError(f"{PREFIX}pre={show(name)} is not supported: only {known} are")
    merges = models.BPE(_ids(vocabulary), _merges(vocabulary), ignore_merges=split.whole_words, fuse_unk=False)
    core = byte_level(merges, split.patterns)
    if split.compose:
        core.normalizer = normalizers.NFC()
    return core, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a BPE with byte fallback, and that prompts begin with the start token."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    unknown = vocabulary.special("unknown", 0)
    core = tokenizers.Tokenizer(
        models.BPE(
            _ids(vocabulary),
            _merges(vocabulary) if f"{PREFIX}merges" in vocabulary.metadata else _merges_of_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    core.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return core, True


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    return {token: i for i, token in enumerate(vocabulary.tokens)}


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of the file, in order: ["Ġ t", ...] -> [("Ġ", "t"), ...]."""
    lines = vocabulary.metadata.get(f"{PREFIX}merges")
    if not isinstance(lines, list):
        raise NanoinferError(f"{PREFIX}merges is not a list of merges")
    merges = []
    for line in lines:
        left, space, right = line[1:].partition(" ")  # a token may begin with a space
        if not space or not right:
            raise NanoinferError(f"{PREFIX}merges has {show(line)}, which is not two tokens")
        merges.append((line[0] + left, right))
    return merges


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the largest score first."""
    scores = vocabulary.metadata.get(f"{PREFIX}scores")
    count = len(vocabulary.tokens)
    if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "fiu" or len(scores) < count:
        raise NanoinferError(f"{PREFIX}scores is not a list of {count} numbers, one for each token")
    if not np.isfinite(scores).all():
        raise NanoinferError(f"{PREFIX}scores has values that are not finite")
    if sum(len(token) ** 2 for token in vocabulary.tokens) > MAX_MERGE_WORK:
        raise NanoinferError(f"{PREFIX}tokens has tokens that are too long to find their merges")
    made_of = (NORMAL, USER_DEFINED, UNUSED)  # the others are no parts of text
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.kinds[i] in made_of}
    found = []
    for token, i in ids.items():
        score = float(scores[i])
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((-score, -len(left), -len(right), left, right))
        if len(found) > MERGES_PER_TOKEN * count:
            raise NanoinferError(
                f"the tokens can be made by more than {MERGES_PER_TOKEN * count} merges, the limit for {count} tokens"
            )
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _add_special(core: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make the tokens that stand for themselves in a text: control tokens, and those that a user defined."""
    from tokenizers import AddedToken

    kinds = dict(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    for name in ("bos", "eos"):
        if (token_id := vocabulary.special(name)) is not None and f"{PREFIX}token_type" not in vocabulary.metadata:
            kinds[vocabulary.tokens[token_id]] = CONTROL  # files of 2023 have no types
    special = [token for token, kind in kinds.items() if kind in (CONTROL, UNKNOWN)]
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    defined = [token for token, kind in kinds.items() if kind == USER_DEFINED]
    core.add_tokens([AddedToken(token, normalized=False) for token in defined])
