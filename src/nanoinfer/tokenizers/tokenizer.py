"""Tokenizers: text to token ids and back, and incremental decoding.

A `Tokenizer` is of one of three classes:

- `GenericTokenizer`: any `tokenizer.json` (WordPiece, SentencePiece); decodes by re-decoding a suffix.
- `ByteLevelTokenizer`: one with byte-level BPE, as in GPT-2 and the built-in models; decodes bytes.
- `CharTokenizer`: one token per character, for nanoGPT's `meta.pkl` and `nanoinfer train --tokenizer char`.

Incremental decoding turns the output tokens of one sequence into text, token by token. There is one stream class for
tokens that are bytes or characters, and one for all others. Both emit whole characters only.

Covered: any file that the tokenizers library loads; checkpoints/tokenizer_files.py reads others.
Not covered: tokenizers that are Python code.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import NanoinferError, escaped, reason, show
from nanoinfer.tokenizers import limits
from nanoinfer.utils import processes
from nanoinfer.utils.files import decode_utf8, read_limited

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger("nanoinfer")

LONG_TEXT = 2048  # characters that take more than a few milliseconds; a batch starts the library's own threads
HUGE_TEXT = 1 << 17  # characters after which memory is released to the system: up to 200 bytes each
CACHED_WORDS = 1000  # whose tokens the library keeps, for each thread: up to 10 KB each; by default 100 MB in all
MAX_TOKENIZER_BYTES = 128 << 20  # GPT-2's tokenizer.json has 1.3 MB, the largest known one 60 MB


def decode(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """Return the text of `token_ids`; bytes that are not valid UTF-8 become U+FFFD."""
    stream = tokenizer.stream()
    return "".join(map(stream.push, token_ids)) + stream.flush()


def byte_alphabet() -> dict[str, int]:
    """Return the inverse of GPT-2's byte-to-character table: "A" -> 65, "Ġ" -> 32.

    Printable Latin-1 bytes map to themselves; the 68 others map to U+0100 and up, in order (Radford et al. 2019,
    encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


class GenericTokenizer:
    """Any tokenizer that the tokenizers library loads."""

    bos_token_id: int | None
    """Token that begins each prompt which is given as text; None: there is none. `encode` does not add it."""
    special_tokens: Mapping[int, str]
    """Tokens that are no text, such as those that end a turn, with their spelling."""
    suffix: tuple[int, ...]
    """Tokens that end each text of which an embedding is made. `encode` does not add them."""

    def __init__(self, core: tokenizers.Tokenizer, vocab: Mapping[str, int] | None = None) -> None:
        if (resize := getattr(core.model, "_resize_cache", None)) is not None:  # BPE and Unigram have a cache
            resize(CACHED_WORDS)
        self.core, vocab = core, vocab or core.get_vocab(with_added_tokens=True)
        self._longest, self.vocab_size = limits.longest_token(core, byte_alphabet(), vocab), _table_size(vocab)
        self.bos_token_id, self.suffix = around(core)
        added = core.get_added_tokens_decoder()
        self.special_tokens = {i: token.content for i, token in added.items() if token.special}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` alone. Raises NanoinferError for text that cannot be tokenized."""
        ids = _encode(self.core, text)
        if ids and (last := max(ids)) >= self.vocab_size:
            token = show(self.core.id_to_token(last))
            raise NanoinferError(f"the model has no row for token {last}, {token}: remove it from the text")
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without tokenizing it; 0 if no bound is known."""
        return 0 if self._longest is None else self._longest.least_tokens(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token alone: b"\xe2" for '<0xE2>', else those of its text.

        Raises NanoinferError for an id that the tokenizer does not have.
        """
        text = decode(self, [token_id])
        byte = BYTE_TOKEN.fullmatch(spelled(self.core, token_id, self.vocab_size) or "") if MISSING in text else None
        return text.encode() if byte is None else bytes.fromhex(byte[1])

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a new stream for the tokens that follow a prompt.

        Prompt text followed by streamed text equals the text of all tokens, including the space between two words:

            text of [▁the] = "the"    stream([▁the]).push(▁engine) = " engine"    text of [▁the, ▁engine] = "the engine"

        There are two exceptions. If a prompt ends inside a character, its text ends with U+FFFD and the stream begins
        with the whole character. If a byte makes characters before it invalid, text already emitted stays.
        """
        return SuffixStream(self.core, self.vocab_size, prompt_token_ids)


class ByteLevelTokenizer(GenericTokenizer):
    """Byte-level BPE: every token is a byte string, and every text can be tokenized."""

    def __init__(self, core: tokenizers.Tokenizer, vocab: Mapping[str, int] | None = None) -> None:
        super().__init__(core, vocab)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}  # of those that are whole characters
        self._alphabet = byte_alphabet()
        self._special = {i: t.content for i, t in core.get_added_tokens_decoder().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token: 'Ġthe' -> b' the'; for an added token, its content."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
            with suppress(UnicodeDecodeError):
                self._texts[token_id] = known.decode()
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id].encode()
        token = spelled(self.core, token_id, self.vocab_size)
        if token is None:
            return MISSING.encode()
        return b"".join(bytes([self._alphabet[c]]) if c in self._alphabet else c.encode() for c in token)

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a new stream for the tokens that follow a prompt."""
        return Utf8Stream(self.token_bytes, self._texts, self.vocab_size, prompt_token_ids)


class CharTokenizer:
    """Character-level tokenizer: one token per character. Encoding any other character is an error.

    Raises:
        NanoinferError: the vocabulary is empty, or contains a lone surrogate, which UTF-8 cannot encode.
    """

    def __init__(self, chars: Sequence[str]) -> None:
        if not chars:
            raise NanoinferError("the vocabulary is empty: a tokenizer needs at least one character")
        if lone := [c for c in chars if any("\ud800" <= x <= "\udfff" for x in c)]:
            raise NanoinferError(f"the vocabulary holds {lone[0]!r}, a lone surrogate, which is not a character")
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.bos_token_id: int | None = None
        self.special_tokens: Mapping[int, str] = {}
        self.suffix: tuple[int, ...] = ()
        self._ids = {c: i for i, c in enumerate(self.chars)}
        self._texts = dict(enumerate(self.chars))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        try:
            return [self._ids[c] for c in text]
        except KeyError as e:
            raise NanoinferError(
                f"character {e.args[0]!r} is not among the {self.vocab_size} characters of this character-level"
                " model's vocabulary: remove it, or use a model with a byte-level tokenizer"
            ) from None

    def least_tokens(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return len(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        if token_id not in self._texts:
            raise no_text(token_id, self.vocab_size)
        return self._texts[token_id].encode()

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a new stream for the tokens that follow a prompt."""
        return Utf8Stream(self.token_bytes, self._texts, self.vocab_size, prompt_token_ids)


Tokenizer = GenericTokenizer | CharTokenizer
"""Text to token ids and back."""


def _table_size(vocab: Mapping[str, int]) -> int:
    """Return 1 + the largest token id of a vocabulary with added tokens; ids may have gaps."""
    if not vocab:
        raise NanoinferError("the vocabulary is empty: a tokenizer needs at least one token")
    if (size := 1 + max(vocab.values())) > limits.MAX_VOCAB_SIZE:
        raise NanoinferError(f"token id {size - 1} is too large: ids must be less than {limits.MAX_VOCAB_SIZE}")
    return size


def _encode(core: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as e:  # lone surrogates, which stand for bytes that were not valid UTF-8
        raise NanoinferError(f"the text is not valid Unicode ({e}): give UTF-8 text") from None
    with explained("the text cannot be encoded"):
        if len(text) < LONG_TEXT:
            return list(core.encode(text, add_special_tokens=False).ids)
        # `encode` holds Python's global lock, so it would stop all other threads: 0.1 s for 100,000 characters.
        (encoded,) = core.encode_batch_fast([text], add_special_tokens=False)
        ids = list(encoded.ids)
    if len(text) >= HUGE_TEXT:
        del encoded
        processes.trim_memory()
    return ids


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert errors of the tokenizers library to NanoinferError: it raises bare Exception, and Rust code may panic."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise  # KeyboardInterrupt, SystemExit
        raise NanoinferError(f"{what}: {reason(e)}") from None


def from_json(text: str, source: str) -> Tokenizer:
    """Return the tokenizer that the content of a `tokenizer.json` describes.

    Its truncation and padding settings are ignored: they would silently drop or add tokens.

    Args:
        text: the file's content.
        source: the file's name, for error messages.

    Raises:
        NanoinferError: the content is not a tokenizer, or exceeds the limits of limits.py.
    """
    import tokenizers

    with explained(f"{escaped(source)} is not a readable tokenizer.json"):
        core = tokenizers.Tokenizer.from_str(text)  # the vocabulary is parsed once, by the library
        spec = {name: limits.described(getattr(core, name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
        limits.check_growth(spec)
        core.no_truncation()
        core.no_padding()
        return from_core(core)


def from_core(core: tokenizers.Tokenizer, vocab: Mapping[str, int] | None = None) -> Tokenizer:
    """Return the tokenizer around one of the tokenizers library, of the class that fits its decoder.

    `vocab`: its tokens, with the added ones, if they are at hand: the library takes 0.3 s to return Gemma's.
    """
    decoder = (limits.described(core.decoder) or {}).get("type")
    if decoder == "Fuse" and _table_size(core.get_vocab()) and (chars := _chars(core)) is not None:
        return CharTokenizer(chars)
    return (ByteLevelTokenizer if decoder == "ByteLevel" else GenericTokenizer)(core, vocab)


def _chars(core: tokenizers.Tokenizer) -> list[str] | None:
    """Return the characters of a vocabulary that `char_to_json` wrote; None for any other tokenizer."""
    model = limits.described(core.model)
    if model["type"] != "BPE" or model["merges"]:
        return None
    return in_order(core.get_vocab(with_added_tokens=False))  # not the model's, which lists one token for each id


def read_table(path: Path, what: str, num_tokens: int) -> bytes:
    """Return the content of a tokenizer's file, after comparing its size with the model's."""
    raw = read_limited(path, MAX_TOKENIZER_BYTES, what)
    marks, per_token = (
        ((b",", b":"), limits.VALUES_PER_TOKEN) if path.suffix == ".json" else ((b"\n",), limits.MERGES_PER_TOKEN)
    )
    try:
        limits.check_size(raw, marks, per_token, num_tokens)
    except ValueError as e:
        raise NanoinferError(f"{escaped(path)} {e}") from None
    return raw


def from_file(path: Path, num_tokens: int = limits.MAX_TOKENS) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json for a model of `num_tokens` tokens."""
    return from_json(decode_utf8(read_table(path, "a tokenizer", num_tokens), escaped(path)), str(path))


def in_order(ids: Mapping[Any, Any], first: int = 0, kind: type = str) -> list[Any]:
    """Return tokens in order of their ids: {"b": 1, "a": 0} -> ["a", "b"]. Raises ValueError on gaps."""
    tokens = {i: token for token, i in ids.items() if isinstance(token, kind) and token and type(i) is int}
    if len(tokens) != len(ids) or sorted(tokens) != list(range(first, first + len(ids))):
        raise ValueError(f"its tokens are not {kind.__name__} with the ids {first}, {first + 1}, ... without gaps")
    return [tokens[first + i] for i in range(len(tokens))]


def byte_level(model: tokenizers.models.Model, patterns: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with a model of merges.

    Args:
        model: of characters that stand for bytes.
        patterns: split text before it, each the pieces of the one before; none: GPT-2's.
    """
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    core = tokenizers.Tokenizer(model)
    steps = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    core.pre_tokenizer = pre_tokenizers.Sequence([*steps, whole]) if patterns else whole
    core.decoder = decoders.ByteLevel()
    return core


def ranked(
    tokens: Sequence[bytes], names: Mapping[str, int], patterns: Sequence[str], first: int = 0
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE as tiktoken has it, in which the rank of a token is that of its merges.

    Args:
        tokens: in order of their ranks.
        names: other tokens and their ids, which are not parts of text.
        patterns: as in `byte_level`.
        first: id of the first of the tokens.

    Raises:
        ValueError: a byte has no token, tokens are too long, or names or ids occur twice.
    """
    from tokenizers import models

    if sum(len(token) ** 2 for token in tokens) > limits.MAX_MERGE_WORK:
        raise ValueError("it has tokens that are too long to find their merges")
    ids = {token: i for i, token in enumerate(tokens)}
    if missing := [i for i in range(256) if bytes([i]) not in ids]:
        raise ValueError(f"it has no token for the byte {missing[0]}")
    letters = {byte: char for char, byte in byte_alphabet().items()}
    spelled = {token: "".join(map(letters.__getitem__, token)) for token in tokens}
    merges = []
    for token in tokens:  # all pairs of tokens that make a token, in the order of the tokens that they make
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = sorted((p for p in pairs if p[0] in ids and p[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
        merges += [(spelled[begin], spelled[right]) for begin, right in pairs]
    vocabulary = {spelled[token]: first + i for token, i in ids.items()}
    if twice := sorted(names.keys() & vocabulary.keys()):
        raise ValueError(f"its special token {twice[0]!r} is also a token of text")
    vocabulary |= names
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ValueError("it has special tokens of the same id, or of that of a token of text")
    return byte_level(models.BPE(vocabulary, merges, ignore_merges=True), patterns)


def to_json(tokenizer: Tokenizer) -> str:
    """Return the content of the tokenizer.json for a tokenizer."""
    if isinstance(tokenizer, CharTokenizer):
        return char_to_json(tokenizer.chars)
    assert isinstance(tokenizer, GenericTokenizer)
    text: str = tokenizer.core.to_str()
    return text


def char_to_json(chars: Sequence[str]) -> str:
    """Return the tokenizer.json of a character-level vocabulary, written as a BPE without merges."""
    import tokenizers
    from tokenizers import decoders, models

    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(chars)}, merges=[]))
    core.decoder = decoders.Fuse()
    text: str = core.to_str()
    return text


def around(core: tokenizers.Tokenizer) -> tuple[int | None, tuple[int, ...]]:
    """Return the token that the post-processor of a tokenizer.json adds before a text, or None, and those after it.

    As in transformers and vLLM, the post-processor decides, not `add_bos_token` in tokenizer_config.json.
    """
    encoded = core.encode("a")
    mask: list[int] = encoded.special_tokens_mask
    before = mask.index(0) if 0 in mask else len(mask)
    after = mask[::-1].index(0) if 0 in mask else 0
    if any(mask[before:]) or before > 1:
        log.warning(
            "the tokenizer adds special tokens other than one start token to a text: only those after a text are used,"
            " for embeddings"
        )
    return encoded.ids[0] if before == 1 else None, tuple(encoded.ids[len(mask) - after :])


def surround(core: tokenizers.Tokenizer, first: tuple[str, int] | None, last: tuple[str, int] | None = None) -> None:
    """Let prompts begin with a token and embeddings end with one, given as strings and ids; None: with none.

    A tokenizer.json that is saved has the same.
    """
    from tokenizers import processors

    named = {name: token for name, token in (("bos", first), ("eos", last)) if token is not None}
    special: Any = [{"id": name, "ids": [token_id], "tokens": [token]} for name, (token, token_id) in named.items()]
    before, after = (["bos:0"] if first else []), (["eos:0"] if last else [])
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after], pair=[*before, "$A:0", "$B:0", *after], special_tokens=special
    )


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the text of every token id: equal for tokenizers of one kind with the same vocabulary."""
    if isinstance(tokenizer, CharTokenizer):
        tokens: list[object] = list(tokenizer.chars)
    elif isinstance(tokenizer, ByteLevelTokenizer):
        tokens = [list(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    else:
        tokens = [to_json(tokenizer)]
    return hashlib.sha256(json.dumps([type(tokenizer).__name__, tokens]).encode()).hexdigest()


MISSING = "\ufffd"
"""Text of an id in a gap of the vocabulary: it has no token string, but it can be sampled."""
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte token of a byte-fallback decoder


def no_text(token_id: int, vocab_size: int) -> NanoinferError:
    """Return the error about an id that a tokenizer does not have."""
    return NanoinferError(f"token id {token_id} has no text: the tokenizer has {vocab_size} tokens")


def spelled(core: tokenizers.Tokenizer, token_id: int, vocab_size: int) -> str | None:
    """Return the vocabulary's string for a token, None for an id in a gap: 262 -> 'Ġthe'."""
    if not 0 <= token_id < vocab_size:
        raise no_text(token_id, vocab_size)
    token: str | None = core.id_to_token(token_id)
    return token


class Utf8Stream:
    """Stream for tokens that are byte strings: an incremental UTF-8 decoder holds an incomplete character.

    Args:
        token_bytes: returns the bytes of a token.
        texts: of the tokens that `token_bytes` has returned, those that are whole characters; they need no decoder.
        vocab_size: number of tokens.
        prompt_token_ids: the tokens before.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        texts: Mapping[int, str],
        vocab_size: int,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._token_bytes, self._texts = token_bytes, texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= 3:  # an incomplete character has 3 bytes at most
                break
            known = 0 <= token_id < vocab_size
            tail = (token_bytes(token_id) if known else MISSING.encode()) + tail
        self._utf8.decode(tail)
        self._inside = bool(self._utf8.getstate()[0])  # a character
        self._shown = MISSING if self._inside else ""  # the prompt's text already shows U+FFFD for the tail

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that it completes, which later tokens cannot change.

        Raises:
            NanoinferError: the tokenizer has no token of this id.
        """
        if not self._inside and (text := self._texts.get(token_id)) is not None:
            return text
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence: an incomplete character as U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final=final)
        if text and self._shown:
            text, self._shown = text.removeprefix(self._shown), ""
        self._inside = bool(self._utf8.getstate()[0])
        return text


class SuffixStream:
    """Stream for any tokenizer: decode the last piece with and without the new tokens and emit the difference.

    text-generation-inference uses the same method. A piece begins and ends at a character boundary. A context of a
    fixed number of tokens could begin inside a character, and byte-fallback decoders would then decode the following
    bytes wrongly. Text that ends in U+FFFD may be an incomplete character and is held back for at most `_HOLD` tokens.
    """

    _HOLD = 8
    _MAX_BROKEN = 64  # tokens of a run of invalid bytes that are kept as context

    def __init__(self, core: tokenizers.Tokenizer, vocab_size: int, prompt_token_ids: Sequence[int]) -> None:
        self._core = core
        self._vocab_size = vocab_size
        self._ids = self._context(prompt_token_ids)  # tokens of the last piece, then those not emitted yet
        self._done = len(self._ids)  # tokens of the last piece
        self._max_context = self._done + self._MAX_BROKEN

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt, on which the decoding of the next tokens depends.

        Decoders omit the space before the first token, and they decode byte tokens in runs: one invalid byte makes its
        whole run invalid. So the context begins before the last run of bytes and has at least 4 tokens, the most
        that one character may have. A token without text ends the context, as in `push`.
        """
        start = len(prompt)
        while start > 0 and 0 <= prompt[start - 1] < self._vocab_size:
            token = self._core.id_to_token(prompt[start - 1])
            if token is None:
                break
            start -= 1
            if len(prompt) - start >= 4 and not BYTE_TOKEN.fullmatch(token):
                break
        return list(prompt[start:])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._core.decode(ids, skip_special_tokens=False)
        return text

    def _difference(self) -> tuple[str, bool]:
        """Return the text of the tokens after the last piece, and whether that piece may end inside a character."""
        before, after = self._decode(self._ids[: self._done]), self._decode(self._ids)
        kept = before
        while kept.endswith(MISSING) and not after.startswith(kept):
            kept = kept[:-1]  # U+FFFD of a character that the new tokens complete
        if not after.startswith(kept):  # an invalid byte invalidated the run of bytes before it
            return self._decode(self._ids[self._done :]), False
        return after[len(kept) :], before.endswith(MISSING)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that later tokens cannot change (whole characters). Raises as `Utf8Stream`."""
        if spelled(self._core, token_id, self._vocab_size) is None:
            return self.flush() + MISSING
        self._ids.append(token_id)
        text, inside = self._difference()
        if (not text or text.endswith(MISSING)) and len(self._ids) - self._done < self._HOLD:
            return ""
        if not inside or len(self._ids) > self._max_context:
            del self._ids[: self._done]
        self._done = len(self._ids)
        return text

    def flush(self) -> str:
        """Return the text that was held back; the next token is decoded without context."""
        text, _ = self._difference()
        self._ids, self._done = [], 0
        return text


DecodeStream = Utf8Stream | SuffixStream
"""Decodes the tokens of one sequence incrementally."""
