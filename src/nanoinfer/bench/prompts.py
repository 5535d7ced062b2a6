"""Prompts of natural text: passages, cut to length, or repeated with edits.

They come from a file (`--text`: held-out text of the model's kind), or without one from the model itself, which
samples them at temperature 1. Random tokens would do for speed, but the acceptance of a draft depends on the text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import read_text

Passages = Sequence[Sequence[int]]

NUM_PASSAGES = 64
PASSAGE_TOKENS = 256
FILE = "passages.json"
SHARE_REPEATED = 4 / 7  # of a repeating prompt: the passage itself; the rest is its beginning again, edited
EDIT_EVERY = 15


def write(folder: Path, model: str, text: Path | None) -> None:
    """Write passages for a model into a folder; raise NanoinferError if it cannot tokenize the text."""
    (folder / FILE).write_text(json.dumps(_sample(model) if text is None else _cut(model, text)))


def read(folder: Path) -> Passages:
    """Return a folder's passages; none if it has no file of them."""
    found: Passages = json.loads(path.read_text()) if (path := folder / FILE).is_file() else ()
    return found


def cut_prompt(passages: Passages, i: int, num_tokens: int) -> list[int]:
    """Return the first tokens of passage i."""
    return list(passages[i % len(passages)][:num_tokens])


def repeat_prompt(passages: Passages, i: int, num_tokens: int) -> list[int]:
    """Return a passage and its beginning again, with every 15th token replaced: what follows occurred before."""
    whole = list(passages[i % len(passages)])
    first = whole[: int(num_tokens * SHARE_REPEATED)]
    again = [whole[(7 * at) % len(whole)] if at % EDIT_EVERY == EDIT_EVERY - 1 else t for at, t in enumerate(first)]
    return [*first, *again][:num_tokens]


def _cut(model: str, text: Path) -> list[list[int]]:
    """Return passages from random places of a text."""
    from nanoinfer.checkpoints.load import load_model

    loaded = load_model(model)
    if loaded.tokenizer is None:
        raise NanoinferError(f"--text: {loaded.no_tokenizer_reason}")
    ids = loaded.tokenizer.encode(read_text(text, "--text"))
    if len(ids) < 2 * PASSAGE_TOKENS:
        raise NanoinferError(f"--text {text} has {len(ids)} tokens: give {2 * PASSAGE_TOKENS} or more")
    places = random.Random(0)
    starts = [places.randrange(len(ids) - PASSAGE_TOKENS) for _ in range(NUM_PASSAGES)]
    return [ids[at : at + PASSAGE_TOKENS] for at in starts]


def _sample(model: str) -> list[list[int]]:
    """Return passages that the model samples; for a widened model its source samples the same, in less time.

    This runs on the CPU for every device: the prompts are the same, and no GPU memory stays allocated.
    """
    from nanoinfer.checkpoints.load import split_wide
    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.sampling_params import SamplingParams

    source = split_wide(model)[0] if model.startswith("wide:") else model
    llm = LLM(source, device="cpu")
    start = [llm.config.bos_token_id or 0]
    params = SamplingParams(max_tokens=PASSAGE_TOKENS, n=NUM_PASSAGES, ignore_eos=True, seed=0, overflow="slide")
    (output,) = llm.generate([start], [params])
    return [o.token_ids for o in output.check().outputs]
