"""The tokens that a tokenizer adds before a prompt, and after a text of which an embedding is made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger("nanoinfer")


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


def prepend(core: tokenizers.Tokenizer, token: str, token_id: int) -> None:
    """Let prompts begin with a token. A tokenizer.json that is saved says the same."""
    surround(core, (token, token_id), None)


def surround(core: tokenizers.Tokenizer, first: tuple[str, int] | None, last: tuple[str, int] | None) -> None:
    """Let prompts begin with a token and embeddings end with one, given as strings and ids; None: with none."""
    from tokenizers import processors

    named = {name: token for name, token in (("bos", first), ("eos", last)) if token is not None}
    special: Any = [{"id": name, "ids": [token_id], "tokens": [token]} for name, (token, token_id) in named.items()]
    before, after = (["bos:0"] if first else []), (["eos:0"] if last else [])
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after], pair=[*before, "$A:0", "$B:0", *after], special_tokens=special
    )
