"""Tokenizers: text to token ids and back, and streams that never emit half a character.

Three kinds, one interface (`Tokenizer`):

- `ByteLevelTokenizer`: GPT-2's and the built-in models' kind; `tokenizer.json` through the tokenizers library.
- `CharTokenizer`: one token a character, nanoGPT's `meta.pkl` and `nanoinfer train --tokenizer char`.
- `GenericTokenizer`: any other `tokenizer.json` (WordPiece, SentencePiece): decoded by re-decoding a suffix.

Covered: any file that the tokenizers library loads. Not covered: SentencePiece's own `.model` files, and
tokenizers that are Python code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nanoinfer.errors import NanoinferError
from nanoinfer.files import escaped, parse_json, read_limited, reason
from nanoinfer.models.text_streams import MISSING, CharStream, DecodeStream, SuffixStream, Utf8Stream, spelled
from nanoinfer.models.tokenizer_limits import MAX_VOCAB_SIZE, check_growth

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 128 << 20  # GPT-2's tokenizer.json has 1.3 MB, the largest known 60


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. Raises NanoinferError for text that has no tokens here."""
        ...

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a new stream for the tokens that follow a prompt.

        Prompt text and streamed text make the text of all tokens, the space between two words included:

            text of [▁the] = "the"    stream([▁the]).push(▁engine) = " engine"    text of [▁the, ▁engine] = "the engine"

        Two exceptions. The text of a prompt that ends inside a character ends with U+FFFD, and the stream begins with
        the whole character. A byte that makes complete characters before it invalid cannot take back what was emitted.
        """
        ...


def decode(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
    stream = tokenizer.stream()
    return "".join(map(stream.push, token_ids)) + stream.flush()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte-to-character table, inverted: "A" -> 65, "Ġ" -> 32.

    Printable Latin-1 bytes stand for themselves; the 68 others are moved to U+0100 and up, in order
    (Radford et al. 2019, encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


class ByteLevelTokenizer:
    """GPT-2's kind of BPE: every token is a string of bytes, every text has tokens."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self.core = core
        self.vocab_size = _table_size(core)
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _byte_alphabet()
        self._special = {i: t.content for i, t in core.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return _encode(self.core, text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token: 'Ġthe' -> b' the', an added token -> its own text."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
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
        return Utf8Stream(self.token_bytes, self.vocab_size, prompt_token_ids)


class CharTokenizer:
    """One token a character. A character outside the vocabulary is an error that names it.

    Raises:
        NanoinferError: there are no characters, or one of them is a lone surrogate, which no text can hold.
    """

    def __init__(self, chars: Sequence[str]) -> None:
        if not chars:
            raise NanoinferError("the vocabulary is empty: a tokenizer needs at least one character")
        if lone := [c for c in chars if any("\ud800" <= x <= "\udfff" for x in c)]:
            raise NanoinferError(f"the vocabulary holds {lone[0]!r}, a lone surrogate, which is no character")
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self._ids = {c: i for i, c in enumerate(self.chars)}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        try:
            return [self._ids[c] for c in text]
        except KeyError as e:
            raise NanoinferError(
                f"character {e.args[0]!r} is not among the {self.vocab_size} that this character-level model"
                " knows: leave it out, or use a model with a byte-level tokenizer"
            ) from None

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a new stream for the tokens that follow a prompt."""
        return CharStream(self.chars)


class GenericTokenizer:
    """Any other tokenizer.json."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self.core = core
        self.vocab_size = _table_size(core)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return _encode(self.core, text)

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Return a new stream for the tokens that follow a prompt."""
        return SuffixStream(self.core, self.vocab_size, prompt_token_ids)


def _table_size(core: tokenizers.Tokenizer) -> int:
    """Return 1 + the largest token id: ids may have gaps, and added tokens may come after them."""
    ids = core.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise NanoinferError("the vocabulary is empty: a tokenizer needs at least one token")
    if (size := 1 + max(ids)) > MAX_VOCAB_SIZE:
        raise NanoinferError(f"token id {size - 1} is too large: ids must be less than {MAX_VOCAB_SIZE}")
    return size


def _encode(core: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as e:  # lone surrogates: bytes that were no UTF-8
        raise NanoinferError(f"the text is not valid Unicode ({e}): give UTF-8 text") from None
    with _explained("the text cannot be encoded"):
        ids: list[int] = core.encode(text, add_special_tokens=False).ids
    return ids


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn every error into a NanoinferError: the library raises bare Exception, and its Rust code may panic."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise  # KeyboardInterrupt and its like
        raise NanoinferError(f"{what}: {reason(e)}") from None


def from_json(text: str, source: str) -> Tokenizer:
    """Return the tokenizer that the text of a `tokenizer.json` describes.

    Its truncation and padding are left out: they would drop tokens of a prompt, or add some, in silence.

    Args:
        text: the file's content.
        source: the file's name, for error messages.

    Raises:
        NanoinferError: it is none, or may lengthen a text without bound (tokenizer_limits.py).
    """
    import tokenizers

    complaint = f"{escaped(source)} is no tokenizer.json that can be read"
    spec = parse_json(text, complaint)
    with _explained(complaint):
        check_growth(spec)
        if spec.get("truncation") is not None or spec.get("padding") is not None:
            text = json.dumps(spec | {"truncation": None, "padding": None})
        kind, decoder = spec["model"].get("type"), (spec.get("decoder") or {}).get("type")
        if kind == "BPE" and decoder == "Fuse" and not spec["model"]["merges"]:  # written by `char_to_json`
            return CharTokenizer(_in_order(spec["model"]["vocab"]))
        core = tokenizers.Tokenizer.from_str(text)
        return ByteLevelTokenizer(core) if decoder == "ByteLevel" else GenericTokenizer(core)


def from_file(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json."""
    raw = read_limited(path, MAX_TOKENIZER_BYTES, "a tokenizer")
    try:
        return from_json(raw.decode(), str(path))
    except UnicodeDecodeError as e:
        raise NanoinferError(f"{escaped(path)} is not UTF-8 (byte {e.start}: {e.reason})") from None


def _in_order(vocab: dict[str, int]) -> list[str]:
    """Return the characters by id: {"b": 1, "a": 0} -> ["a", "b"]. Raises ValueError for ids with gaps."""
    chars = {i: c for c, i in vocab.items()}
    if sorted(chars) != list(range(len(vocab))):
        raise ValueError("token ids are not 0, 1, 2, ... without gaps")
    return [chars[i] for i in range(len(chars))]


def from_folder(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a Hugging Face folder (tokenizer.json, or vocab.json with merges.txt), if any."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if (path := folder / "tokenizer.json").is_file():
        return from_file(path)
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        return None
    complaint = f"{escaped(vocab)} and {escaped(merges)} are no BPE tables"
    ids = parse_json(read_limited(vocab, MAX_TOKENIZER_BYTES, "a vocabulary"), complaint)
    raw = read_limited(merges, MAX_TOKENIZER_BYTES, "a table of merges")
    with _explained(complaint):
        lines = [line for line in raw.decode().split("\n") if line and not line.startswith("#version")]
        pairs = [(left, right) for left, right in (line.rstrip("\r").split(" ") for line in lines)]
        core = tokenizers.Tokenizer(models.BPE(ids, pairs))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        if (eot := core.token_to_id("<|endoftext|>")) is not None:
            core.add_special_tokens([core.id_to_token(eot)])
        return ByteLevelTokenizer(core)


def to_json(tokenizer: Tokenizer) -> str:
    """Return the tokenizer.json of a tokenizer."""
    if isinstance(tokenizer, CharTokenizer):
        return char_to_json(tokenizer.chars)
    assert isinstance(tokenizer, (ByteLevelTokenizer, GenericTokenizer))
    text: str = tokenizer.core.to_str()
    return text


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether every token id stands for the same text in both."""
    if type(a) is not type(b) or a.vocab_size != b.vocab_size:
        return False
    if isinstance(a, CharTokenizer) and isinstance(b, CharTokenizer):
        return a.chars == b.chars
    if isinstance(a, ByteLevelTokenizer) and isinstance(b, ByteLevelTokenizer):
        return a.core is b.core or all(a.token_bytes(i) == b.token_bytes(i) for i in range(a.vocab_size))
    return to_json(a) == to_json(b)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of what every token id stands for: equal where `same_vocabulary` holds."""
    if isinstance(tokenizer, CharTokenizer):
        tokens: list[object] = list(tokenizer.chars)
    elif isinstance(tokenizer, ByteLevelTokenizer):
        tokens = [list(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    else:
        tokens = [to_json(tokenizer)]
    return hashlib.sha256(json.dumps([type(tokenizer).__name__, tokens]).encode()).hexdigest()


def char_to_json(chars: Sequence[str]) -> str:
    """Return a tokenizer.json for a character-level vocabulary: BPE without merges."""
    import tokenizers
    from tokenizers import decoders, models

    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(chars)}, merges=[]))
    core.decoder = decoders.Fuse()
    text: str = core.to_str()
    return text
