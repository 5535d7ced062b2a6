"""A hash of a vocabulary, by which a draft head knows the tokenizer that it was trained with."""

from __future__ import annotations

import hashlib
import json

from nanoinfer.tokenizers.tokenizer import ByteLevelTokenizer, CharTokenizer, Tokenizer, to_json


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash of the text of every token id: equal for tokenizers of one kind with the same vocabulary."""
    if isinstance(tokenizer, CharTokenizer):
        tokens: list[object] = list(tokenizer.chars)
    elif isinstance(tokenizer, ByteLevelTokenizer):
        tokens = [list(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    else:
        tokens = [to_json(tokenizer)]
    return hashlib.sha256(json.dumps([type(tokenizer).__name__, tokens]).encode()).hexdigest()
