"""Folders of the measured models, which all backends load from, with passages of natural text for prompts.

A temporary folder is removed at the end of the run. Passages come from a file (`--text`: held-out text of the model's
kind), or without one from the model itself, which samples them at temperature 1: the acceptance of a draft depends on
the text, random tokens would not do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from nanoinfer.bench.case import Case, Passages
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import read_text

NUM_PASSAGES = 64
PASSAGE_TOKENS = 256
PASSAGES = "passages.json"
PREFIX = "nanoinfer-bench-"


class ModelFolders(ExitStack):
    """The folders of the models that a call measures, each written once, with passages from `text` or the model.

    Those with random weights remain in the folder `keep`, if there is one, for other calls.
    """

    def __init__(self, text: Path | None, log: Callable[[str], None], keep: Path | None = None) -> None:
        super().__init__()
        self._text, self._log, self._keep = text, log, keep
        self._folders: dict[str, Path] = {}

    def folder(self, cases: list[Case]) -> Path:
        """Return the folder for some cases of one model, with passages for prompts if a case needs them."""
        from nanoinfer.checkpoints import huggingface
        from nanoinfer.checkpoints.load import load_model

        model = cases[0].model
        if model not in self._folders:
            keep = self._keep if model.startswith("random:") else None
            folder = (
                Path(self.enter_context(TemporaryDirectory(prefix=PREFIX)))
                if keep is None
                else keep / model.replace(":", "-")
            )
            self._folders[model] = folder
            if not (folder / "config.json").exists():  # float32, which every backend loads or exports from
                huggingface.save(load_model(model).take(), folder)
        folder = self._folders[model]
        if any(c.workload in ("text", "copy") for c in cases) and not read_passages(folder):
            self._log("preparing passages for prompts ...")
            write_passages(folder, model, self._text)
        return folder


def write_passages(folder: Path, model: str, text: Path | None) -> None:
    """Write passages for a model into a folder; raise NanoinferError if it cannot tokenize the text."""
    (folder / PASSAGES).write_text(json.dumps(_sample(model) if text is None else _cut(model, text)))


def read_passages(folder: Path) -> Passages:
    """Return a folder's passages; none if it has no file of them."""
    passages: Passages = json.loads(path.read_text()) if (path := folder / PASSAGES).is_file() else ()
    return passages


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
