"""The bytes of each token, from which llguidance computes the tokens that a grammar permits."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from nanoinfer.tokenizers.tokenizer import BYTE_TOKEN, ByteLevelTokenizer, CharTokenizer, GenericTokenizer, Tokenizer

if TYPE_CHECKING:
    import llguidance

    import tokenizers


def build(tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int]) -> llguidance.LLTokenizer:
    """Return llguidance's table of a vocabulary: ids 0 to vocab_size - 1, and vocab_size as the only end token.

    The model's own end tokens cannot stand for the end: a request may ignore them or have others.

    Args:
        tokenizer: of the model.
        vocab_size: number of tokens that may be sampled.
        end_token_ids: of the model; they have no text that a grammar could permit.
    """
    import llguidance

    from nanoinfer.structured.check_worker import TokenTable

    tokens = _bytes(tokenizer, vocab_size)
    named = special_tokens(tokenizer, vocab_size).values()
    for token_id in named:
        tokens[token_id] = b"<special_%d>" % token_id
    special = sorted({*named, *end_token_ids})
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(TokenTable([*tokens, b"<end>"], [*special, vocab_size])))


def special_tokens(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """Return text -> id of a tokenizer's special tokens. In grammars they are <special_ID>, and match no text."""
    return {text: i for i, text in tokenizer.special_tokens.items() if i < vocab_size}


def _bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each token adds to a text; none for an id in a gap of the vocabulary."""
    if isinstance(tokenizer, CharTokenizer):
        return [c.encode() for c in tokenizer.chars[:vocab_size]]
    assert isinstance(tokenizer, GenericTokenizer)
    spelled = [tokenizer.core.id_to_token(i) for i in range(vocab_size)]
    if isinstance(tokenizer, ByteLevelTokenizer):
        return [b"" if token is None else tokenizer.token_bytes(i) for i, token in enumerate(spelled)]
    context = next((i for i, token in enumerate(spelled) if token is not None and token.isalpha()), 0)
    return [b"" if token is None else _added(tokenizer.core, context, i, token) for i, token in enumerate(spelled)]


def _added(core: tokenizers.Tokenizer, context: int, token_id: int, token: str) -> bytes:
    """Return what the decoder adds for a token after another one: "▁the" -> b" the"; "<0xE2>" -> b"\xe2"."""
    before: str = core.decode([context], skip_special_tokens=False)
    after: str = core.decode([context, token_id], skip_special_tokens=False)
    if not after.startswith(before):  # a decoder that changes the text before
        return b""
    text = after[len(before) :]
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte is not None and text != token else text.encode()
