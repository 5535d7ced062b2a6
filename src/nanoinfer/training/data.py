"""Training data: read, split and tokenize text files; batches are functions of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.errors import NanoinferError
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.tokenizers.tokenizer import CharTokenizer, Tokenizer
from nanoinfer.utils.files import read_text


def read_texts(paths: Sequence[str]) -> list[str]:
    """Return the contents of text files. Raises NanoinferError for a file that is missing, empty or not UTF-8."""
    texts = []
    for path in map(Path, paths):
        text = read_text(path, "training data")
        if not text:
            raise NanoinferError(f"data file {path} is empty")
        texts.append(text)
    return texts


def split_texts(texts: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Split every text; the last `val_fraction` of its characters is held out.

    The split is by characters, so that the held-out text is the same for every tokenizer and is not used to train the
    tokenizer.
    """
    cuts = [int(len(t) * (1 - val_fraction)) for t in texts]
    return [t[:c] for t, c in zip(texts, cuts, strict=True)], [t[c:] for t, c in zip(texts, cuts, strict=True)]


def train_bpe(texts: Sequence[str], vocab_size: int) -> str:
    """Return the tokenizer.json of a byte-level BPE trained on `texts`. It can encode any UTF-8 text."""
    from tokenizers import models, pre_tokenizers, trainers

    core = tokenizers.byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    text: str = core.to_str()
    return text


def make_tokenizer(kind: str, train: Sequence[str], val: Sequence[str], vocab_size: int) -> tuple[Tokenizer, str]:
    """Return a new tokenizer and its tokenizer.json.

    Args:
        kind: char (all characters of the data, including the held-out texts) or bpe (trained on `train` only).
        vocab_size: of a BPE.
    """
    if kind == "char":
        chars = sorted(set("".join([*train, *val])))
        return CharTokenizer(chars), tokenizers.char_to_json(chars)
    text = train_bpe(train, vocab_size)
    return tokenizers.from_json(text, "the new tokenizer"), text


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], eos_token_id: int | None) -> Tensor:
    """Return the texts as one int64 tensor of tokens; the end-of-text token, if there is one, follows each text."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text)
        if eos_token_id is not None:
            ids.append(eos_token_id)
    return torch.tensor(ids, dtype=torch.int64)


def evenly_spread(count: int, block_size: int, max_tokens: int) -> Tensor:
    """Return evenly spread window indices with at most `max_tokens` tokens, at least one window.

    evenly_spread(6, 10, 30)  ->  [0, 2, 4]
    """
    keep = max(1, min(count, max_tokens // block_size))
    return torch.arange(keep) * count // keep


@dataclass(frozen=True)
class Batches:
    """Random or consecutive windows of a token tensor."""

    tokens: Tensor
    block_size: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < self.block_size + 1:
            raise NanoinferError(
                f"the training or validation part of the data has {len(self.tokens)} tokens; a window needs"
                f" block_size + 1 = {self.block_size + 1}: use more data or a smaller block_size"
            )

    def draw(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (batch_size, block_size) int64, of one step: a function of (seed, step)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - self.block_size, (batch_size, 1), generator=generator)
        window = self.tokens[starts + torch.arange(self.block_size + 1)]  # (batch_size, block_size + 1)
        return window[:, :-1], window[:, 1:]

    def sweep(self, max_tokens: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of evenly spread, disjoint windows: at most `max_tokens` tokens, at least one window."""
        count = (len(self.tokens) - 1) // self.block_size
        starts = (evenly_spread(count, self.block_size, max_tokens) * self.block_size)[:, None]
        windows = self.tokens[starts + torch.arange(self.block_size + 1)]
        for chunk in torch.split(windows, batch_size):
            yield chunk[:, :-1], chunk[:, 1:]
