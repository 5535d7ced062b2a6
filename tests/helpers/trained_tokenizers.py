"""Small tokenizers of every kind, trained in the process."""

from __future__ import annotations

from functools import cache

import tokenizers as hf
from nanoinfer.tokenizers.tokenizer import ByteLevelTokenizer, Tokenizer, from_json
from nanoinfer.training.data import train_bpe
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "  two  spaces\t\ttabs \r\n\n trailing   ",
    "naïve café Ünïcödé ßẞ İı ﬁ",
    "日本語のテキスト、中文字符，한국어",
    "🎉🎊👩‍👩‍👧‍👦🇩🇪 emoji 😀😃 and \u200b zero width \ufeff",
    "I'll we've he'd DON'T it's 1234567890 3.14 x=y**2; // !!??...",
    "\x00\x01\x1f\x7f\x80\x9f\xa0\u2028\u2029",
    "a",
    "",
]


@cache
def bpe() -> ByteLevelTokenizer:
    tokenizer = from_json(train_bpe([*TEXTS, *TEXTS], 320), "bpe")
    assert isinstance(tokenizer, ByteLevelTokenizer)
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    core = hf.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    return from_json(core.to_str(), "WordPiece")


@cache
def unigram() -> Tokenizer:
    core = hf.Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    return from_json(core.to_str(), "Unigram")


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece's BPE as Llama has it: characters outside the vocabulary become one token a byte."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": 1 + b for b in range(256)}, "▁": 257, "a": 258, "b": 259, "▁a": 260}
    core = hf.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return from_json(core.to_str(), "byte fallback")
